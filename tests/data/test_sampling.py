from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from pfml.data.sampling import BalancedBatches, EpochBatches, NeighborBatches, RandomBatches

LABELS = torch.tensor([0] * 3 + [1] * 20 + [2] * 8 + [4] * 9 + [7] * 17)  # classes of unequal size, with gaps


def samplers() -> list[EpochBatches]:
    return [RandomBatches(57, 8, seed=3), BalancedBatches(LABELS, 3, 4, seed=3), neighbor_batches(seed=3)]


def neighbor_batches(seed: int = 0) -> NeighborBatches:
    """Of two anchors and their neighbors; classes are near by number, and those without images are not left out."""
    sampler = NeighborBatches(LABELS, 4, 2, 1, seed=seed)
    sampler.nearest = torch.tensor([sorted(set(range(8)) - {c}, key=lambda k: (abs(k - c), k)) for c in range(8)])
    return sampler


def test_random_batches_hold_each_image_at_most_once_per_epoch() -> None:
    batches = RandomBatches(57, 8, seed=0).batches(0)
    assert [len(batch) for batch in batches] == [8] * 7
    assert len(set(torch.cat(batches).tolist())) == 56
    left_out = {(set(range(57)) - set(torch.cat(RandomBatches(57, 8).batches(e)).tolist())).pop() for e in range(20)}
    assert len(left_out) > 5  # not always the same image


@pytest.mark.parametrize("sampler", samplers(), ids=lambda sampler: type(sampler).__name__)
def test_batches_are_a_function_of_seed_and_epoch(sampler: EpochBatches) -> None:
    first = torch.stack(sampler.batches(2))
    assert torch.equal(first, torch.stack(sampler.batches(2)))
    assert not torch.equal(first, torch.stack(sampler.batches(3)))
    sampler.seed = 4
    assert not torch.equal(first, torch.stack(sampler.batches(2)))
    sampler.seed = 3
    torch.manual_seed(99)  # nor of torch's own generator
    assert torch.equal(first, torch.stack(sampler.batches(2)))
    assert len(first) == len(sampler) == 57 // sampler.batch_size
    assert first.dtype == torch.int64


@pytest.mark.parametrize("count", [2, 30])
def test_an_epoch_may_have_a_number_of_batches_of_its_own(count: int) -> None:
    for sampler, usual in zip(samplers(), samplers(), strict=True):
        sampler.per_epoch = count
        batches = sampler.batches(1)
        assert len(batches) == len(sampler) == len(list(sampler)) == count
        for mine, theirs in zip(batches, usual.batches(1), strict=False):
            assert torch.equal(mine, theirs)  # one pass over the images comes first
    passes = RandomBatches(57, 8, seed=0, per_epoch=14).batches(0)
    assert all(len(set(torch.cat(part).tolist())) == 56 for part in (passes[:7], passes[7:]))
    assert len(BalancedBatches(LABELS, 3, 4, per_epoch=count)) == count


def test_balanced_batches_have_p_classes_and_k_images_of_each() -> None:
    for batch in BalancedBatches(LABELS, 3, 4, seed=0).batches(0) + BalancedBatches(LABELS, 3, 4, seed=1).batches(5):
        counts = Counter(LABELS[batch].tolist())
        assert sorted(counts.values()) == [4, 4, 4]
        for image, times in Counter(batch.tolist()).items():
            assert times == 1 or LABELS[image] == 0  # only the class of three images repeats one


def test_a_class_with_too_few_images_gives_all_of_them_before_it_repeats_one() -> None:
    visits = [
        batch[LABELS[batch] == 0]
        for epoch in range(5)
        for batch in BalancedBatches(LABELS, 3, 4, seed=0).batches(epoch)
        if (LABELS[batch] == 0).any()
    ]
    assert visits
    assert all(sorted(Counter(visit.tolist()).values()) == [1, 1, 2] for visit in visits)


def test_an_image_comes_again_only_when_its_class_has_run_out() -> None:
    labels = torch.arange(4).repeat_interleave(torch.tensor([5, 40, 11, 30]))
    for epoch in range(4):
        drawn = torch.cat(BalancedBatches(labels, 2, 3, seed=1).batches(epoch))
        for label in range(4):
            counts = torch.bincount(drawn[labels[drawn] == label], minlength=86)[labels == label]
            assert counts.max() - counts.min() <= 1


def test_classes_come_in_rounds() -> None:
    labels = torch.arange(10).repeat_interleave(12)
    for epoch in range(3):
        visited = [labels[batch].unique().tolist() for batch in BalancedBatches(labels, 4, 3, seed=0).batches(epoch)]
        counts = Counter(label for classes in visited for label in classes)
        assert len(visited) == 10
        assert set(counts.values()) == {4}


