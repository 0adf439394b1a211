"""Which model made a vector: distances between vectors of different models mean nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field

from pfml.models.embedder import Embedder

__all__ = ["ModelIdentity", "OtherModelError"]

#: Options that came later -> their value in models from before, which are the same models with it.
LATER = {"flip_test": False, "parts": 1, "relations": 1, "sub_blocks": 1}


class OtherModelError(ValueError):
    """Vectors of one model were given to an index or a threshold of another one."""


@dataclass(frozen=True)
class ModelIdentity:
    """The name of a model: two are equal if their digests are.

    Args:
        digest: 64 hexadecimal digits.
        description: The model in words, for messages.
    """

    digest: str
    description: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.digest) != 64 or set(self.digest) - set("0123456789abcdef"):
            raise ValueError(f"the digest of a model must be 64 hexadecimal digits, got {self.digest!r}")

    def __str__(self) -> str:
        return f"{self.description or 'a model'} ({self.digest[:12]})"

    @classmethod
    def of(cls, embedder: Embedder) -> ModelIdentity:
        """The identity of an embedder: a digest of its weights, its structure and its preprocessing.

        It stays the same wherever the model is saved, copied or loaded, on any device.
        """
        structure = asdict(embedder.config)
        del structure["weights"]  # where training began: the weights themselves are hashed
        for option, off in LATER.items():
            if structure[option] == off:
                del structure[option]
        settings = {"embedder": structure, "preprocessing": embedder.preprocessing.to_dict()}
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, tensor in sorted(embedder.state_dict().items()):
            values = tensor.detach().cpu().contiguous()
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
            digest.update(values.flatten().numpy().data)
        trained_on = "untrained" if embedder.trained_on is None else f"trained on {embedder.trained_on.dataset}"
        moment = (
            "" if embedder.trained_on is None or not embedder.trained_on.moment else f", {embedder.trained_on.moment}"
        )
        return cls(digest.hexdigest(), f"{embedder.config.backbone}, {trained_on}{moment}")

    def require(self, other: ModelIdentity, what: str) -> None:
        """Raise OtherModelError unless `other` is this model; `what` belongs to this one."""
        if other != self:
            raise OtherModelError(
                f"{what} belongs to {self}, got vectors of {other}: use that model, or make a new one with this model"
            )
