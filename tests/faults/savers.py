"""Everything that pfml saves, as a writer that saves for ever and a reader that proves a save whole.

Every save has a number that all of its content repeats, so that a reader sees a mixture of two saves at once.
"""

import json
import math
import resource
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pfml.experiments.store import ResultsStore
from pfml.models import create_embedder, load_embedder
from pfml.models.embedder import EMBEDDER
from pfml.runs.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from pfml.search import Edit, ImageIndex
from pfml.storage.bundle import extract_zip, read_listing, refuse_tampering, write_listing, write_zip
from pfml.storage.files import load_tensors, save_tensors
from pfml.storage.manifest import Format
from pfml.storage.sealed_tensors import next_tensors
from records import record
from small_index import MODEL, unit_vectors

#: float32 numbers in each of two tensors: large enough that a kill often finds a file half written
SIZE = 200_000


@dataclass(frozen=True)
class Saver:
    """A row of the table.

    Args:
        save: Make save `number` in a folder that exists; save 0 is the first.
        read: The number of the save that is in the folder; raises unless all of it is of that save.
        orphans: Files in the folder that belong to no save.
        most_orphans: That a kill may leave until the next save. Of an index it may leave all shards that were just
            compacted into one.
    """

    save: Callable[[Path, int], None]
    read: Callable[[Path], int]
    orphans: Callable[[Path], list[str]]
    most_orphans: float = 1


def numbered(number: int, size: int = SIZE) -> dict[str, torch.Tensor]:
    return {name: torch.full((size,), float(number)) for name in ("weight", "moment")}


def number_of(tensors: dict[str, torch.Tensor]) -> int:
    values = {value for tensor in tensors.values() for value in (tensor.min().item(), tensor.max().item())}
    assert len(values) == 1, f"a mixture of saves: {values}"
    return int(values.pop())


def others(folder: Path, *patterns: str, kept: int = 1) -> list[str]:
    """Names in `folder` beyond `kept` files of each pattern."""
    names = sorted(path.name for path in folder.rglob("*") if path.is_file())
    for pattern in patterns:
        for path in sorted(folder.glob(pattern), key=lambda path: path.stat().st_mtime)[-kept:]:
            names.remove(path.name)
    return names


def orphaned_tensors(folder: Path, name: str, form: Format, *more: str) -> list[str]:
    """Names in `folder` of which the manifest `name` says nothing."""
    named = json.loads((folder / f"{name}.json").read_text())["tensors"]["file"]
    known = {f"{name}.json", named, next_tensors(folder, name, form).name, *more}
    return [path.name for path in folder.rglob("*") if path.is_file() and path.name not in known]


# checkpoint


def save_numbered_checkpoint(folder: Path, number: int) -> None:
    save_checkpoint(folder, numbered(number), {"step": number})


def read_numbered_checkpoint(folder: Path) -> int:
    tensors, state = load_checkpoint(folder)
    assert state["step"] == number_of(tensors)
    return state["step"]


# model


def save_numbered_model(folder: Path, number: int) -> None:
    torch.manual_seed(0)
    embedder = create_embedder("convnet", embedding_dim=256)
    with torch.no_grad():
        for parameter in embedder.parameters():
            parameter.fill_(number)
    embedder.save(folder)


def read_numbered_model(folder: Path) -> int:
    return number_of(dict(load_embedder(folder).named_parameters()))


# bundle of files in one archive


