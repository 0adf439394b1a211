"""A collection of images embedded to a folder of shards: in bounded memory, by several processes, and resumable."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from pfml.data.decoding import ImageError, Track, in_threads
from pfml.data.readers.folder import image_paths
from pfml.distributed.torchrun import Launch
from pfml.models.embedder import Embedder
from pfml.search.embedding import EmbeddedFiles, Engine, LocalEngine
from pfml.search.identity import ModelIdentity
from pfml.search.listing import plain_path
from pfml.search.update import Update
from pfml.storage.embeddings import (
    CollectionSettings,
    add_shard,
    read_settings,
    revision_of,
    shard_files,
    shard_of,
    write_settings,
)
from pfml.storage.file_state import packed
from pfml.storage.files import DamagedFileError, remove_partials
from pfml.storage.lock import WriterLock
from pfml.storage.manifest import FormatVersionError
from pfml.storage.shard import VectorShard

__all__ = ["ALL_IMAGES", "SHARD_IMAGES", "CollectionUpdate", "ImageShard", "embed_collection"]


@dataclass(frozen=True)
class ImageShard:
    """The `number`-th of `count` shards of the images, for one of `count` processes.

    An image belongs to a shard by a digest of its path. So it stays where it is when others come or go, and processes
    that list a growing folder at different moments neither miss an image nor take one twice. Shards are equal but for
    chance: of N images in c shards, N / c give or take its square root.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"a shard must be from 1/{self.count} to {self.count}/{self.count}, got {self}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def is_all(self) -> bool:
        """Whether it is the only one."""
        return self.count == 1

    def holds(self, path: str) -> bool:
        """Whether the image of this path is in the shard."""
        if self.is_all:
            return True
        digest = hashlib.sha256(path.encode(errors="surrogateescape")).digest()
        return int.from_bytes(digest[:8], "big") % self.count == self.number - 1

    @classmethod
    def parsed(cls, text: str) -> ImageShard:
        """The shard of a text such as "2/8", or "all"."""
        if text == "all":
            return ALL_IMAGES
        found = re.fullmatch(r"(\d+)/(\d+)", text)
        if found is None or int(found[2]) < 1:
            raise ValueError(f"a shard must be NUMBER/COUNT, such as 2/8 for the second of eight, or all, got {text!r}")
        return cls(int(found[1]), int(found[2]))

    @classmethod
    def of_process(cls) -> ImageShard:
        """The shard of this process by its rank among those that torchrun started; the whole without torchrun."""
        launch = Launch.of_process()
        return cls(launch.rank + 1, launch.size)


#: All images.
ALL_IMAGES = ImageShard(1, 1)


#: Images in a shard, unless it is said otherwise.
SHARD_IMAGES = 4096


@dataclass
class CollectionUpdate(Update):
    """What `embed_collection` did, counted in images.

    Args:
        damaged: What is wrong with shards whose images were embedded again.
    """

    damaged: list[str] = field(default_factory=list)


