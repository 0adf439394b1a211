"""What people read beside a saved model."""

from __future__ import annotations

from typing import Any

__all__ = ["model_card"]


def model_card(description: dict[str, Any]) -> str:
    """A model card in Markdown."""
    model, images, learned = description["embedder"], description["preprocessing"], description["trained_on"]
    dimension = model["embedding_dim"] or "as many as the backbone has features"
    trained = "not recorded" if learned is None else f"{learned['dataset']}, {len(learned['class_names']):,} classes"
    values = f"{images['channel_order']} in 0 to {images['value_scale']:g}, mean {images['mean']}, std {images['std']}"
    return f"""# An image embedder

It turns an image into a point on the unit sphere; images of one class lie close to each other, also of classes that it
was not trained on.

| | |
|---|---|
| backbone | {model["backbone"]} |
| dimensions | {dimension} |
| pooling | {model["pooling"]}, LayerNorm: {model["layer_norm"]} |
| trained on | {trained} |
| images | RGB, short side {images["resize"]}, centre crop {images["crop"]}, {images["interpolation"]} |
| normalisation, inside the model | {values} |

```python
from pfml.models import load_embedder

embedder = load_embedder("this folder")
points = embedder.encode(["a.jpg", "b.jpg"])  # (2, D)
similarity = points @ points.T
```

The safetensors file holds the weights, `model.json` the rest, with a checksum of both.
"""
