"""Potential field based deep metric learning: every embedding is a charge.

In a loop of one's own:

    loss = PotentialFieldLoss(num_classes, embedding_dim)
    loss(embeddings, labels).backward()

From images to an embedder:

    data = load_data("cub", "CUB_200_2011")
    embedder = create_embedder("resnet50", embedding_dim=512)
    train(data, embedder, TrainConfig(epochs=40), out="runs/cub", monitor=ProgressMonitor())
    load_embedder("runs/cub").encode(["bird.jpg"])
"""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names
from pfml.version import __version__ as __version__

if TYPE_CHECKING:
    from pfml.data import (
        ImageSet,
        LabelNoise,
        Preprocessing,
        RetrievalData,
        SeenClassError,
        load_data,
        with_validation,
    )
    from pfml.energy import class_potential, class_potentials, forces, potential_energy
    from pfml.evaluation import RetrievalMetrics, embed, evaluate, nearest, proxy_alignment, retrieval_metrics
    from pfml.export import Bundle, load_bundle
    from pfml.field import ContrastiveLaw, DecayLaw, LogarithmicLaw, PowerLaw
    from pfml.labels import LabelMap
    from pfml.losses import (
        CollapseWarning,
        FieldDiagnostics,
        GradientOverflowWarning,
        PotentialFieldLoss,
        ProxyAnchorLoss,
    )
    from pfml.models import Embedder, create_embedder, load_embedder
    from pfml.own_code import trust
    from pfml.training import (
        BatchConfig,
        LossConfig,
        Monitor,
        OptimizerConfig,
        ProgressMonitor,
        ScheduleConfig,
        StorageConfig,
        TrainConfig,
        train,
    )
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.data": (
                "ImageSet",
                "LabelNoise",
                "Preprocessing",
                "RetrievalData",
                "SeenClassError",
                "load_data",
                "with_validation",
            ),
            "pfml.energy": ("class_potential", "class_potentials", "forces", "potential_energy"),
            "pfml.evaluation": (
                "RetrievalMetrics",
                "embed",
                "evaluate",
                "nearest",
                "proxy_alignment",
                "retrieval_metrics",
            ),
            "pfml.export": ("Bundle", "load_bundle"),
            "pfml.field": ("ContrastiveLaw", "DecayLaw", "LogarithmicLaw", "PowerLaw"),
            "pfml.labels": ("LabelMap",),
            "pfml.losses": (
                "CollapseWarning",
                "FieldDiagnostics",
                "GradientOverflowWarning",
                "PotentialFieldLoss",
                "ProxyAnchorLoss",
            ),
            "pfml.models": ("Embedder", "create_embedder", "load_embedder"),
            "pfml.own_code": ("trust",),
            "pfml.training": (
                "BatchConfig",
                "LossConfig",
                "Monitor",
                "OptimizerConfig",
                "ProgressMonitor",
                "ScheduleConfig",
                "StorageConfig",
                "TrainConfig",
                "train",
            ),
        },
    )

__all__ = [
    "BatchConfig",
    "Bundle",
    "CollapseWarning",
    "ContrastiveLaw",
    "DecayLaw",
    "Embedder",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "ImageSet",
    "LabelMap",
    "LabelNoise",
    "LogarithmicLaw",
    "LossConfig",
    "Monitor",
    "OptimizerConfig",
    "PotentialFieldLoss",
    "PowerLaw",
    "Preprocessing",
    "ProgressMonitor",
    "ProxyAnchorLoss",
    "RetrievalData",
    "RetrievalMetrics",
    "ScheduleConfig",
    "SeenClassError",
    "StorageConfig",
    "TrainConfig",
    "class_potential",
    "class_potentials",
    "create_embedder",
    "embed",
    "evaluate",
    "forces",
    "load_bundle",
    "load_data",
    "load_embedder",
    "nearest",
    "potential_energy",
    "proxy_alignment",
    "retrieval_metrics",
    "train",
    "trust",
    "with_validation",
]
