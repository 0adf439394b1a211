"""The embedder: images in, points on the unit sphere out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pfml.data.preprocessing import Preprocessing
from pfml.models.adapters import merged_state
from pfml.models.backbone import Backbone
from pfml.models.backbone_table import create_backbone, default_weights, with_image_size
from pfml.models.factorized import FactorizedBackbone
from pfml.models.head import Head
from pfml.models.hub import download_model, is_on_hub, upload_model
from pfml.models.own_network import OwnNetwork
from pfml.models.weights import load_into, load_weights
from pfml.own_code import UntrustedCodeError, is_reference, reference_to
from pfml.storage.files import DamagedFileError, remove_partials, write_atomically
from pfml.storage.manifest import Format, read_manifest
from pfml.storage.sealed_tensors import read_sealed_tensors, write_sealed_tensors
from pfml.templates import create_environment

if TYPE_CHECKING:
    from PIL import Image

__all__ = [
    "EMBEDDER",
    "Embedder",
    "EmbedderConfig",
    "TrainedOn",
    "create_embedder",
    "evaluation_mode",
    "load_embedder",
]

#: The format of model.json.
EMBEDDER = Format("embedder", 1, "train it again")


@dataclass(frozen=True)
class EmbedderConfig:
    """How an embedder is built.

    Args:
        backbone: "resnet50" (torchvision's first ImageNet weights), "bn_inception", "vit_small", "dino_vits16",
            "dinov2_small", "dinov3_small" (at 224 pixels unless `image_size` says otherwise),
            "efficientnet_lite0" (whose weights come with a package, so that no network is needed), "resnet50_he",
            "convnet" (small images, trained from scratch), any model name of timm's, or a function that makes a network
            of one's own, "module:function".
        weights: "default" (what is usual for the backbone), "hub", "package", "own" (those that a network of one's own
            comes with), "none" (random), or a .safetensors or .pth file.
        embedding_dim: D; None for the pooled features of the backbone, without a linear layer.
        pooling: "avg", "max", "avg+max" (their sum), "gem" (generalized mean) or "token" (the CLS token of a
            vision transformer).
        layer_norm: "none", or LayerNorm without parameters on the pooled "features" or on the "embedding".
        parts: Unit vectors that the embedding consists of, side by side; 1 but for methods with several heads (DiVA).
        relations: Groups of features with a sub-embedding each, which a relational layer integrates (DRML); 1 for a
            linear layer.
        sub_blocks: Sub-blocks of every block of the backbone, with routers that training sends images through one of
            them by (DFML); 1 for none.
        freeze_patch_embedding: Whether the first layer of a vision transformer never trains.
        image_size: Another height and width of what the backbone sees; None for what is usual for the backbone.
        resize: Another short side of test images before their crop of `image_size`; None for the usual ratio of both.
        flip_test: Whether an image and its mirror image are averaged outside of training: their pooled features. It
            takes twice the time.
    """

    backbone: str = "resnet50"
    weights: str = "default"
    embedding_dim: int | None = 512
    pooling: str = "avg"
    layer_norm: str = "none"
    parts: int = 1
    relations: int = 1
    sub_blocks: int = 1
    freeze_patch_embedding: bool = False
    image_size: int | None = None
    resize: int | None = None
    flip_test: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.backbone, str):
            raise TypeError(f"backbone must be the name of a backbone, got {self.backbone!r}")
        for name, side in (("image_size", self.image_size), ("resize", self.resize)):
            if side is not None and (not isinstance(side, int) or side < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {side!r}")
        for name, count in (("relations", self.relations), ("sub_blocks", self.sub_blocks)):
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise ValueError(f"{name} must be an integer >= 1, got {count!r}")
        for name, switch in (("freeze_patch_embedding", self.freeze_patch_embedding), ("flip_test", self.flip_test)):
            if not isinstance(switch, bool):
                raise TypeError(f"{name} must be True or False, got {switch!r}")


@dataclass(frozen=True)
class TrainedOn:
    """What an embedder has learned from: these classes are no test of it.

    Args:
        dataset: The data.
        class_names: The classes.
        epoch: Of the run that trained it; None if that is not known.
        chosen_by: The score on validation classes that chose this epoch; None for the last epoch.
    """

    dataset: str
    class_names: tuple[str, ...] = field(repr=False)
    epoch: int | None = None
    chosen_by: str | None = None

    @property
    def moment(self) -> str:
        """Which epoch of its run these weights are, in words; empty if that is not known."""
        if self.epoch is None:
            return ""
        return (
            f"epoch {self.epoch}, {'the last' if self.chosen_by is None else f'chosen by validation {self.chosen_by}'}"
        )


class Embedder(nn.Module):
    """A backbone, a head, and the preprocessing that belongs to them.

    Args:
        config: How it is built; `create_embedder` is the same in one call.
        backbone: In place of the one that `config` names, and its preprocessing; see `wrap`.

    Example:
        >>> embedder = create_embedder("convnet", embedding_dim=64)
        >>> embedder(torch.rand(2, 3, 32, 32)).shape  # RGB in [0, 1]; normalized inside
        torch.Size([2, 64])
    """

    def __init__(self, config: EmbedderConfig, *, backbone: tuple[Backbone, Preprocessing] | None = None) -> None:
        super().__init__()
        weights = default_weights(config.backbone) if config.weights == "default" else config.weights
        self.config = config
        self.trained_on: TrainedOn | None = None
        self._frozen: frozenset[nn.Parameter] = frozenset()
        self._taken: set[int] = set()  # sides of images that the backbone is known to take
        self.backbone: Backbone
        self.backbone, self.preprocessing = backbone or create_backbone(
            config.backbone, image_size=config.image_size, resize=config.resize
        )
        self.head = Head(
            self.backbone.num_features,
            config.embedding_dim,
            pooling=config.pooling,
            layer_norm=config.layer_norm,
            parts=config.parts,
            relations=config.relations,
            num_prefix_tokens=self.backbone.num_prefix_tokens,
        )
        load_weights(self.backbone, weights)
        if config.sub_blocks > 1:
            self.backbone = FactorizedBackbone(self.backbone, config.sub_blocks)
        for parameter in self.frozen_parameters():
            parameter.requires_grad_(False)
        if backbone is None:  # one's own network stays as it is until it trains
            self.to(memory_format=torch.channels_last)  # fastest for convolutions

    @classmethod
    def wrap(
        cls,
        network: nn.Module,
        preprocessing: Preprocessing | None = None,
        *,
        embedding_dim: int | None = None,
        pooling: str = "avg",
        layer_norm: str = "none",
        flip_test: bool = False,
    ) -> Embedder:
        """A network of one's own as an embedder, with the weights that it has; it is not copied.

        Args:
            network: Maps normalized images (B, 3, H, W) to vectors (B, F), a feature map (B, C, h, w) or tokens
                (B, T, C).
            preprocessing: Size, mean and standard deviation of its images; None for the usual ones of ImageNet.
            embedding_dim: D of a new linear layer; None to put what the network returns on the unit sphere.
            pooling, layer_norm, flip_test: As in `EmbedderConfig`.

        Example:
            >>> network = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
            >>> Embedder.wrap(network, Preprocessing(32, 32)).encode([torch.rand(3, 40, 60)]).shape
            torch.Size([1, 16])
        """
        preprocessing = preprocessing or Preprocessing()
        config = EmbedderConfig(
            backbone=reference_to(network),
            weights="none",
            embedding_dim=embedding_dim,
            pooling=pooling,
            layer_norm=layer_norm,
            flip_test=flip_test,
        )
        return cls(config, backbone=(OwnNetwork(network, preprocessing), preprocessing))

    @property
    def embedding_dim(self) -> int:
        """D of the embedding."""
        return self.head.embedding_dim

    def forward(self, images: Tensor) -> Tensor:
        """Unit vectors (B, D) in float32 of RGB images (B, 3, H, W), floats in [0, 1] or uint8.

        In place of images it takes what `features` returned for them, (B, F).
        """
        if images.ndim == 2:
            return self.head.embedded(images)
        if self.config.flip_test and not self.training:
            return self.head.embedded(self.features(images))
        return self.head(self.backbone(self.preprocessing.normalize(images)))

    def features(self, images: Tensor, poolings: Sequence[str] | None = None) -> Tensor:
        """The input of the head's linear layer for images as in `forward`, (B, F) in float32.

        With `poolings`, the inputs by each of them, concatenated, from one pass of the backbone. Features are returned
        as they are.
        """
        if images.ndim == 2 and poolings is None:
            return images
        normalized = self.preprocessing.normalize(images)
        views = (normalized, normalized.flip(-1)) if self.config.flip_test and not self.training else (normalized,)
        pooled = [self._pooled(self.backbone(view), poolings or (None,)) for view in views]
        return pooled[0] if len(pooled) == 1 else (pooled[0] + pooled[1]) / 2

    def routed_features(self, images: Tensor) -> Tensor:
        """Features of images as in `forward`, those of the routed stream, and its distance: (B, F + F + 1) in float32.

        Of an embedder with `sub_blocks`; see `FactorizedBackbone.streams`.
        """
        if not isinstance(self.backbone, FactorizedBackbone) or images.ndim == 2:
            raise ValueError(
                "a routed stream needs images and an embedder with sub_blocks whose backbone is not frozen"
            )
        whole, routed, distance = self.backbone.streams(self.preprocessing.normalize(images))
        pooled = (self._pooled(maps, (None,)) for maps in (whole, routed))
        return torch.cat([*pooled, distance[:, None].float()], dim=1)

    def _pooled(self, maps: Tensor, poolings: Sequence[str | None]) -> Tensor:
        with torch.autocast(maps.device.type, enabled=False):
            return torch.cat([self.head.pooled(maps, pooling) for pooling in poolings], dim=1)

    def head_parameters(self) -> list[nn.Parameter]:
        """The parameters that no published weights exist for."""
        return [*self.head.parameters(), *self.backbone.new_parameters()]

    def backbone_parameters(self) -> list[nn.Parameter]:
        """The parameters of the backbone that published weights exist for, frozen or not."""
        new = set(self.backbone.new_parameters())
        return [parameter for parameter in self.backbone.parameters() if parameter not in new]

    def frozen_parameters(self) -> list[nn.Parameter]:
        """The parameters that never train: those that the configuration or `freeze_backbone` freezes."""
        if not self.config.freeze_patch_embedding:
            return list(self._frozen)
        layer = self.backbone.patch_embedding()
        if layer is None:
            raise ValueError(
                f"freeze_patch_embedding needs a backbone that has one, such as vit_small or dino_vits16, "
                f"got {self.config.backbone!r}"
            )
        return [*self._frozen, *layer.parameters()]

    def freeze_backbone(self, *, but: Collection[nn.Parameter] = ()) -> None:
        """Let no parameter of the backbone train from now on, but those of `but`."""
        kept = set(but)
        self._frozen = frozenset(each for each in self.backbone_parameters() if each not in kept)
        for parameter in self._frozen:
            parameter.requires_grad_(False)

    def require_image_size(self, image_size: int) -> None:
        """Refuse crops of another size for a backbone that is built for one."""
        own = self.preprocessing.crop
        if image_size == own or image_size in self._taken:
            return
        if not self.backbone.takes(image_size):
            raise ValueError(
                f"{self.config.backbone} is built for images of {own} pixels, got {image_size}: set image_size of the "
                "model, with which it is trained and tested"
            )
        self._taken.add(image_size)

    def set_image_size(self, image_size: int) -> None:
        """Take crops of another height and width from now on, at the same ratio to the resized image.

        Crops that are larger than those of training find more as a rule: random crops show objects larger than whole
        images do (Touvron et al., 2019).

        Raises:
            ValueError: The backbone is built for one size of images, as vision transformers are.
        """
        self.require_image_size(image_size)
        self.preprocessing = with_image_size(self.preprocessing, image_size)
        self.config = replace(self.config, image_size=image_size, resize=None)

    @torch.no_grad()
    def encode(
        self,
        images: Iterable[str | Path | Image.Image | Tensor],
        *,
        batch_size: int = 64,
        device: torch.device | str | None = None,
    ) -> Tensor:
        """Unit vectors (N, D) on the CPU of images of any size, resized and cropped as the backbone expects.

        Args:
            images: Files, PIL images, or RGB tensors (3, H, W), uint8 or floats in [0, 1].
            batch_size: How many pass through the model at a time.
            device: Where to compute; the embedder is moved there, and stays. None for where it is.

        Raises:
            ValueError: If an embedding is not finite: no distance to it would mean anything.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if isinstance(images, str | Path):
            raise TypeError(f"images must be a sequence of images, got the one path {str(images)!r}; put it in a list")
        if (isinstance(images, Tensor) and images.ndim == 3) or not isinstance(images, Iterable):
            raise TypeError(f"images must be a sequence of images, got one {type(images).__name__}; put it in a list")
        images = list(images)
        if device is not None:
            self.to(device)
        device = next(self.parameters()).device
        parts = [torch.empty(0, self.embedding_dim)]
        with evaluation_mode(self):
            for first in range(0, len(images), batch_size):
                pixels = [_pixels(image, first + k) for k, image in enumerate(images[first : first + batch_size])]
                parts.append(self(self._crops(pixels).to(device)).cpu())
        points = torch.cat(parts)
        bad = (~torch.isfinite(points).all(dim=1)).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(f"embeddings must be finite, got NaN or Inf for image {bad[0]}: the model is damaged")
        return points

    def save(self, folder: str | Path, *, trained_on: TrainedOn | None = None) -> None:
        """Write the weights, `model.json` and a README.md to `folder`, replacing a model there; see `load_embedder`."""
        trained_on = trained_on or self.trained_on
        description: dict[str, Any] = {
            "embedder": asdict(self.config),
            "preprocessing": self.preprocessing.to_dict(),
            "trained_on": None if trained_on is None else asdict(trained_on),
        }
        remove_partials(Path(folder), "README.md.*")  # left by a kill
        write_sealed_tensors(Path(folder), "model", merged_state(self), description, EMBEDDER)
        card = create_environment("pfml.models").get_template("model.md").render(description=description)
        write_atomically(Path(folder) / "README.md", card.encode())

    def push_to_hub(
        self, repository: str, *, private: bool = False, token: str | None = None, message: str = ""
    ) -> str:
        """Save it as a repository of the Hugging Face Hub, with its model card; what `load_embedder` takes.

        Args:
            repository: organization/name; it is created unless it is there.
            private: Whether a new repository is private.
            token: Of the hub; None for HF_TOKEN, or what `hf auth login` has stored.
            message: Of the commit.
        """
        with TemporaryDirectory() as folder:
            self.save(folder)
            return upload_model(Path(folder), repository, private=private, token=token, message=message)

    def _crops(self, pixels: list[Tensor]) -> Tensor:
        """(B, 3, crop, crop) float32 in [0, 1] of images of any sizes."""
        from pfml.data.resampling import resample

        sizes = torch.tensor([image.shape[1:] for image in pixels])
        windows = self.preprocessing.windows(torch.arange(len(pixels)), sizes)
        return resample(lambda index: pixels[index], windows)


def create_embedder(
    backbone: str = "resnet50",
    *,
    weights: str = "default",
    embedding_dim: int | None = 512,
    pooling: str = "avg",
    layer_norm: str = "none",
    parts: int = 1,
    relations: int = 1,
    sub_blocks: int = 1,
    freeze_patch_embedding: bool = False,
    image_size: int | None = None,
    resize: int | None = None,
    flip_test: bool = False,
) -> Embedder:
    """An embedder with the weights of `weights` and a new head; the arguments are those of `EmbedderConfig`.

    Example:
        >>> create_embedder("convnet", embedding_dim=8).encode([torch.rand(3, 40, 60)]).shape
        torch.Size([1, 8])
    """
    return Embedder(
        EmbedderConfig(
            backbone=backbone,
            weights=weights,
            embedding_dim=embedding_dim,
            pooling=pooling,
            layer_norm=layer_norm,
            parts=parts,
            relations=relations,
            sub_blocks=sub_blocks,
            freeze_patch_embedding=freeze_patch_embedding,
            image_size=image_size,
            resize=resize,
            flip_test=flip_test,
        )
    )


def load_embedder(folder: str | Path, *, network: nn.Module | None = None, into: Embedder | None = None) -> Embedder:
    """The embedder that `Embedder.save` wrote to `folder` (or to `folder`/model), in evaluation mode, on the CPU.

    Nothing is downloaded but by a name of the hub, and no code is run but that of modules in PFML_TRUST. A damaged file
    is refused by name.

    Args:
        folder: Of a run, or of a saved embedder; or hf-hub:organization/name on the Hugging Face Hub.
        network: Of an embedder with a network of one's own (`Embedder.wrap`): such a network, which gets the weights.
        into: An embedder that is no longer needed: if it has the same configuration, it gets the weights, on its own
            device, in place of a new one.
    """
    path = model_folder(download_model(str(folder)) if is_on_hub(folder) else Path(folder))
    description, tensors = read_sealed_tensors(path, "model", EMBEDDER)
    try:
        config = EmbedderConfig(**description["embedder"])
        preprocessing = Preprocessing.from_dict(description["preprocessing"])
        trained_on = _trained_on(description["trained_on"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path / 'model.json'} must describe an embedder, got {error!r}") from None
    except ValueError as error:
        raise DamagedFileError(f"{path / 'model.json'} must describe a usable embedder: {error}") from None
    is_alike = into is not None and replace(into.config, weights="none") == replace(config, weights="none")
    if network is None and into is not None and is_alike:
        embedder = into
    else:
        embedder = _rebuilt(replace(config, weights="none"), preprocessing, network, path)
    load_into(embedder, tensors, path)
    embedder.config, embedder.preprocessing, embedder.trained_on = config, preprocessing, trained_on
    return embedder.eval()


def _rebuilt(config: EmbedderConfig, preprocessing: Preprocessing, network: nn.Module | None, path: Path) -> Embedder:
    """An embedder of this configuration, its weights yet to be loaded."""
    if network is not None:
        if not is_reference(config.backbone):
            raise ValueError(f"{path} has the backbone {config.backbone}: it needs no network, got {type(network)}")
        return Embedder(config, backbone=(OwnNetwork(network, preprocessing), preprocessing))
    try:
        return Embedder(config)
    except UntrustedCodeError as error:
        raise UntrustedCodeError(
            f"{path} has a network of its author's own: give one, load_embedder(folder, network=...). Or let it be "
            f"made by name: {error}"
        ) from None


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Evaluation mode within the block; afterwards every submodule is in the mode that it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def learned_by(folder: str | Path) -> TrainedOn | None:
    """The `TrainedOn` of the model in `folder`, from its model.json alone; None if it has none."""
    path = model_folder(Path(folder)) / "model.json"
    try:
        return _trained_on(read_manifest(path, EMBEDDER)["trained_on"])
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(f"{path} must describe an embedder, got {error!r}") from None


def _trained_on(learned: dict[str, Any] | None) -> TrainedOn | None:
    if learned is None:
        return None
    moment = learned.get("epoch"), learned.get("chosen_by")
    return TrainedOn(learned["dataset"], tuple(learned["class_names"]), *moment)


def model_folder(folder: Path) -> Path:
    """`folder` itself, or the model of a run in it."""
    for candidate in (folder, folder / "model"):
        if (candidate / "model.json").is_file():
            return candidate
    raise FileNotFoundError(
        f"{folder} must be a saved model or a run with one in {folder / 'model'}, but there is no model.json in either"
    )


def _pixels(image: str | Path | Image.Image | Tensor, index: int) -> Tensor:
    """(3, H, W) RGB, 0 to 255."""
    if isinstance(image, Tensor):
        if image.ndim != 3 or len(image) != 3 or image.numel() == 0:
            raise ValueError(
                f"a tensor must be an RGB image (3, H, W), got shape {tuple(image.shape)} at index {index}"
            )
        if image.dtype == torch.uint8:
            return image.cpu()
        if not image.is_floating_point():
            raise TypeError(f"a tensor must be uint8 or floats in [0, 1], got {image.dtype} at index {index}")
        low, high = image.min().item(), image.max().item()
        if not (low >= -0.5 and high <= 1.5):  # a resize may overshoot
            raise ValueError(f"a tensor of floats must lie in [0, 1], got {low:.3g} to {high:.3g} at index {index}")
        return image.cpu().float() * 255.0
    if isinstance(image, str | Path):
        from pfml.data.decoding import read_rgb

        return read_rgb(Path(image))
    return _from_pillow(image, index)


def _from_pillow(image: Image.Image, index: int) -> Tensor:
    import numpy
    from PIL import Image

    if not isinstance(image, Image.Image):
        raise TypeError(f"images must be paths, PIL images or tensors, got {type(image).__name__} at index {index}")
    if image.mode == "F" or image.mode.startswith("I"):  # Pillow would clip all but the darkest values to white
        raise ValueError(f"a PIL image must have 8 bits per channel, got mode {image.mode!r} at index {index}")
    return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1)