def save_numbered_archive(folder: Path, number: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        save_tensors(Path(temporary) / "weights.safetensors", numbered(number))
        write_listing(Path(temporary), {"number": number})
        write_zip(Path(temporary), folder / "bundle.zip")


def read_numbered_archive(folder: Path) -> int:
    with tempfile.TemporaryDirectory() as name:
        unpacked = Path(name)
        extract_zip(folder / "bundle.zip", unpacked)
        listing = read_listing(unpacked, unpacked)
        refuse_tampering(unpacked, listing["files"])
        number = number_of(load_tensors(unpacked / "weights.safetensors"))
    assert listing["number"] == number
    return number


# index


def save_numbered_index(folder: Path, number: int) -> None:
    """Save n adds ten vectors of class n; every third compacts, too."""
    index = ImageIndex.create(folder / "index", MODEL, 8) if number == 0 else ImageIndex.open(folder / "index")
    paths = [f"{number}/{k}.jpg" for k in range(10)]
    index.add(unit_vectors(10, seed=number), paths, [f"save {number}"] * 10, model=MODEL)
    if number % 3 == 0:
        index.compact(grace_seconds=0.0)


def read_numbered_index(folder: Path) -> int:
    index = ImageIndex.open(folder / "index")
    counts = index.class_counts()
    newest = len(counts) - 1
    assert counts == dict.fromkeys(sorted(f"save {number}" for number in range(newest + 1)), 10)
    hit = index.search(unit_vectors(10, seed=newest)[3:4], 1, model=MODEL)[0][0]
    assert hit.path == f"{newest}/3.jpg"
    return newest


def index_orphans(folder: Path) -> list[str]:
    index = folder / "index"
    snapshot = ImageIndex.open(index)._state.snapshot
    named = {file.file for file in snapshot.files} | set(snapshot.retired)
    left = others(index, "index.json", "index-*.safetensors", "lock")
    return [name for name in left if name not in named]


# edits of an index


def save_numbered_edit(folder: Path, number: int) -> None:
    """Save n renames the class to n; every third leaves an image out for a moment, and compacts."""
    if number == 0:
        index = ImageIndex.create(folder / "index", MODEL, 8)
        index.add(unit_vectors(10), [f"{k}.jpg" for k in range(10)], ["save 0"] * 10, model=MODEL)
        return
    index = ImageIndex.open(folder / "index")
    [name] = index.class_counts()
    if index.edits.left_out:
        index.undo()  # a kill came before this
    index.edit(Edit("rename", name, f"save {number}"))
    if number % 3 == 0:
        index.edit(Edit("leave_out", paths=("3.jpg",)))
        index.undo()
        index.compact(grace_seconds=0.0)


def read_numbered_edit(folder: Path) -> int:
    index = ImageIndex.open(folder / "index")
    [(name, count)] = index.class_counts().items()
    assert {entry.given_class for entry in index.entries()} == {"save 0"}
    assert count == 10 - len(index.edits.left_out)
    newest = int(name.removeprefix("save "))
    assert [edit.into for edit in index.edits.steps if edit.into] == [f"save {k + 1}" for k in range(newest)]
    return newest


# results


def append_numbered_result(folder: Path, number: int) -> None:
    ResultsStore(folder / "results.jsonl").append(record(seed=number, error="x" * 20_000))


def read_numbered_results(folder: Path) -> int:
    seeds = [one["seed"] for one in ResultsStore(folder / "results.jsonl").records()]
    assert seeds == list(range(len(seeds)))
    return len(seeds) - 1


#: One row per kind of save.
SAVERS = {
    "checkpoint": Saver(
        save_numbered_checkpoint,
        read_numbered_checkpoint,
        lambda folder: orphaned_tensors(folder, "last", CHECKPOINT),
    ),
    "model": Saver(
        save_numbered_model,
        read_numbered_model,
        lambda folder: orphaned_tensors(folder, "model", EMBEDDER, "README.md"),
    ),
    "bundle archive": Saver(save_numbered_archive, read_numbered_archive, lambda folder: others(folder, "bundle.zip")),
    "index": Saver(save_numbered_index, read_numbered_index, index_orphans, most_orphans=math.inf),
    "index edits": Saver(save_numbered_edit, read_numbered_edit, index_orphans, most_orphans=math.inf),
    "results store": Saver(
        append_numbered_result, read_numbered_results, lambda folder: others(folder, "results.jsonl")
    ),
}


# what runs in other processes


def save_for_ever(name: str, folder: Path, number: int, started) -> None:
    """Save from `number` on; `started` is set before the first."""
    torch.set_num_threads(1)
    saver = SAVERS[name]
    tempfile.tempdir = str(folder.parent)  # so that what a kill leaves is removed with the test's folder
    started.set()
    while True:
        saver.save(folder, number)
        number += 1


def error_of_saving(name: str, folder: Path, number: int, answers) -> None:
    """Save once; the error's type and text, "" for none."""
    torch.set_num_threads(1)
    try:
        SAVERS[name].save(folder, number)
        answers.put(("", ""))
    except Exception as error:
        answers.put((type(error).__name__ + ("" if isinstance(error, OSError) else " (no OSError)"), str(error)))


def limit_files(limit: int) -> None:
    """Files of this process end at so many bytes, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def kill(process) -> None:
    process.kill()
    process.join()


def fill(folder: Path, leave: int) -> Path:
    """Fill the file system of `folder` up to `leave` bytes; the file that does it."""
    ballast = folder / "ballast"
    free = shutil.disk_usage(folder).free
    ballast.write_bytes(bytes(max(free - leave, 0)))
    return ballast