def embed_collection(
    folder: str | Path,
    embedder: Embedder,
    sources: Sequence[Path],
    *,
    dtype: str | None = None,
    shard_images: int | None = None,
    shard: ImageShard = ALL_IMAGES,
    batch_size: int = 64,
    workers: int = 2,
    track: Track | None = None,
    engine: Engine | None = None,
) -> CollectionUpdate:
    """Embed images to `folder` (`pfml.storage.embeddings.open_embeddings` reads it); what was done.

    Every shard is written before the next is read. The same call again, after a kill or when files have changed, embeds
    what is missing: each finished shard is first compared with its checksums, and each file with its state. An image
    that no longer lies in `sources`, and vectors that newer ones replace, are removed by the call for all images;
    several processes may embed a shard of the images each at once, and only add.

    Args:
        folder: Made if it does not exist.
        embedder: On the device where it is to compute.
        sources: Image files, or folders whose images are all taken. Images of other sources stay.
        dtype: "float32" or "float16"; None for what the folder has, float32 if it is new.
        shard_images: Images in a shard; None for what the folder has, `SHARD_IMAGES` if it is new.
        shard: Which images to embed.
        batch_size: Images that the model embeds at a time.
        workers: Threads that read files.
        track: Shows the progress, as track(iterable, description, total).
        engine: Where to embed; None for this process. The folder is written by this one.

    Raises:
        OtherModelError: If the folder has embeddings of another model.
        LockedError: If another process is writing all images, or this one wants to while others write theirs.
    """
    folder, update = Path(folder), CollectionUpdate()
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} must be a folder for the shards, and there is a file: choose another name")
    folder.mkdir(parents=True, exist_ok=True)
    with WriterLock(folder, shared=not shard.is_all).held():
        settings = _settings(folder, embedder, dtype, shard_images)
        if shard.is_all:
            _remove_left_over(folder)
        comparison = _Comparison(folder, settings, list(map(plain_path, sources)), shard, update)
        comparison.compare(workers, track)
        pending = list(comparison.pending())
        lists = [paths for paths, _ in pending]
        engine = LocalEngine() if engine is None else engine
        embedded = engine.embed(embedder, lists, batch_size=batch_size, workers=workers, track=track)
        failures: dict[int, tuple[ImageError, ...]] = {}
        with closing(embedded):
            for number, found in embedded:
                failures[number] = found.failures
                _add_shard(folder, settings, found, pending[number][1], comparison)
        update.failures += [failure for number in sorted(failures) for failure in failures[number]]
    return update


def _settings(folder: Path, embedder: Embedder, dtype: str | None, shard_images: int | None) -> CollectionSettings:
    """The settings of the folder, which must be those that are asked for; written if the folder is new."""
    model = ModelIdentity.of(embedder)
    if not (folder / "embeddings.json").is_file():
        numbers = "float32" if dtype is None else dtype
        images = SHARD_IMAGES if shard_images is None else shard_images
        wanted = CollectionSettings(model.description, model.digest, embedder.embedding_dim, numbers, images)
        with suppress(FileExistsError):  # another process has come first, and its settings count
            write_settings(folder, wanted)
    found = read_settings(folder)
    ModelIdentity(found.model_digest, found.model).require(model, f"the embeddings {folder}")
    for name, asked in (("dtype", dtype), ("shard_images", shard_images)):
        if asked is not None and asked != getattr(found, name):
            raise ValueError(
                f"{name} of the embeddings {folder} must stay {getattr(found, name)}, got {asked}: "
                f"leave it out, or choose another folder"
            )
    return found


