"""A run opened once for the command line, the server and a bundle."""

import pytest
import torch

from pfml.models import load_embedder
from pfml.search import ModelIdentity, OtherModelError, open_run
from small_runs import save_index, save_model, save_run


def test_a_run_opens_with_embedder_index_threshold_and_field(tmp_path):
    save_run(tmp_path / "run")
    opened = open_run(tmp_path / "run", device="cpu")
    assert opened.model == opened.gallery.model == opened.threshold.model
    assert opened.model == ModelIdentity.of(load_embedder(tmp_path / "run"))
    assert opened.field().proxies.shape[2] == opened.gallery.dimension
    assert not opened.embedder.training


def test_an_index_is_required_unless_it_is_not(tmp_path):
    save_model(tmp_path / "a run" / "model")
    with pytest.raises(FileNotFoundError, match=r"must hold an index, .*: make one with pfml index '.*a run' FOLDER"):
        open_run(tmp_path / "a run")
    opened = open_run(tmp_path / "a run", require_index=False, device="cpu")
    assert opened.index is opened.threshold is opened.field() is None
    with pytest.raises(ValueError, match="must have an index to be searched, and has none"):
        opened.gallery  # noqa: B018


def test_an_index_or_a_threshold_of_another_model_is_refused(tmp_path):
    embedder = save_run(tmp_path / "run")
    with torch.no_grad():
        next(embedder.parameters()).mul_(1.001)
    embedder.save(tmp_path / "run" / "model")
    with pytest.raises(OtherModelError, match="the index .*run/index belongs to"):
        open_run(tmp_path / "run")
    save_index(tmp_path / "other" / "index", embedder)
    with pytest.raises(OtherModelError, match=r"the threshold .*threshold\.json belongs to"):
        open_run(tmp_path / "run", index=tmp_path / "other" / "index")
