"""The published recipes: data, read from the authors' public code and papers.

Of each method the recipe for CUB with ResNet-50 stands first where there is one. Epochs count from the start of the
run: where the authors count those of a warm-up apart, they are added.
"""

from __future__ import annotations

from dataclasses import replace

from pfml.methods.method import Recipe

__all__ = [
    "ARCFACE",
    "COSFACE",
    "EPSHN",
    "FAST_AP",
    "HIST",
    "MARGIN",
    "MULTI_SIMILARITY",
    "NORMALIZED_SOFTMAX",
    "NT_XENT",
    "PAPER",
    "PROXY_ANCHOR",
    "PROXY_GML",
    "PROXY_NCA",
    "PROXY_NCA_PLUS_PLUS",
    "REVISITING",
    "SNR",
    "SOFT_TRIPLE",
]


def _paper(dataset: str, backbone: str) -> Recipe:
    is_sop = dataset == "sop"
    return Recipe(
        "adam", 1e-4, "the paper's supplement", 0.01, 1e-4 if dataset == "cars" else 5e-4,
        dataset=dataset, backbone=backbone, options={"proxies_per_class": 2} if is_sop else {},
        batch_size=100 if backbone == "resnet50" else 180, samples_per_class=4, epochs=200,
        warm_up_epochs=0 if is_sop else 1, batch_norm="train" if is_sop else "freeze", embedding_dim=512,
        departs="the paper does not say how batches are drawn; whether proxies decay (here not)",
    )  # fmt: skip


PAPER = tuple(
    _paper(dataset, backbone) for backbone in ("resnet50", "bn_inception") for dataset in ("cub", "cars", "sop")
)

_ANCHOR = Recipe(
    "adamw", 1e-4, "authors' code, commands of its README", 0.01, 1e-4, 1e-4, dataset="cub", backbone="resnet50",
    clip_value=10, step_every=5, step_factor=0.5, batch_size=120, epochs=60, warm_up_epochs=5, batch_norm="freeze",
    pooling="avg+max", embedding_dim=512,
)  # fmt: skip
_ANCHOR_INCEPTION = replace(_ANCHOR, backbone="bn_inception", batch_size=180, step_every=10, warm_up_epochs=1)
_ANCHOR_SOP = replace(
    _ANCHOR_INCEPTION, dataset="sop", lr=6e-4, proxy_lr=0.06, step_every=20, step_factor=0.25, batch_norm="train"
)
PROXY_ANCHOR = (
    _ANCHOR,
    replace(_ANCHOR, dataset="cars", step_every=10),
    _ANCHOR_INCEPTION,
    replace(_ANCHOR_INCEPTION, dataset="cars", step_every=20),
    _ANCHOR_SOP,
    replace(_ANCHOR_SOP, dataset="in-shop"),
)

_NCA = Recipe(
    "adam", 0.045, "code of others: dichotomies/proxy-nca", 1.0, dataset="cub", backbone="bn_inception", eps=1.0,
    options={"published_start": True}, step_every=1, step_factor=0.94, batch_size=32, epochs=20, batch_norm="train",
    pooling="avg", embedding_dim=64, image_size=227, resize=256,
    departs="label smoothing 0.1 and the own class in the softmax's sum; the layer starts at normal numbers of 0.001, "
    "cut off at two of them (here He's)",
)  # fmt: skip
PROXY_NCA = (
    _NCA,
    replace(_NCA, dataset="cars", epochs=50),
    replace(_NCA, dataset="sop", epochs=50, proxy_lr=10.0, options={"published_start": True, "scale": 8.0}),
)

