"""An embedder as an ONNX file, which leaves this module only if onnxruntime computes what torch computes."""

from __future__ import annotations

import copy
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from pfml.data import ImageSet, open_images
from pfml.export.packages import require
from pfml.export.preprocessing import INPUT, OUTPUT, preprocessing_description
from pfml.models import Embedder
from pfml.storage.files import write_atomically

__all__ = ["OnnxDifferenceError", "OnnxExport", "export_onnx", "preprocessing_file"]

TOLERANCE = 1e-4
#: of the ONNX operators: what torch's exporter writes by itself, and onnxruntime runs since 1.17
OPSET = 20
#: what one protobuf message may hold, less the graph
LARGEST = 2**31 - 2**24


class OnnxDifferenceError(ValueError):
    """The exported network does not compute what the embedder computes; no file was left."""


@dataclass(frozen=True)
class OnnxExport:
    """An ONNX file that was checked.

    Args:
        path: The file.
        preprocessing: The JSON file beside it.
        largest_difference: Between any two numbers of torch's and onnxruntime's embeddings.
        images: How many they were compared on.
    """

    path: Path
    preprocessing: Path
    largest_difference: float
    images: int


def export_onnx(embedder: Embedder, path: str | Path, images: ImageSet, *, tolerance: float = TOLERANCE) -> OnnxExport:
    """Write `embedder` to an ONNX file, with a description of its preprocessing in it and beside it.

    The file takes RGB crops (batch, 3, crop, crop) in [0, 1], any number at once, and gives unit vectors.

    Args:
        embedder: Stays where and as it is.
        path: A name that ends in .onnx; a file there is replaced once the new one has been checked.
        images: Real ones, to compare onnxruntime with torch on.
        tolerance: The largest difference of two coordinates that is accepted.

    Raises:
        OnnxDifferenceError: If the difference is larger; what was at `path` stays.
    """
    path = Path(path)
    if path.suffix != ".onnx":
        raise ValueError(f"the name of the file must end in .onnx, got {path}")
    if not len(images):
        raise ValueError("there must be at least one image to check the exported network on, got none")
    for package in ("onnx", "onnxscript", "onnxruntime"):
        require(package, extra="export")
    embedder = copy.deepcopy(embedder).cpu().eval()  # a GPU would round in its own way
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
    """The JSON file beside an ONNX file; it carries the name, so that two models may lie in one folder."""
    return path.with_suffix(".preprocessing.json")


def largest_difference(embedder: Embedder, path: Path, images: ImageSet) -> float:
    """The largest difference of a coordinate between torch and onnxruntime, both on the CPU; NaN if one gives NaN."""
    import onnxruntime  # type: ignore[import-untyped,import-not-found]

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    crops = _crops(embedder, images)
    with torch.inference_mode():
        expected = embedder(crops)
    # one image alone, and all at once: the size of the batch must be free
    differences = [
        (torch.from_numpy(session.run([OUTPUT], {INPUT: some.numpy()})[0]) - wanted).abs().max()
        for some, wanted in ((crops[:1], expected[:1]), (crops, expected))
    ]
    return float(torch.stack(differences).max())


def _crops(embedder: Embedder, images: ImageSet) -> Tensor:
    """What the network sees of the images, (B, 3, crop, crop)."""
    source = open_images(images)
    windows = embedder.preprocessing.windows(torch.arange(len(images)), source.sizes)
    return torch.cat(list(source.crops([windows]))).contiguous()


def _write(embedder: Embedder, path: Path, description: dict[str, Any]) -> None:
    size = sum(tensor.numel() * tensor.element_size() for tensor in embedder.state_dict().values())
    if size > LARGEST:
        raise ValueError(f"an ONNX file must hold less than 2 GiB, got a network of {size / 2**30:.1f} GiB")
    side = embedder.preprocessing.crop
    example = torch.rand(2, 3, side, side)  # with 1, torch would take the size of the batch for fixed
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's, about its own insides
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
    """What a reader finds in the file itself."""
    from pfml.version import __version__

    learned = embedder.trained_on
    return {
        "written_by": f"pfml {__version__}",
        "backbone": embedder.config.backbone,
        "trained_on": "not recorded" if learned is None else f"{learned.dataset}, {len(learned.class_names)} classes",
        "preprocessing": json.dumps(description),
    }
