"""`pfml embed`: images as vectors, in one .npz file or, however many they are, in a folder of shards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console
from pfml.cli.input_images import end_with_unreadable, print_unreadable, refuse_all_unreadable, refuse_images_first
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

    import torch

    from pfml.search import ImageShard


def embed(
    run: Path,
    images: list[Path],
    out: str = "embeddings.npz",
    shard: str | None = None,
    dtype: str | None = None,
    shard_images: int | None = None,
    batch_size: int = 128,
    workers: int = 2,
) -> None:
    """Embed images: write their paths and unit vectors to a NumPy file (.npz), or in shards to a folder of any size."""
    from pfml.search import ImageShard

    refuse_images_first("embed", run, images)
    own = ImageShard.of_process() if shard is None else ImageShard.parsed(shard)
    if _is_folder(out):
        _embed_to_folder(run, images, Path(out), own, dtype, shard_images, batch_size, workers)
        return
    if not own.is_all or dtype is not None or shard_images is not None:
        raise ValueError(
            f"--shard, --dtype, --shard-images and torchrun need a folder, not one file, got --out {out}: "
            f"leave the ending out"
        )
    _embed_to_file(run, images, Path(out), batch_size, workers)


def add_embed_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `embed`, of which the images are several."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add("images", type=Path, nargs="+", help="Image files, or folders with images in them.")
    add(
        "--out",
        default="embeddings.npz",
        help="A NumPy file with the arrays `paths` and `embeddings`, of what fits into memory; or, without .npz, a "
        "folder of shards: run again to resume after an interruption, or to bring it up to date.",
    )
    add(
        "--shard",
        help="With a folder: embed one of several shards of the images, such as 2/8, beside other processes; `all` for "
        "all images. By default all, and under torchrun the shard of this process.",
    )
    add("--dtype", help="With a folder: float32 or float16; by default what the folder has, float32 if it is new.")
    add(
        "--shard-images",
        type=int,
        help="With a folder: images that are written together; by default what the folder has, 4096 if it is new.",
    )
    add("--batch-size", type=int, default=128, help="Images in the network at a time.")
    add("--workers", type=int, default=2, help="Threads that read files.")


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir() or not Path(out).suffix


def _embed_to_file(run: Path, images: list[Path], out: Path, batch_size: int, workers: int) -> None:
    from pfml.data.readers.folder import image_paths
    from pfml.models import load_embedder
    from pfml.search.embedding import embed_files
    from pfml.storage.embeddings import refuse_ending, write_embeddings
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    console = create_console()
    refuse_ending(out)
    files = list(image_paths(images))
    embedder = load_embedder(run).to(resolve_device("auto"))
    track = ProgressMonitor(console).track
    found = embed_files(embedder, files, batch_size=batch_size, workers=workers, track=track)
    refuse_all_unreadable(found.failures, len(files))
    write_embeddings(out, list(map(Path, found.paths)), found.vectors)
    print_unreadable(console, found.failures)
    unreadable = f", {len(found.failures):,} unreadable" if found.failures else ""
    print_line(console, f"{out}: {len(found.paths):,} images in {embedder.embedding_dim} dimensions{unreadable}")
    end_with_unreadable(found.failures)


def _embed_to_folder(
    run: Path,
    images: list[Path],
    out: Path,
    shard: ImageShard,
    dtype: str | None,
    shard_images: int | None,
    batch_size: int,
    workers: int,
) -> None:
    from pfml.models import load_embedder
    from pfml.search import embed_collection
    from pfml.training.progress import ProgressMonitor

    console = create_console()
    embedder = load_embedder(run).to(_device())
    update = embed_collection(
        out,
        embedder,
        images,
        dtype=dtype,
        shard_images=shard_images,
        shard=shard,
        batch_size=batch_size,
        workers=workers,
        track=ProgressMonitor(console).track,
    )
    for damage in update.damaged:
        print_line(console, f"embedded again: {damage}")
    print_unreadable(console, update.failures)
    which = "" if shard.is_all else f"shard {shard}, "
    print_line(console, f"{out}: {which}{update}, {embedder.embedding_dim} dimensions")
    end_with_unreadable(update.failures)


def _device() -> torch.device:
    """The GPU that torchrun means for this process, or the one there is."""
    import torch

    from pfml.training.environment import resolve_device

    local = os.environ.get("LOCAL_RANK", "")
    if local.isdecimal() and torch.cuda.is_available():
        return torch.device("cuda", int(local) % torch.cuda.device_count())
    return resolve_device("auto")