_NCA_PP = Recipe(
    "adam", 4e-3, "authors' code, config/*.json", 400.0, dataset="cub", backbone="resnet50", eps=1.0,
    options={"published_start": True}, clip_value=10, batch_size=32, samples_per_class=4, epochs=45, warm_up_epochs=5,
    batch_norm="train", head_start="uniform", pooling="max", layer_norm="features", embedding_dim=2048, image_size=256,
    resize=288,
    departs="a first run on half of the classes finds where the rates fall to a tenth (NMI and R@1 have not improved "
    "for 4 epochs) and which epoch is best, and these epochs are not published: here rates are constant, as they are "
    "in the code's second command alone; Adam is reset after the warm-up; 2 GPUs with half a batch each; float16 by "
    "apex",
)  # fmt: skip
_NCA_PP_SOP = replace(_NCA_PP, dataset="sop", lr=0.024, proxy_lr=240.0, batch_size=192, samples_per_class=3, epochs=85)
PROXY_NCA_PLUS_PLUS = (
    _NCA_PP,
    replace(_NCA_PP, dataset="cars"),
    _NCA_PP_SOP,
    replace(_NCA_PP_SOP, dataset="in-shop", proxy_lr=2400.0),
)

_LAST_BATCH = "the last, smaller batch of an epoch is left out"
#: `(epoch + 1) % 20 == 0` before an epoch that counts from 0: 19 epochs at the full rate
_TWENTY = (19, 39)
SOFT_TRIPLE = (
    Recipe(
        "adam", 1e-4, "authors' code, command of its README", 0.01, 1e-4, 1e-4, dataset="cars", backbone="bn_inception",
        options={"published_start": True}, eps=0.01, milestones=_TWENTY, step_factor=0.1, batch_size=32, epochs=50,
        batch_norm="freeze-statistics", head_start="uniform", pooling="avg",
        departs=f"{_LAST_BATCH}; the command has 64 dimensions, the paper 64 and 512: D is left as it is",
    ),
)  # fmt: skip

_GML = Recipe(
    "adam", 1e-4, "authors' code, commands of its README", 0.03, 1e-4, 1e-4, dataset="cub", backbone="bn_inception",
    eps=0.01, milestones=_TWENTY, step_factor=0.1, batch_size=32, epochs=50, warm_up_epochs=1, warm_up_after=1,
    batch_norm="freeze-statistics", head_start="uniform", pooling="avg", embedding_dim=512, departs=_LAST_BATCH,
)  # fmt: skip
PROXY_GML = (
    _GML,
    replace(_GML, dataset="cars"),
    replace(
        _GML, dataset="sop", proxy_lr=0.3, batch_norm="train", options={"proxies_per_class": 1, "proxy_weight": 0.0}
    ),
)

_HIST = Recipe(
    "adam", 1.2e-4, "authors' code, commands of its README", 0.1, 5e-5, 5e-5, dataset="cub", backbone="resnet50",
    options={"alpha": 1.1, "network_lr": 6e-4}, milestones=tuple(range(6, 41, 5)), step_factor=0.5, batch_size=32,
    epochs=41, warm_up_epochs=1, batch_norm="freeze", pooling="avg+max", layer_norm="embedding", embedding_dim=512,
)  # fmt: skip
HIST = (
    _HIST,
    replace(
        _HIST, dataset="cars", lr=1e-4, weight_decay=1e-4, proxy_weight_decay=1e-4, epochs=51,
        milestones=tuple(range(11, 51, 10)), options={"alpha": 0.9, "network_lr": 1e-3},
    ),
    replace(
        _HIST, dataset="sop", lr=1e-4, proxy_lr=0.01, weight_decay=1e-4, proxy_weight_decay=1e-4, epochs=61,
        milestones=tuple(range(11, 61, 10)), options={"tau": 16.0, "alpha": 2.0, "network_lr": 1e-3},
        batch_norm="train",
    ),
)  # fmt: skip

_MULTI = Recipe(
    "adam", 3e-5, "authors' code, configs/example_resnet50.yaml", weight_decay=5e-4, dataset="cub", backbone="resnet50",
    options={"beta": 40.0}, milestones=(6, 12), step_factor=0.1, batch_size=80, samples_per_class=5,
    steps_per_epoch=200, epochs=15, batch_norm="freeze-statistics", crop_area=(0.16, 1.0), pooling="avg",
    embedding_dim=512, image_size=227, resize=256, departs="training images are resized to 256 before their crops",
)  # fmt: skip
MULTI_SIMILARITY = (
    _MULTI,
    replace(_MULTI, backbone="bn_inception", pooling="max", source="authors' code, configs/example.yaml"),
)

