"""Every kind of file that pfml reads back: how a whole one is made, and how it is read.

`FILE_KINDS` is the table that the tests of this folder run through. What must hold for each kind:

- `sealed`: what is read is what was written, or the file is refused by its name, whatever byte was changed.
- otherwise the file is a person's own (a table, a configuration, an image), in which another value may be a right one:
  what is read is a value, or the file is refused by its name.
- `remedy="ignored"`: what is broken is passed over with a warning that names it, and the rest is read.
- `remedy="rebuilt"`: it is only a copy of what lies elsewhere, and is made again, with a warning that names it.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image

from pfml.audit import audit, read_decisions
from pfml.data import Corruption, ImageSet, LabelNoise, corrupt, open_images
from pfml.data.corrections import Corrections
from pfml.data.decoding import read_rgb
from pfml.data.readers.cars import read_cars
from pfml.data.readers.cub import read_cub
from pfml.data.readers.table import read_table
from pfml.experiments.store import ResultsStore
from pfml.experiments.tune import read_study
from pfml.export import export_bundle, load_bundle
from pfml.methods import create_loss
from pfml.models import create_embedder, load_embedder
from pfml.models.weights import read_weight_file
from pfml.runs.checkpoint import load_checkpoint, save_checkpoint
from pfml.runs.config_files import read_config, write_config
from pfml.runs.folder import RunFolder
from pfml.runs.saved_loss import save_loss
from pfml.search import Edit, ImageIndex, ModelIdentity, Rate, Threshold
from pfml.storage.embeddings import CollectionSettings, add_shard, read_embeddings, write_embeddings, write_settings
from pfml.storage.file_state import FileState, packed
from pfml.storage.files import save_tensors
from pfml.storage.shard import VectorShard
from pfml.training import LossConfig, RunConfig, load_field
from records import record
from small_index import MODEL, small_index
from small_threshold import made_threshold

STATE = {"step": 7, "history": [{"loss": 1.5}], "config": {"epochs": 2}}


@dataclass(frozen=True)
class FileKind:
    """A row of the table.

    Args:
        name: What it is.
        make: Writes whole files into an empty folder; the one that is to be damaged.
        read: What pfml reads from the file, as something that can be compared.
        sealed: Whether a checksum covers every byte.
        remedy: "refused", "ignored" or "rebuilt"; see the top of this file.
        text: Whether it is a text file that people write, too.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    sealed: bool = False
    remedy: str = "refused"
    text: bool = False


