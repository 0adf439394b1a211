"""Export of an embedder to an ONNX file, which is kept only if onnxruntime agrees with torch on real images."""

from __future__ import annotations

import copy
import json
import os
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data import ImageSet, open_images
from pfml.data.decoding import ImageError, UnreadableImagesError, read_rgb
from pfml.data.readers.folder import image_files
from pfml.models import Embedder
from pfml.packages import require_packages
from pfml.runs.config_files import read_config
from pfml.runs.data import load_listed
from pfml.storage.files import write_atomically
from pfml.version import __version__

__all__ = [
    "OnnxDifferenceError",
    "OnnxExport",
    "check_images",
    "export_onnx",
    "preprocessing_description",
    "preprocessing_file",
]

INPUT, OUTPUT = "images", "embeddings"

TOLERANCE = 1e-4
#: Images that an export is checked on.
CHECKED = 8
#: Of the ONNX operators: the default of torch's exporter, which onnxruntime supports since 1.17.
OPSET = 20
#: Bytes of weights that one protobuf message can hold beside the graph.
LARGEST = 2**31 - 2**24


class OnnxDifferenceError(ValueError):
    """The exported model does not compute what the embedder computes; no file was written."""


@dataclass(frozen=True)
class OnnxExport:
    """An ONNX file that was checked.

    Args:
        path: The file.
        preprocessing: The JSON file beside it.
        largest_difference: Of a coordinate, between torch and onnxruntime.
        images: How many images they were compared on.
    """

    path: Path
    preprocessing: Path
    largest_difference: float
    images: int


def export_onnx(embedder: Embedder, path: str | Path, images: ImageSet, *, tolerance: float = TOLERANCE) -> OnnxExport:
    """Export `embedder` to an ONNX file, with a description of its preprocessing in it and beside it.

    The model takes RGB crops (batch, 3, crop, crop) in [0, 1], any number at once, and returns unit vectors.

    Args:
        embedder: Is copied, and not changed.
        path: A name that ends in .onnx; a file there is replaced once the new one has been checked.
        images: Real ones, on which onnxruntime is compared with torch; see `check_images`.
        tolerance: The largest difference of two coordinates that is accepted.

    Raises:
        OnnxDifferenceError: If the difference is larger; what was at `path` stays.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"the name of the file must end in .onnx, got {path}")
    if not len(images):
        raise ValueError("there must be at least one image to check the exported model on, got none")
    require_packages("onnx", "onnxscript", "onnxruntime", purpose="the export to ONNX", install="pfml[export]")
    embedder = copy.deepcopy(embedder).cpu().eval()  # a GPU rounds differently
    description = preprocessing_description(embedder)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex[:12]}.partial")
    try:
        _write(embedder, temporary, description)
        difference = largest_difference(embedder, temporary, images)
        if not difference <= tolerance:
            raise OnnxDifferenceError(
                f"onnxruntime must give the embeddings of torch to {tolerance:g}, got a difference of {difference:.3g} "
                f"on {len(images)} images; nothing was written to {path}"
            )
        with open(temporary, "r+b") as file:
            os.fsync(file.fileno())
        write_atomically(preprocessing_file(path), (json.dumps(description, indent=2) + "\n").encode())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return OnnxExport(path, preprocessing_file(path), difference, len(images))


def preprocessing_file(path: Path) -> Path:
    """The JSON file beside an ONNX file; named after it, so that one folder can hold two models."""
    return path.with_suffix(".preprocessing.json")


def largest_difference(embedder: Embedder, path: Path, images: ImageSet) -> float:
    """The largest difference of a coordinate between torch and onnxruntime, both on the CPU; NaN if one gives NaN."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    crops = _crops(embedder, images)
    with torch.inference_mode():
        expected = embedder(crops)
    # one image alone, and all at once: any batch size must work
    differences = [
        (torch.from_numpy(session.run([OUTPUT], {INPUT: some.numpy()})[0]) - wanted).abs().max()
        for some, wanted in ((crops[:1], expected[:1]), (crops, expected))
    ]
    return float(torch.stack(differences).max())


