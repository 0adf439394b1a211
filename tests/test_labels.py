import pytest
import torch

from pfml import LabelMap


@pytest.mark.parametrize("values", [["b", "a", "c", "a"], [7, -3, 1000, -3], torch.tensor([7, -3, 1000, -3])], ids=str)
def test_labels_of_any_kind_become_contiguous_and_come_back(values):
    labels = LabelMap(values)
    encoded = labels.encode(values)
    assert encoded.dtype == torch.int64
    assert sorted(set(encoded.tolist())) == list(range(len(labels))) == [0, 1, 2]
    assert labels.decode(encoded) == (values.tolist() if isinstance(values, torch.Tensor) else values)


def test_an_unknown_label_is_named_with_its_place():
    with pytest.raises(ValueError, match="label 'x' at index 1 is not among the 2 classes"):
        LabelMap(["a", "b"]).encode(["a", "x"])


def test_labels_of_mixed_kinds_are_refused():
    with pytest.raises(TypeError, match="labels must be of one kind so that they can be sorted, got int, str"):
        LabelMap(["a", 1])
