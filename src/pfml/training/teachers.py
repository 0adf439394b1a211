"""The teachers of a student: trained embedders, whose embeddings of the student's crops are its targets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from pfml.backends.cuda_graph import is_switched_off, record
from pfml.data import RetrievalData
from pfml.data.image_set import refuse_seen_classes
from pfml.losses.distillation import combined, principal_directions
from pfml.models import Embedder, EmbedderConfig, load_embedder
from pfml.models.embedder import model_folder
from pfml.models.inference import folded, fuse
from pfml.models.resnet_he import ResNet50He
from pfml.runs.config import TrainConfig

__all__ = ["Teachers", "load_teachers", "require_fewer", "require_unseen", "teacher_digests", "usual_dims"]

log = logging.getLogger(__name__)

#: Steps from which compiling teachers pays.
COMPILED_FROM = 2_000

#: A forward pass: the weights of a network, and images.
Forward = Callable[[dict[str, Tensor], Tensor], Tensor]


class Teachers:
    """Several trained embedders, whose embeddings of a batch are concatenated (`pfml.losses.distillation.combined`).

    BatchNorm is folded into the convolutions. On a GPU the backbones compute in bfloat16, those of `resnet50_he` by
    fused convolutions, and all forward passes are one CUDA graph for each shape of a batch, since Python launches a
    ResNet-50's kernels more slowly than they run. Compiled, teachers of one architecture share one program, whatever
    their weights.

    Args:
        embedders: Not changed.
        device: Where to compute.
        compiling: Whether torch.compile compiles forward passes that are not fused, which takes half a minute.
    """

    def __init__(self, embedders: Sequence[Embedder], device: torch.device, *, compiling: bool = False) -> None:
        if not embedders:
            raise ValueError("a student needs at least one teacher, got none")
        self.device = device
        self.precision = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.sides = [each.preprocessing.crop for each in embedders]
        self.networks = [self._prepared(each) for each in embedders]
        self._weights = [dict(each.state_dict()) for each in self.networks]
        programs: dict[tuple[EmbedderConfig, int], Forward] = {}
        self._forwards = [
            programs.setdefault(
                (replace(each.config, weights="none"), side),
                _forward(network, compiling and not self._is_fused(network)),
            )
            for each, side, network in zip(embedders, self.sides, self.networks, strict=True)
        ]
        self.basis: Tensor | None = None  # (sum of D, dims), of reduced teachers
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None] = {}
        # one teacher alone does not fill a large GPU: all but the first have a stream of their own in the graph
        self._streams = [torch.cuda.Stream(device) for _ in embedders[1:]] if device.type == "cuda" else []
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.networks)

    @torch.no_grad()
    def reduce(self, dims: int, batches: Iterable[Tensor]) -> float:
        """Reduce embeddings to `dims` dimensions from now on; the fraction of the variance that these keep.

        They are the principal dimensions of the teachers' embeddings of these batches of crops. Distances are scaled,
        so that the mean of their squares stays.
        """
        width = sum(each.embedding_dim for each in self.networks)
        require_fewer(dims, width)
        self.basis = None
        self._graphs.clear()
        self.basis, kept = principal_directions((self.embeddings(crops) for crops in batches), dims)
        return kept

    @torch.no_grad()
    def __call__(self, crops: Tensor) -> Tensor:
        """Embeddings (n, sum of D), or (n, dims) after `reduce`, in float32 of RGB crops (n, 3, side, side) in [0, 1].

        Crops are resized for teachers that take another size.
        """
        return self._replayed(crops) if crops.is_cuda else self.embeddings(crops)

    def begin(self, crops: Tensor) -> Callable[[], Tensor]:
        """Start to embed crops; the function that is returned waits for the embeddings.

        A GPU embeds them while it does the work that is launched meanwhile: neither the student nor a teacher fills it
        alone. The first batch of a shape is embedded before that work, since the student's kernels are timed then.
        """
        beside = self._beside
        if beside is None or not crops.is_cuda or crops.shape not in self._graphs:
            embeddings = self(crops)
            return lambda: embeddings
        beside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(beside):
            embeddings = self(crops)
        crops.record_stream(beside)

        def finished() -> Tensor:
            here = torch.cuda.current_stream(self.device)
            here.wait_stream(beside)
            embeddings.record_stream(here)
            return embeddings

        return finished

    @torch.no_grad()
    def embeddings(self, crops: Tensor) -> Tensor:
        """What a call returns, computed without a CUDA graph."""
        return self._reduced([self._embedded(number, crops) for number in range(len(self))])

    def _reduced(self, outputs: Sequence[Tensor]) -> Tensor:
        together = combined(outputs)
        return together if self.basis is None else together @ self.basis

    def _embedded(self, number: int, crops: Tensor) -> Tensor:
        """The embeddings of one teacher."""
        side = self.sides[number]
        seen = crops if crops.shape[-1] == side else _resized(crops, side)
        with torch.autocast(crops.device.type, self.precision, enabled=self.precision != torch.float32):
            return self._forwards[number](self._weights[number], seen).float()

    def _side_by_side(self, crops: Tensor) -> Tensor:
        """What `embeddings` returns, each teacher on a stream of its own; for a graph that is being captured."""
        here = torch.cuda.current_stream(self.device)
        for stream in self._streams:
            stream.wait_stream(here)
        outputs = []
        for number, stream in enumerate([here, *self._streams]):
            with torch.cuda.stream(stream):
                outputs.append(self._embedded(number, crops))
        for stream in self._streams:
            here.wait_stream(stream)
        return self._reduced(outputs)

    def _prepared(self, embedder: Embedder) -> Embedder:
        """A copy for inference, with BatchNorm folded, on the device and in its precision."""
        side = embedder.preprocessing.crop
        device = next(embedder.parameters()).device
        example = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
        network = folded(embedder, example)
        assert isinstance(network, Embedder)
        network.config = replace(network.config, flip_test=False)  # the target is the embedding of this crop alone
        if self.device.type == "cuda":
            network.to(memory_format=torch.channels_last)
        network.to(self.device)
        network.backbone.to(self.precision)
        if self._is_fused(network):
            fuse(network.backbone)
        return network

    def _is_fused(self, network: Embedder) -> bool:
        return self.device.type == "cuda" and isinstance(network.backbone, ResNet50He)

    def _replayed(self, crops: Tensor) -> Tensor:
        """What `embeddings` returns, by a CUDA graph if one could be recorded for this shape."""
        if is_switched_off():
            return self.embeddings(crops)
        if crops.shape not in self._graphs:
            self._graphs[crops.shape] = self._recorded(crops)
        recorded = self._graphs[crops.shape]
        if recorded is None:
            return self.embeddings(crops)
        graph, given, result = recorded
        given.copy_(crops)
        graph.replay()
        return result.clone()  # the next batch is written to the same memory

    def _recorded(self, crops: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor] | None:
        """The graph of batches of this shape, with the memory of their crops and embeddings; None if it fails."""
        given = crops.clone()
        aside = torch.cuda.Stream(self.device)
        aside.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(aside):  # kernels are chosen by their times before they are recorded
            for _ in range(3):
                self.embeddings(given)
        torch.cuda.current_stream(self.device).wait_stream(aside)
        try:
            graph, result = record(lambda: self._side_by_side(given), self.device)
        except RuntimeError as error:
            log.warning("teachers embed operation by operation, since their CUDA graph failed: %s", error)
            return None
        return graph, given, result


def load_teachers(
    config: TrainConfig, data: RetrievalData, student: Embedder, device: torch.device, steps: int
) -> Teachers | None:
    """The teachers of a run of `steps` steps, None without any; the student's `trained_on` gets their classes.

    Raises:
        SeenClassError: A teacher was trained on a class that the student is evaluated on.
    """
    if not config.teachers:
        if isinstance(config.teacher_dims, int):
            raise ValueError("teacher_dims is about the teachers of a student: give some, or leave it out")
        return None
    embedders = [load_embedder(folder) for folder in config.teachers]
    require_unseen(embedders, data)
    for teacher in embedders:
        if teacher.trained_on is not None and student.trained_on is not None:
            names = dict.fromkeys((*student.trained_on.class_names, *teacher.trained_on.class_names))
            student.trained_on = replace(student.trained_on, class_names=tuple(names))
    compiling = config.compile if isinstance(config.compile, bool) else steps >= COMPILED_FROM
    is_gpu = device.type == "cuda"
    return Teachers(embedders, device, compiling=compiling and is_gpu and not config.deterministic)


def usual_dims(teachers: Sequence[int], student: int) -> int | None:
    """The dimensions that teachers are reduced to where `teacher_dims` is "auto"; None to keep all.

    What several teachers agree on takes fewer dimensions than one of them has, and a small student cannot follow many:
    these were the best of those tried on validation classes of CUB and on glyphs (docs/STUDENTS.md).

    Args:
        teachers: Dimensions of each teacher.
        student: Dimensions of the student.
    """
    dims = min(sum(teachers) // len(teachers) // 2, 2 * student)
    return dims if len(teachers) > 1 and dims > 0 else None


def require_fewer(dims: int, width: int) -> None:
    """Refuse `dims` for teachers that have `width` dimensions together."""
    if not 0 < dims < width:
        raise ValueError(f"teacher_dims must be at least 1 and below the {width} of all teachers, got {dims}")


def teacher_digests(config: TrainConfig) -> list[str]:
    """The sha256 of the model.json of each teacher of a run, which in turn has those of its weights."""
    return [
        hashlib.sha256((model_folder(Path(each)) / "model.json").read_bytes()).hexdigest() for each in config.teachers
    ]


def require_unseen(teachers: Sequence[Embedder], data: RetrievalData) -> None:
    """Refuse teachers that were trained on classes that the student is evaluated on."""
    for teacher in teachers:
        if teacher.trained_on is None:
            continue
        for role, images in (("test", data.test), ("validation", data.validation)):
            if images is not None and not (role == "test" and data.protocol == "images"):
                refuse_seen_classes(teacher.trained_on.class_names, images, role)


def _forward(network: nn.Module, compiling: bool) -> Forward:
    """The forward pass of networks like this one, with their weights as an argument."""

    def forward(weights: dict[str, Tensor], images: Tensor) -> Tensor:
        result: Tensor = functional_call(network, weights, (images,))
        return result

    return torch.compile(forward, dynamic=False) if compiling else forward


def _resized(crops: Tensor, side: int) -> Tensor:
    return F.interpolate(crops, size=(side, side), mode="bilinear", antialias=True, align_corners=False)