def preprocessing_description(embedder: Embedder) -> dict[str, Any]:
    """The preprocessing as plain values, for programs without pfml: before the model, inside it, and its output."""
    images = embedder.preprocessing
    return {
        "input": {
            "name": INPUT,
            "shape": ["batch", 3, images.crop, images.crop],
            "dtype": "float32",
            "layout": "NCHW",
            "channel_order": "rgb",
            "value_range": [0.0, 1.0],
        },
        "before_the_model": [
            {
                "step": "resize",
                "short_side": images.resize,
                "long_side": "floor(short_side * long / short), in integers",
                "interpolation": images.interpolation,
                "antialias": True,
                "clip": [0.0, 255.0],
                "rounding": "none: on float values; an image whose short side fits already is not resized",
            },
            {
                "step": "center_crop",
                "side": images.crop,
                "offset": "round((length - side) / 2), half to even",
            },
            {"step": "scale", "factor": 1 / 255, "from": "8-bit values"},
        ],
        "inside_the_model": {
            "note": "The model normalizes by itself: do not normalize before it.",
            "channel_order": images.channel_order,
            "value_scale": images.value_scale,
            "mean": list(images.mean),
            "std": list(images.std),
        },
        "output": {
            "name": OUTPUT,
            "shape": ["batch", embedder.embedding_dim],
            "dtype": "float32",
            "unit_vectors": True,
            "distance": "Euclidean; its order is that of the cosine",
        },
    }


def check_images(run: Path, paths: Sequence[Path] | None = None, *, count: int = CHECKED) -> ImageSet:
    """A few images to check an export on, evenly spaced over those of `paths`, or over the test images of the run.

    Args:
        run: Folder of a run, or of its model.
        paths: Image files, or folders of them; None for the data of the run's configuration.
        count: At most so many; fewer if some of these cannot be read.
    """
    if paths:
        images = ImageSet.unlabeled(image_files(paths))
    else:
        folder = run_folder(run)
        if folder is None:
            raise ValueError(f"{run} does not name its data: give images to check the export on with --images")
        data = read_config(folder / "config.yaml").data
        found = load_listed(data)
        images = found.test if len(found.test) else found.train
    return _readable(images.subset(torch.linspace(0, len(images) - 1, min(count, len(images))).round().long()))


def run_folder(folder: Path) -> Path | None:
    """The run that `folder` is, or that the model in `folder` belongs to; None for a model without a run."""
    resolved = folder.resolve()  # so that "." has a parent
    candidates = (folder, resolved.parent) if (folder / "model.json").is_file() else (folder,)
    return next((candidate for candidate in candidates if (candidate / "config.yaml").is_file()), None)


def _readable(images: ImageSet) -> ImageSet:
    """`images` without files that cannot be read, which training leaves out as well; an error if none is left."""
    if not isinstance(images.images, tuple):
        return images
    failures, readable = [], []
    for position, path in enumerate(images.images):
        try:
            read_rgb(path)
            readable.append(position)
        except ImageError as error:
            failures.append(error)
    if not readable:
        raise UnreadableImagesError(failures, len(failures))
    return images.subset(torch.tensor(readable))


def _crops(embedder: Embedder, images: ImageSet) -> Tensor:
    """The input of the model for the images, (B, 3, crop, crop)."""
    source = open_images(images)
    windows = embedder.preprocessing.windows(torch.arange(len(images)), source.sizes)
    return torch.cat(list(source.crops([windows]))).contiguous()


def _write(embedder: Embedder, path: Path, description: dict[str, Any]) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in embedder.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"an ONNX file must hold less than 2 GiB, got a model of {size / 2**30:.1f} GiB")
    side = embedder.preprocessing.crop
    example = torch.rand(2, 3, side, side)  # of 2: with 1, torch would make the batch size a constant
    with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(StringIO()):  # torch 2.9 prints what it rewrites
        warnings.simplefilter("ignore")  # of the exporter, about its internals
        program = torch.onnx.export(
            embedder,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=OPSET,
        )
    assert program is not None
    program.model.metadata_props.update(_metadata(embedder, description))
    program.save(str(path), external_data=False)


def _metadata(embedder: Embedder, description: dict[str, Any]) -> dict[str, str]:
    """The metadata of the ONNX file."""
    learned = embedder.trained_on
    return {
        "written_by": f"pfml {__version__}",
        "backbone": embedder.config.backbone,
        "trained_on": "not recorded" if learned is None else f"{learned.dataset}, {len(learned.class_names)} classes",
        "preprocessing": json.dumps(description),
    }
