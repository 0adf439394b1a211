"""Reliability tests 24 to 26: checkpoints that outlive kills, full disks and damage. `tests/faults` has every file."""

import json
import os
import pickle
import struct
import subprocess
import time
from pathlib import Path

import pytest
import torch

from pfml import PotentialFieldLoss
from pfml.runs.checkpoint import load_checkpoint, save_checkpoint
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import digest_of
from pfml.training import LossConfig
from small_data import InterruptAt, few_glyphs, small_config, small_embedder

FAULTS = Path(__file__).parents[1] / "faults"


@pytest.mark.parametrize("trials", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_24_a_kill_during_a_save_leaves_no_unreadable_checkpoint_and_at_most_one_orphan(tmp_path, monkeypatch, trials):
    """`tests/faults/test_kills.py` does the same to everything that is saved."""
    monkeypatch.syspath_prepend(FAULTS)
    from test_kills import kills

    assert max(kills("checkpoint", tmp_path / "saves", trials)) <= 1


def test_25_a_full_disk_is_an_oserror_and_the_old_checkpoint_stays(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        save_checkpoint(place, {"weight": torch.ones(1000)}, {"step": 1})
        before = {path.name: path.read_bytes() for path in place.iterdir()}
        with pytest.raises(OSError, match="could not be written|[Nn]o space"):
            save_checkpoint(place, {"weight": torch.ones(2**19)}, {"step": 2})
        assert {path.name: path.read_bytes() for path in place.iterdir()} == before
        assert load_checkpoint(place)[1] == {"step": 1}
    finally:
        subprocess.run(["umount", str(place)], check=True)


class Payload:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[where] ^= 1
    path.write_bytes(content)


def resealed_nan(folder, tensors):
    """NaN weights under checksums that are right."""
    from pfml.storage.files import save_tensors

    manifest = json.loads((folder / "last.json").read_text())
    del manifest["manifest_sha256"]
    bad = {"weight": torch.full((1000,), torch.nan)}
    sha256 = save_tensors(tensors, bad)
    manifest["tensors"] = {"file": tensors.name, "sha256": sha256, "bytes": tensors.stat().st_size}
    (folder / "last.json").write_text(json.dumps({**manifest, "manifest_sha256": digest_of(manifest)}))


DAMAGES = {
    "flipped first byte": lambda folder, tensors, marker: flip(tensors, 0),
    "flipped byte in the data": lambda folder, tensors, marker: flip(tensors, 2000),
    "flipped last byte": lambda folder, tensors, marker: flip(tensors, -1),
    "flipped byte in the manifest": lambda folder, tensors, marker: flip(folder / "last.json", 40),
    "truncated": lambda folder, tensors, marker: os.truncate(tensors, 2000),
    "huge header": lambda folder, tensors, marker: tensors.write_bytes(
        struct.pack("<Q", 2**62) + tensors.read_bytes()[8:]
    ),
    "pickle payload": lambda folder, tensors, marker: tensors.write_bytes(pickle.dumps(Payload(marker))),
    "pickle manifest": lambda folder, tensors, marker: (folder / "last.json").write_bytes(
        pickle.dumps(Payload(marker))
    ),
    "NaN weights": lambda folder, tensors, marker: resealed_nan(folder, tensors),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_26_a_damaged_or_hostile_checkpoint_is_refused_by_name_in_a_second(tmp_path, damage):
    folder, marker = tmp_path / "checkpoints", tmp_path / "marker"
    save_checkpoint(folder, {"weight": torch.arange(1000.0)}, {"step": 7})
    [tensors] = folder.glob("*.safetensors")
    DAMAGES[damage](folder, tensors, marker)
    start = time.process_time()
    with pytest.raises(DamagedFileError, match=r"last\.json|last-\w+\.safetensors"):
        load_checkpoint(folder)
    assert time.process_time() - start < 1
    assert not marker.exists()


def test_26_a_checkpoint_of_other_hyper_parameters_is_refused_by_name(tmp_path):
    from pfml.training import train

    with pytest.raises(KeyboardInterrupt):
        train(few_glyphs(), small_embedder(), small_config(), out=tmp_path / "run", monitor=InterruptAt(2))
    other = small_config(loss=LossConfig("pfml", {"proxies_per_class": 3}))
    with pytest.raises(ValueError, match="proxies_per_class"):
        train(few_glyphs(), small_embedder(), other, out=tmp_path / "run", resume=True)
    stored = PotentialFieldLoss(4, 8, alpha=3.0).state_dict()
    with pytest.raises(ValueError, match="alpha: stored 3.0, here 4.0"):
        PotentialFieldLoss(4, 8, alpha=4.0).load_state_dict(stored)
