"""`pfml embed`: images as vectors, in one .npz file or, however many they are, in a folder of shards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console, preferred_run, print_json
from pfml.cli.input_images import (
    end_with_unreadable,
    print_unreadable,
    refuse_all_unreadable,
    refuse_images_first,
    unreadable_content,
)
from pfml.cli.parser import add_device_option, add_json_option, add_quiet_option
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

    import torch
    from rich.console import Console

    from pfml.data.decoding import ImageError
    from pfml.search import ImageShard
    from pfml.search.embedding import Engine


def embed(
    run: Path,
    images: list[Path],
    out: str = "embeddings.npz",
    shard: str | None = None,
    dtype: str | None = None,
    shard_images: int | None = None,
    batch_size: int = 128,
    workers: int = 2,
    device: str = "auto",
    engine: str = "local",
    actors: int | None = None,
    gpus_per_actor: float | None = None,
    ray_address: str | None = None,
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Embed images: write their paths and unit vectors to a NumPy file (.npz), or in shards to a folder of any size."""
    from pfml.search import ImageShard

    refuse_images_first("embed", run, images)
    console = create_console(stderr=as_json, quiet=quiet)
    own = ImageShard.of_process() if shard is None else ImageShard.parsed(shard)
    on_ray = _ray_engine(own, device, actors, gpus_per_actor, ray_address) if engine == "ray" else None
    for name, value in (("actors", actors), ("gpus-per-actor", gpus_per_actor), ("ray-address", ray_address)):
        if value is not None and engine != "ray":
            raise ValueError(f"--{name} must go with --engine ray, got {value} without it")
    run = preferred_run(console, run)
    if _is_folder(out):
        content, failures = _embed_to_folder(
            console, run, images, Path(out), own, dtype, shard_images, batch_size, workers, device, on_ray
        )
    elif own.is_all and dtype is None and shard_images is None:
        content, failures = _embed_to_file(console, run, images, Path(out), batch_size, workers, device, on_ray)
    else:
        raise ValueError(
            f"--shard, --dtype, --shard-images and torchrun need a folder, not one file, got --out {out}: "
            f"leave the ending out"
        )
    if as_json:
        print_json({"out": out, **content, "left_out": unreadable_content(failures)})
    end_with_unreadable(failures)


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
    add("--batch-size", type=int, default=128, help="Images per forward pass.")
    add("--workers", type=int, default=2, help="Threads that read files.")
    add_device_option(parser)
    add(
        "--engine",
        choices=("local", "ray"),
        default="local",
        help="Where to embed: in this process, or on a Ray cluster, whose machines must all see the images.",
    )
    add(
        "--actors",
        type=int,
        help="With Ray: processes that hold the model; by default one on each GPU, or on each CPU but one.",
    )
    add("--gpus-per-actor", type=float, help="With Ray: GPUs of each, such as 0.5; by default 1 where there are GPUs.")
    add(
        "--ray-address",
        help="With Ray: address of the cluster, such as host:6379; by default RAY_ADDRESS, else one of this machine.",
    )
    add_json_option(parser)
    add_quiet_option(parser)


def _is_folder(out: str) -> bool:
    return out.endswith(("/", os.sep)) or Path(out).is_dir() or not Path(out).suffix


def _embed_to_file(
    console: Console,
    run: Path,
    images: list[Path],
    out: Path,
    batch_size: int,
    workers: int,
    device: str,
    engine: Engine | None,
) -> tuple[dict[str, int], Sequence[ImageError]]:
    """Write one NumPy file; what was done, and the files that cannot be read."""
    from pfml.data.readers.folder import image_paths
    from pfml.models import load_embedder
    from pfml.search.embedding import LocalEngine
    from pfml.storage.embeddings import refuse_ending, write_embeddings
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    refuse_ending(out)
    files = list(image_paths(images))
    embedder = load_embedder(run)
    if engine is None:
        engine = LocalEngine()
        embedder.to(resolve_device(device))
    track = ProgressMonitor(console).track
    [(_, found)] = engine.embed(embedder, [files], batch_size=batch_size, workers=workers, track=track)
    refuse_all_unreadable(found.failures, len(files))
    write_embeddings(out, list(map(Path, found.paths)), found.vectors)
    print_unreadable(console, found.failures)
    unreadable = f", {len(found.failures):,} unreadable" if found.failures else ""
    print_line(console, f"{out}: {len(found.paths):,} images in {embedder.embedding_dim} dimensions{unreadable}")
    return {"images": len(found.paths), "dimensions": embedder.embedding_dim}, found.failures


def _embed_to_folder(
    console: Console,
    run: Path,
    images: list[Path],
    out: Path,
    shard: ImageShard,
    dtype: str | None,
    shard_images: int | None,
    batch_size: int,
    workers: int,
    device: str,
    engine: Engine | None,
) -> tuple[dict[str, int], Sequence[ImageError]]:
    """Bring a folder of shards up to date; what was done, and the files that cannot be read."""
    from pfml.models import load_embedder
    from pfml.search import embed_collection
    from pfml.training.progress import ProgressMonitor

    embedder = load_embedder(run)
    if engine is None:
        embedder.to(_device(device))
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
        engine=engine,
    )
    for damage in update.damaged:
        print_line(console, f"embedded again: {damage}")
    print_unreadable(console, update.failures)
    which = "" if shard.is_all else f"shard {shard}, "
    print_line(console, f"{out}: {which}{update}, {embedder.embedding_dim} dimensions")
    done = {name: getattr(update, name) for name in ("added", "replaced", "unchanged", "removed")}
    return {**done, "dimensions": embedder.embedding_dim}, update.failures


def _ray_engine(
    shard: ImageShard, device: str, actors: int | None, gpus_per_actor: float | None, address: str | None
) -> Engine:
    """The engine of --engine ray."""
    from pfml.search.ray_engine import RayEngine

    if not shard.is_all:
        raise ValueError("--engine ray must go without --shard and torchrun: Ray divides the images itself")
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device must be auto, cpu or cuda with --engine ray, which chooses the GPU, got {device}")
    given = {"cpu": 0.0, "cuda": 1.0}.get(device)
    return RayEngine(actors, given if gpus_per_actor is None else gpus_per_actor, address)


def _device(name: str) -> torch.device:
    """The device of this name; "auto" is the GPU that torchrun means for this process, or the one there is."""
    import torch

    from pfml.distributed.torchrun import Launch
    from pfml.training.environment import resolve_device

    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda", Launch.of_process().local_rank % torch.cuda.device_count())
    return resolve_device(name)