def comparable(value: Any) -> Any:
    """Tensors as their bytes, the rest as it is."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest()
    if isinstance(value, dict):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [comparable(one) for one in value]
    return value


def image_table(images: ImageSet) -> Any:
    return [str(path) for path in images.images], images.labels.tolist(), images.class_names


# what a run leaves


def some_tensors(seed: int = 0, rows: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"weight": torch.randn(rows, 25, generator=generator), "generator": torch.arange(16, dtype=torch.uint8)}


def make_checkpoint(folder: Path) -> Path:
    save_checkpoint(folder, some_tensors(), STATE)
    return folder / "last.json"


def make_model(folder: Path) -> Path:
    torch.manual_seed(0)
    create_embedder("convnet", embedding_dim=8).save(folder)
    return folder / "model.json"


def make_loss(folder: Path) -> Path:
    torch.manual_seed(0)
    config = LossConfig("pfml", {"proxies_per_class": 2})
    save_loss(folder / "loss", create_loss(config, 3, 8), config, ("a", "b", "c"), 8)
    return folder / "loss" / "loss.json"


def make_log(folder: Path) -> Path:
    run = RunFolder(folder)
    for step in range(1, 6):
        run.append("step", step, loss=1.0 / step)
    run.close()
    return run.log


def make_run_config(folder: Path) -> Path:
    write_config(folder / "config.yaml", RunConfig(), sealed=True)
    return folder / "config.yaml"


def make_results(folder: Path) -> Path:
    run = RunFolder(folder)
    run.write_results({"last": {"epoch": 3}, "best_on_test": {"epoch": 2}, "validation_selected": None})
    return run.results


def make_config(folder: Path) -> Path:
    write_config(folder / "config.yaml", RunConfig())
    return folder / "config.yaml"


# what a search needs


def make_index(folder: Path) -> Path:
    index = small_index(folder / "index")
    index.remove(paths=["3.jpg"])
    index.set_metadata(["1.jpg", "2.jpg"], [{"price": 3.5, "tags": ["a"]}, {"brand": "Acme"}])
    index.edit(Edit("rename", "class 1", "renamed"))
    return folder / "index" / "index.json"


def index_content(folder: Path) -> Any:
    index = ImageIndex.open(folder)
    entries = [asdict(entry) for entry in index.entries()]
    return str(index.model), entries, index.vectors([entry["id"] for entry in entries])


def make_threshold(folder: Path) -> Path:
    rate = Rate(1, 10, 0.0, 0.4)
    distances = {"genuine": torch.linspace(0, 1, 9), "impostor": torch.linspace(0, 2, 9)}
    threshold = replace(made_threshold(class_values={"a": 0.5}, model=MODEL), false_accepts=rate, scores=distances)
    return threshold.save(folder)


def threshold_content(folder: Path) -> Any:
    threshold = Threshold.load(folder)
    assert threshold is not None
    return asdict(replace(threshold, scores={})), threshold.scores


def make_bundle(folder: Path) -> Path:
    run = folder / "run"
    make_model(run / "model")
    make_loss(run)
    embedder = load_embedder(run / "model")
    identity = ModelIdentity.of(embedder)
    index = ImageIndex.create(run / "index", identity, 8)
    index.add(embedder.encode([torch.rand(3, 32, 32) for _ in range(4)]), list("abcd"), model=identity)
    export_bundle(run, folder / "bundle.zip")
    return folder / "bundle.zip"


def make_bundle_folder(folder: Path) -> Path:
    make_model(folder / "run" / "model")
    export_bundle(folder / "run", folder / "bundle")
    return folder / "bundle" / "bundle.json"


def bundle_content(path: Path) -> Any:
    bundle = load_bundle(path)
    field = None if bundle.field is None else (bundle.field.proxies, bundle.field.class_names)
    indexed = None if bundle.index is None else index_content(bundle.index.path)
    return dict(bundle.embedder.state_dict()), field, indexed, bundle.card


# lists of images and of labels


def birds() -> ImageSet:
    labels = torch.arange(3).repeat_interleave(5)
    names = ("001.Albatross", "002.Bunting", "003.Catbird")
    paths = tuple(Path("/data/birds") / names[c] / f"bird_{k}.jpg" for k, c in enumerate(labels.tolist()))
    return ImageSet(paths, labels, names)


def make_table(folder: Path) -> Path:
    lines = ["path,label,split"]
    for label in ("ant", "bee", "cat", "dog"):
        split = "train" if label < "c" else "test"
        lines += [f"{label}/{k}.png,{label},{split}" for k in range(4)]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder / "table.csv"


def table_content(path: Path) -> Any:
    data = read_table(path)
    return image_table(data.train), image_table(data.test), data.remarks


def make_noise_list(folder: Path) -> Path:
    lines = [f"{path},{(k + (k % 4 == 0)) % 3}" for k, path in enumerate(birds().images)]
    (folder / "noise_list.csv").write_text("path,label\n" + "\n".join(lines) + "\n")
    return folder / "noise_list.csv"


def listed_noise(path: Path) -> Any:
    images, corruption = corrupt(birds(), LabelNoise(variant="list", file=path))
    return images.labels, corruption.remarks


def make_noise_record(folder: Path) -> Path:
    corrupt(birds(), LabelNoise(0.4))[1].write(folder / "noise.csv")
    return folder / "noise.csv"


def make_corrections(folder: Path) -> Path:
    Corrections({0: 1, 3: None, 8: 2}).write(folder / "corrections.csv", birds())
    return folder / "corrections.csv"


@cache
def judged() -> Any:
    generator = torch.Generator().manual_seed(0)
    centers = torch.nn.functional.normalize(torch.randn(3, 8, generator=generator))
    points = centers.repeat_interleave(5, 0) + 0.1 * torch.randn(15, 8, generator=generator)
    return audit(points, birds())


def make_decisions(folder: Path) -> Path:
    names = birds().short_names()
    rows = [(names[0], "accept", ""), (names[4], "relabel", "003.Catbird"), (names[9], "drop", "")]
    lines = [",".join(row) for row in [("path", "decision", "label"), *rows]]
    (folder / "decisions.csv").write_text("\n".join(lines) + "\n")
    return folder / "decisions.csv"


def make_cub(folder: Path) -> Path:
    (folder / "classes.txt").write_text("1 a\n2 b\n3 c\n4 d\n")
    (folder / "image_class_labels.txt").write_text("".join(f"{k} {k % 4 + 1}\n" for k in range(1, 13)))
    (folder / "images.txt").write_text("".join(f"{k} {'abcd'[k % 4]}/{k}.jpg\n" for k in range(1, 13)))
    return folder / "images.txt"


def cub_content(path: Path) -> Any:
    data = read_cub(path.parent)
    return image_table(data.train), image_table(data.test), data.remarks


def make_cars(folder: Path) -> Path:
    from scipy.io import savemat

    kinds = [("relative_im_path", object), ("class", object)]
    rows = numpy.array([(f"car_ims/{k}.jpg", k % 4 + 1) for k in range(12)], dtype=kinds)
    content = {"annotations": rows, "class_names": numpy.array(list("abcd"), dtype=object)}
    savemat(folder / "cars_annos.mat", content)
    return folder / "cars_annos.mat"


def cars_content(path: Path) -> Any:
    data = read_cars(path.parent)
    return image_table(data.train), image_table(data.test), data.remarks


# images, numbers, results


def noise_image(seed: int = 0, size: int = 24) -> Image.Image:
    pixels = numpy.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=numpy.uint8)
    return Image.fromarray(pixels)


def make_image(folder: Path, name: str) -> Path:
    noise_image().save(folder / name)
    return folder / name


def cached_images(folder: Path) -> ImageSet:
    paths = tuple(folder / "images" / f"{k}.png" for k in range(4))
    return ImageSet(paths, torch.zeros(4, dtype=torch.int64), ("only",))


def make_pixel_cache(folder: Path, name: str) -> Path:
    images = cached_images(folder)
    (folder / "images").mkdir()
    for k, path in enumerate(images.images):
        noise_image(k).save(path)
    open_images(images, cache=folder / "cache")
    [found] = (folder / "cache").rglob(name)
    return found


def cached_pixels(path: Path) -> Any:
    folder = path.parents[2]
    source = open_images(cached_images(folder), cache=folder / "cache")
    return source.sizes, source.pixels.data


def make_store(folder: Path) -> Path:
    store = ResultsStore(folder / "results.jsonl")
    for seed in range(4):
        store.append(record(seed=seed))
    return store.path


def make_study(folder: Path) -> Path:
    config = {"loss": {"name": "pfml"}, "data": {"name": "glyphs"}, "model": {"backbone": "convnet"}, "epochs": 3}
    trials = [{"state": "complete", "score": 0.4, "values": {"loss.options.delta": 0.7}}]
    space = {"loss.options.delta": {"low": 0.5, "high": 1.5, "log": False, "whole": False}}
    record = {
        "version": 1,
        "metric": "recall_at_1",
        "split": "half",
        "space": space,
        "config": config,
        "trials": trials,
    }
    (folder / "tuning.json").write_text(json.dumps(record))
    return folder / "tuning.json"


def study_content(path: Path) -> Any:
    study = read_study(path.parent)
    return study.method, study.dataset, study.backbone, dict(study.values)


def make_embeddings(folder: Path) -> Path:
    write_embeddings(folder / "points.npz", ["a", "b"], torch.arange(16.0).reshape(2, 8))
    return folder / "points.npz"


def make_collection(folder: Path) -> Path:
    settings = CollectionSettings("a model", "ab" * 32, 8, "float32", 4)
    write_settings(folder, settings)
    files = tuple(FileState(10 + k, 20 + k, "cd" * 32) for k in range(2))
    paths, unreadable = ("/images/a.png", "/images/b.png"), (("/images/c.png", "truncated"),)
    vectors = torch.arange(16.0).reshape(2, 8)
    shard = VectorShard(vectors, torch.arange(2), paths, ("", ""), ("", ""), *packed(files), unreadable)
    add_shard(folder, settings, shard, 0)
    return folder / "embeddings.json"


def make_safetensors(folder: Path) -> Path:
    save_tensors(folder / "weights.safetensors", some_tensors())
    return folder / "weights.safetensors"


def make_pth(folder: Path) -> Path:
    torch.save(some_tensors(), folder / "weights.pth")
    return folder / "weights.pth"


def beside(make: Callable[[Path], Path], pattern: str) -> Callable[[Path], Path]:
    """The one file that matches `pattern` beside the one that `make` gives."""

    def made(folder: Path) -> Path:
        [found] = make(folder).parent.glob(pattern)
        return found

    return made


def of_field(path: Path) -> Any:
    field = load_field(path.parents[1])
    return field.proxies, field.class_names, field.method, asdict(field.law)


def of_noise_record(path: Path) -> Any:
    corruption = Corruption.read(path, birds())
    return corruption.indices, corruption.given_labels


def of_decisions(path: Path) -> Any:
    return read_decisions(path, judged())


def of_parent(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    return lambda path: read(path.parent)


#: One row per kind of file.
FILE_KINDS = [
    FileKind("checkpoint manifest", make_checkpoint, of_parent(load_checkpoint), sealed=True),
    FileKind("checkpoint tensors", beside(make_checkpoint, "*.safetensors"), of_parent(load_checkpoint), sealed=True),
    FileKind("model manifest", make_model, of_parent(lambda f: dict(load_embedder(f).state_dict())), sealed=True),
    FileKind(
        "model weights",
        beside(make_model, "*.safetensors"),
        of_parent(lambda f: dict(load_embedder(f).state_dict())),
        sealed=True,
    ),
    FileKind("loss manifest", make_loss, of_field, sealed=True),
    FileKind("loss tensors", beside(make_loss, "*.safetensors"), of_field, sealed=True),
    FileKind("index manifest", make_index, of_parent(index_content), sealed=True),
    FileKind("removed entries", beside(make_index, "index-*.safetensors"), of_parent(index_content), sealed=True),
    FileKind("metadata shard", beside(make_index, "metadata-*.safetensors"), of_parent(index_content), sealed=True),
    FileKind("index shard", beside(make_index, "shard-*.safetensors"), of_parent(index_content), sealed=True),
    FileKind("threshold", make_threshold, of_parent(threshold_content), sealed=True),
    FileKind("threshold distances", beside(make_threshold, "*.safetensors"), of_parent(threshold_content), sealed=True),
    FileKind("model bundle manifest", make_bundle_folder, of_parent(bundle_content), sealed=True),
    FileKind("model bundle archive", make_bundle, bundle_content, sealed=True),
    FileKind("pixel cache manifest", lambda f: make_pixel_cache(f, "manifest.json"), cached_pixels, True, "rebuilt"),
    FileKind("pixel cache pixels", lambda f: make_pixel_cache(f, "pixels.bin"), cached_pixels, True, "rebuilt"),
    FileKind("results store", make_store, lambda path: ResultsStore(path).records(), remedy="ignored"),
    FileKind("run log", make_log, of_parent(lambda f: RunFolder(f).entries("step")), remedy="ignored"),
    FileKind("tuning study", make_study, study_content),
    FileKind("configuration of a run", make_run_config, lambda path: asdict(read_config(path))),
    FileKind("results of a run", make_results, of_parent(lambda f: RunFolder(f).read_results())),
    FileKind("configuration", make_config, lambda path: asdict(read_config(path)), text=True),
    FileKind("data table", make_table, table_content, text=True),
    FileKind("noise list", make_noise_list, listed_noise, text=True),
    FileKind("noise record", make_noise_record, of_noise_record, text=True),
    FileKind("corrections list", make_corrections, lambda p: Corrections.read(p, birds()).labels, text=True),
    FileKind("decisions list", make_decisions, of_decisions, text=True),
    FileKind("CUB list", make_cub, cub_content, text=True),
    FileKind("Cars list", make_cars, cars_content),
    FileKind("PNG image", lambda folder: make_image(folder, "image.png"), read_rgb),
    FileKind("JPEG image", lambda folder: make_image(folder, "image.jpg"), read_rgb),
    FileKind("embeddings archive", make_embeddings, read_embeddings),
    FileKind("embedded collection", make_collection, of_parent(read_embeddings), sealed=True),
    FileKind("embedded shard", beside(make_collection, "shard-*"), of_parent(read_embeddings), sealed=True),
    FileKind("weight file, safetensors", make_safetensors, read_weight_file),
    FileKind("weight file, PyTorch", make_pth, read_weight_file),
]
KINDS = {kind.name: kind for kind in FILE_KINDS}
assert len(KINDS) == len(FILE_KINDS)
__all__ = ["FILE_KINDS", "KINDS", "FileKind", "comparable"]
