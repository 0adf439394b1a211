"""Checkpoints: whole, sealed, written in the background, and moments in the memory format of their parameters."""

import json
import threading
from dataclasses import replace

import pytest
import torch

from pfml.runs import checkpoint
from pfml.runs.checkpoint import CHECKPOINT, CheckpointWriter, by_prefix, load_checkpoint, save_checkpoint
from pfml.storage.files import DamagedFileError
from pfml.training import OptimizerConfig, train
from pfml.training.optimizer import create_optimizer, pack_optimizer, unpack_optimizer
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

TENSORS = {"embedder/weight": torch.arange(6.0).view(2, 3), "generator/cpu": torch.arange(5, dtype=torch.uint8)}


def save(folder, step=7):
    save_checkpoint(folder, TENSORS, {"step": step, "history": [{"loss": 1.5}]})


def test_what_was_saved_comes_back(tmp_path):
    save(tmp_path)
    tensors, state = load_checkpoint(tmp_path)
    assert state == {"step": 7, "history": [{"loss": 1.5}]}
    assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)


def test_only_the_newest_checkpoint_is_kept(tmp_path):
    (tmp_path / ".last-1.partial").write_bytes(b"left by a kill")
    for step in (1, 2, 2):
        save(tmp_path, step)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".safetensors"]
    assert load_checkpoint(tmp_path)[1]["step"] == 2


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr("pfml.storage.manifest.write_atomically", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        save(tmp_path, 2)
    assert load_checkpoint(tmp_path)[1]["step"] == 1


def test_no_checkpoint_is_said_in_words(tmp_path):
    with pytest.raises(FileNotFoundError, match="must hold a checkpoint"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("where", [0, 50, -1])
def test_a_flipped_byte_in_the_tensors_is_refused_by_name(tmp_path, where):
    save(tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFileError, match=path.name):
        load_checkpoint(tmp_path)


def test_a_changed_manifest_is_refused_by_name(tmp_path):
    save(tmp_path)
    path = tmp_path / "last.json"
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))
    with pytest.raises(DamagedFileError, match="last.json does not match its own checksum"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}", "not json", '{"content": {}}'])
def test_something_else_in_place_of_the_manifest_is_refused_by_name(tmp_path, content):
    save(tmp_path)
    (tmp_path / "last.json").write_text(content)
    with pytest.raises(DamagedFileError, match="last.json"):
        load_checkpoint(tmp_path)


def test_weights_that_are_not_finite_never_replace_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    with pytest.raises(DamagedFileError, match="embedder/weight"):
        save_checkpoint(tmp_path, {"embedder/weight": torch.tensor([1.0, torch.nan])}, {"step": 2})
    assert load_checkpoint(tmp_path)[1]["step"] == 1


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pfml.runs.checkpoint.CHECKPOINT", replace(CHECKPOINT, version=2))
    save(tmp_path)
    monkeypatch.undo()
    with pytest.raises(DamagedFileError, match="a checkpoint of format version 1, got version 2: use the pfml"):
        load_checkpoint(tmp_path)


def test_the_manifest_is_json_a_person_can_read(tmp_path):
    save(tmp_path)
    assert json.loads((tmp_path / "last.json").read_text())["state"]["step"] == 7


def test_an_optimizer_resumes_with_its_moments():
    def steps(optimizer, weight, count):
        for _ in range(count):
            optimizer.zero_grad()
            (weight * torch.tensor([1.0, -2.0])).square().sum().backward()
            optimizer.step()

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(optimizer, weight, 3)
    copy = torch.nn.Parameter(weight.detach().clone())
    other = torch.optim.AdamW([copy], lr=0.1)
    unpack_optimizer(other, {name: value.clone() for name, value in pack_optimizer(optimizer).items()})
    steps(optimizer, weight, 3)
    steps(other, copy, 3)
    assert torch.equal(weight, copy)


def test_tensors_by_prefix_are_named_without_it():
    assert list(by_prefix(TENSORS, "embedder/")) == ["weight"]


def test_what_changes_after_a_save_is_not_in_the_checkpoint(tmp_path, monkeypatch):
    go, original = threading.Event(), checkpoint.save_checkpoint

    def slow(*arguments):
        assert go.wait(300)
        original(*arguments)

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    weights, state = torch.zeros(3), {"history": [1]}
    with CheckpointWriter(tmp_path, in_background=True) as writer:
        writer.save({"weights": weights}, state)
        weights.fill_(7)
        state["history"].append(2)
        go.set()
    tensors, stored = load_checkpoint(tmp_path)
    assert torch.equal(tensors["weights"], torch.zeros(3))
    assert stored == {"history": [1]}


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_save_or_the_end(tmp_path):
    writer = CheckpointWriter(tmp_path, in_background=True)
    writer.save({"weights": torch.tensor([torch.nan])}, {})
    with pytest.raises(ValueError, match="must be finite"):
        writer.save({"weights": torch.zeros(1)}, {})
    writer.save({"weights": torch.zeros(1)}, {})
    writer.save({"weights": torch.tensor([torch.inf])}, {})
    with pytest.raises(ValueError, match="must be finite"), writer:
        pass
    assert torch.equal(load_checkpoint(tmp_path)[0]["weights"], torch.zeros(1))


def test_a_run_that_writes_in_the_background_can_be_interrupted_and_resumed(tmp_path, monkeypatch):
    def run(out, **options):
        torch.manual_seed(1)
        train(few_glyphs(), small_embedder(), small_config(checkpoint_every=1), out=tmp_path / out, **options)

    run("whole")
    in_background = lambda folder, **_: CheckpointWriter(folder, in_background=True)  # noqa: E731
    monkeypatch.setattr("pfml.training.loop.CheckpointWriter", in_background)
    with pytest.raises(KeyboardInterrupt, match="stopped at step 3, state saved"):
        run("broken", monitor=InterruptAt(3))
    assert load_checkpoint(tmp_path / "broken" / "checkpoints")[1]["step"] == 3
    run("broken", resume=True)
    whole, broken = (load_checkpoint(tmp_path / name / "checkpoints")[0] for name in ("whole", "broken"))
    assert all(torch.equal(value, broken[name]) for name, value in whole.items())


@pytest.mark.parametrize("fused", [False, True])
def test_moments_take_the_memory_format_of_the_parameters_they_are_restored_for(fused):
    images, loss = torch.rand(2, 3, 16, 16), torch.nn.Linear(8, 1)

    def trained(memory_format, moments=None):
        torch.manual_seed(0)
        embedder = small_embedder().to(memory_format=memory_format)
        optimizer = create_optimizer(OptimizerConfig(), embedder, loss, fused=fused)
        if moments is not None:
            unpack_optimizer(optimizer, moments)
        optimizer.zero_grad()
        loss(embedder(images)).sum().backward()
        optimizer.step()
        return embedder, optimizer

    stored = pack_optimizer(trained(torch.contiguous_format)[1])
    stored = {name: value.contiguous() for name, value in stored.items()}
    embedder, optimizer = trained(torch.channels_last, stored)
    for parameter in embedder.parameters():
        for name, value in optimizer.state[parameter].items():
            assert name == "step" or value.stride() == parameter.stride()