class _Comparison:
    """Listed images beside what the folder has of them."""

    def __init__(
        self,
        folder: Path,
        settings: CollectionSettings,
        sources: list[Path],
        images: ImageShard,
        update: CollectionUpdate,
    ) -> None:
        self.folder, self.settings, self.images, self.update = folder, settings, images, update
        self.folders = [source for source in sources if source.is_dir()]
        # path -> whether a shard mentions it; in the order of the listing
        self.listed = {path: False for path in image_paths(sources) if images.holds(path)}
        self.again: dict[str, int] = {}  # path -> revision of the shard that mentions it, but has no vector of it now
        self.failed: set[str] = set()  # of these, such as could not be read before

    def compare(self, workers: int, track: Track | None) -> None:
        """Look at every shard, newest first; remove damaged ones and, if all images are asked for, what is no more."""
        files = shard_files(self.folder)
        for file in files if track is None else track(files, "comparing files", len(files)):
            try:
                shard = shard_of(file, self.settings)
                if any(self.images.holds(path) for path in shard.mentioned()):
                    assert shard.origin is not None
                    shard.origin.require_unchanged()
            except FormatVersionError:
                raise  # it is whole, and not to be removed
            except DamagedFileError as error:
                self.update.damaged.append(str(error))
                file.unlink(missing_ok=True)
                continue
            except FileNotFoundError:  # another process has found it damaged in this moment
                continue
            self._compare(file, shard, workers)

    def pending(self) -> Iterator[tuple[list[str], int]]:
        """Paths to embed together, and their revision: first those of which no shard knows."""
        size = self.settings.shard_images
        new = [path for path, mentioned in self.listed.items() if not mentioned]
        for first in range(0, len(new), size):
            yield new[first : first + size], 0
        again = [path for path in self.listed if path in self.again]
        for first in range(0, len(again), size):
            some = again[first : first + size]
            yield some, 1 + max(self.again[path] for path in some)

    def _compare(self, file: Path, shard: VectorShard, workers: int) -> None:
        looked = [row for row, path in enumerate(shard.paths) if self.listed.get(path) is False]
        pairs = ((shard.file(row), shard.paths[row]) for row in looked)
        same = dict(zip(looked, in_threads(lambda pair: pair[0].is_of(pair[1]), pairs, workers), strict=True))
        kept: list[int] = []
        for row, path in enumerate(shard.paths):
            if path not in self.listed:
                if self._is_gone(path):
                    self.update.removed += 1
                else:
                    kept.append(row)
            elif row in same and not self.listed[path]:
                self.listed[path] = True
                if same[row]:
                    kept.append(row)
                    self.update.unchanged += 1
                else:
                    self.again[path] = revision_of(file)
        unreadable = []
        for path, reason in shard.unreadable:
            if self.listed.get(path) is False:
                self.listed[path] = True
                self.again[path] = revision_of(file)
                self.failed.add(path)
                unreadable.append((path, reason))
            elif path not in self.listed and not self._is_gone(path):
                unreadable.append((path, reason))
        if self.images.is_all and (len(kept), len(unreadable)) != (len(shard.paths), len(shard.unreadable)):
            self._rewrite(file, shard, kept, tuple(unreadable))

    def _is_gone(self, path: str) -> bool:
        """Whether an image that is not listed was to be, were it still there."""
        return self.images.is_all and any(folder in Path(path).parents for folder in self.folders)

    def _rewrite(
        self, file: Path, shard: VectorShard, kept: list[int], unreadable: tuple[tuple[str, str], ...]
    ) -> None:
        """Keep some rows of a shard: the new shard is there before the old one goes."""
        if kept or unreadable:
            rest = shard.rows(torch.tensor(kept, dtype=torch.int64))
            rest = replace(rest, ids=torch.arange(len(rest)), unreadable=unreadable)
            add_shard(self.folder, self.settings, rest, revision_of(file))
        file.unlink(missing_ok=True)


def _add_shard(
    folder: Path, settings: CollectionSettings, found: EmbeddedFiles, revision: int, comparison: _Comparison
) -> None:
    """Write embedded images as a shard, with the names of those that cannot be read."""
    update = comparison.update
    bad = (~torch.isfinite(found.vectors).all(dim=1)).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(f"embeddings must be finite, got NaN or Inf for {found.paths[bad[0]]}: the model is damaged")
    unreadable = tuple((str(each.path), each.reason) for each in found.failures)
    # what failed before is on record already
    unreadable = tuple(each for each in unreadable if each[0] not in comparison.failed)
    if found.paths or unreadable:
        count = len(found.paths)
        unknown = ("",) * count
        states, digests = packed(found.files)
        shard = VectorShard(
            found.vectors, torch.arange(count), found.paths, unknown, unknown, states, digests, unreadable
        )
        add_shard(folder, settings, shard, revision)
    replaced = sum(1 for path in found.paths if path in comparison.again and path not in comparison.failed)
    update.replaced += replaced
    update.added += len(found.paths) - replaced


def _remove_left_over(folder: Path) -> None:
    """Remove what killed writers have left; nobody else may be writing."""
    remove_partials(folder, "shard-*")
    remove_partials(folder, "embeddings.json.*")