@pytest.mark.parametrize("position", [0, 1, 3, 4, 7, 8, 9])
@pytest.mark.parametrize("which", [0, 1])
def test_iteration_resumes_in_the_middle_of_an_epoch(which: int, position: int) -> None:
    uninterrupted = samplers()[which]
    expected = [batch for _ in range(4) for batch in uninterrupted]
    interrupted, state, seen = samplers()[which], {}, []
    while len(seen) < position:
        for batch in interrupted:
            seen.append(batch)
            if len(seen) == position:
                break
    state = interrupted.state_dict()
    resumed = samplers()[which]
    resumed.load_state_dict(state)
    while len(seen) < len(expected):
        before = len(seen)
        seen += list(resumed)
        assert len(seen) > before  # no empty epoch
    assert seen == expected
    assert resumed.state_dict() == uninterrupted.state_dict() == {**state, "epoch": 4, "position": 0}


def test_one_pass_is_one_epoch_and_equals_batches() -> None:
    for sampler in samplers():
        assert list(sampler) == [batch.tolist() for batch in sampler.batches(0)]
        assert list(sampler) == [batch.tolist() for batch in sampler.batches(1)]


def test_a_data_loader_takes_them_as_batch_sampler() -> None:
    sampler = BalancedBatches(LABELS, 3, 4, seed=0)
    loader = DataLoader(LABELS.tolist(), batch_sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 4
    assert [labels.tolist() for labels in loader] == [LABELS[batch].tolist() for batch in sampler.batches(0)]


def test_the_state_of_other_batches_is_refused() -> None:
    state = RandomBatches(57, 8, seed=3).state_dict()
    with pytest.raises(ValueError, match="the stored batches have seed=3, these have 4"):
        RandomBatches(57, 8, seed=4).load_state_dict(state)
    with pytest.raises(ValueError, match="the stored batches have num_images=57, these have 58"):
        RandomBatches(58, 8, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="the stored batches have per_epoch=None, these have 5"):
        RandomBatches(57, 8, seed=3, per_epoch=5).load_state_dict(state)
    older = {name: value for name, value in state.items() if name != "per_epoch"}
    RandomBatches(57, 8, seed=3).load_state_dict(older)
    with pytest.raises(ValueError, match="kind='RandomBatches', these have 'BalancedBatches'"):
        BalancedBatches(LABELS, 3, 4, seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="samples_per_class=4, these have 2"):
        BalancedBatches(LABELS, 3, 2).load_state_dict(
            {**BalancedBatches(LABELS, 3, 4).state_dict(), "batch_size": 6, "seed": 0}
        )


def test_impossible_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="classes_per_batch must not exceed the 5 classes that have images, got 6"):
        BalancedBatches(LABELS, 6, 2)
    with pytest.raises(ValueError, match="batch_size must not exceed the 57 images, got 60"):
        RandomBatches(57, 60)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        RandomBatches(57, 0)
    with pytest.raises(ValueError, match="per_epoch must be at least 1 or None, got 0"):
        RandomBatches(57, 8, per_epoch=0)
    with pytest.raises(ValueError, match="must be at least 1, got 3 and 0"):
        BalancedBatches(LABELS, 3, 0)


def test_neighbor_batches_bring_the_nearest_free_classes_of_their_anchors() -> None:
    nearest = {0: [1, 2, 4, 7], 1: [0, 2, 4, 7], 2: [1, 0, 4, 7], 4: [2, 1, 7, 0], 7: [4, 2, 1, 0]}
    seen = Counter()
    for epoch in range(4):
        for batch in neighbor_batches().batches(epoch):
            first, second, *brought = LABELS[batch].reshape(4, 2)[:, 0].tolist()
            assert sorted(Counter(LABELS[batch].tolist()).values()) == [2, 2, 2, 2]
            assert brought[0] == next(c for c in nearest[first] if c != second)
            assert brought[1] == next(c for c in nearest[second] if c not in (first, brought[0]))
            seen.update([first, second])
    assert max(seen.values()) - min(seen.values()) <= 4  # anchors come in rounds, one more or less in each epoch


def test_neighbor_batches_follow_what_is_near() -> None:
    sampler = neighbor_batches()
    before = torch.stack(sampler.batches(0))
    sampler.nearest = sampler.nearest.flip(1)
    assert not torch.equal(torch.stack(sampler.batches(0)), before)
    sampler.nearest = None
    assert torch.equal(torch.stack(sampler.batches(0)), torch.stack(BalancedBatches(LABELS, 4, 2).batches(0)))


@pytest.mark.parametrize("neighbors", [0, 2])
def test_neighbors_and_their_anchor_must_divide_the_classes_of_a_batch(neighbors: int) -> None:
    with pytest.raises(ValueError, match=r"classes_per_batch must be a multiple of neighbors \+ 1, got 4 and"):
        NeighborBatches(LABELS, 4, 2, neighbors)