REVISITING = (
    Recipe(
        "adam", 1e-5, "Roth et al., ICML 2020, and their code", weight_decay=4e-4, backbone="resnet50", batch_size=112,
        samples_per_class=2, epochs=150, batch_norm="freeze-statistics", head_start="uniform", pooling="avg",
        embedding_dim=128,
    ),
)  # fmt: skip
MARGIN = tuple(replace(recipe, proxy_lr=5e-4) for recipe in REVISITING)

_NORM_SOFTMAX = Recipe(
    "sgd", 1e-3, "authors' code, commands of its README", 1e-3, 1e-4, 1e-4, dataset="cub", backbone="resnet50",
    options={"published_start": True}, momentum=0.9, milestones=(16,), step_factor=0.1, batch_size=75,
    samples_per_class=25, epochs=31, warm_up_epochs=1, batch_norm="train", crop_area=(0.766, 0.766), pooling="avg",
    layer_norm="features", embedding_dim="features",
    departs="images are squeezed to 256 x 256, then cropped to 224 at random positions (here crops of the same area, "
    "and test images keep their ratio of sides); momentum is reset after the warm-up",
)  # fmt: skip
_NORM_SOFTMAX_CARS = replace(_NORM_SOFTMAX, dataset="cars", lr=0.01, proxy_lr=0.01)
NORMALIZED_SOFTMAX = (
    _NORM_SOFTMAX,
    _NORM_SOFTMAX_CARS,
    replace(_NORM_SOFTMAX_CARS, dataset="sop", samples_per_class=5),
    replace(_NORM_SOFTMAX_CARS, dataset="in-shop", samples_per_class=5),
)

EPSHN = (
    Recipe(
        "sgd", 0.03, "authors' code, run.sh", dataset="cars", backbone="resnet18", milestones=(50, 75), step_factor=0.1,
        batch_size=128, samples_per_class=16, epochs=100, batch_norm="train", head_start="uniform", pooling="avg",
        embedding_dim=64, image_size=256, resize=256, crop_area=(0.83, 0.83),
        departs="crops of 256 from images of short side 281 (here of the same area); colors normalized by the data "
        "set's own mean and deviation; all classes filled up to the largest, so that epochs are longer",
    ),
)  # fmt: skip


def _mlrc(dataset: str, options: dict[str, float], proxy_lr: float | None = None, per_class: int = 4) -> Recipe:
    return Recipe(
        "rmsprop", 1e-6, "Musgrave et al., ECCV 2020, tuned values of their code", proxy_lr, 1e-4,
        dataset=dataset, backbone="bn_inception", options=options, momentum=0.9, batch_size=32,
        samples_per_class=per_class, steps_per_epoch=100, batch_norm="freeze-statistics", head_start="uniform",
        crop_area=(0.16, 1.0), pooling="avg", embedding_dim=128, image_size=227, resize=256,
        departs="trains until validation has not improved for a while (here as many epochs as are asked for); four "
        "folds; training images are resized to 256 before their crops"
        + ("" if proxy_lr is None else "; the decay of the loss's weights was not looked up (here 0)"),
    )  # fmt: skip


NT_XENT = (_mlrc("cub", {"temperature": 0.0091}), _mlrc("cars", {"temperature": 0.0219}))
FAST_AP = (_mlrc("cub", {"num_bins": 17}), _mlrc("cars", {"num_bins": 27}))
SNR = (
    _mlrc("cub", {"pos_margin": 0.326, "neg_margin": 0.845, "zero_mean": 0.138}),
    _mlrc("cars", {"pos_margin": 0.167, "neg_margin": 0.934, "zero_mean": 0.0}),
)
COSFACE = (
    _mlrc("cub", {"margin": 0.618, "scale": 100.0, "published_start": True}, 2.53e-3, 1),
    _mlrc("cars", {"margin": 0.432, "scale": 161.5, "published_start": True}, 7.41e-3, 1),
)
ARCFACE = (
    _mlrc("cub", {"margin": 23.2, "scale": 100.0, "published_start": True}, 5.13e-3, 1),
    _mlrc("cars", {"margin": 20.5, "scale": 49.5, "published_start": True}, 7.39e-6, 1),
)
