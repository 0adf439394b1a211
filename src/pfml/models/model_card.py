"""What people read beside a saved model."""

from __future__ import annotations

import re
from typing import Any

__all__ = ["escaped", "model_card", "model_table"]


def model_card(description: dict[str, Any]) -> str:
    """A model card in Markdown, of what `Embedder.save` knows; a run writes more (`pfml.runs.card`)."""
    return f"""# An image embedder

It turns an image into a point on the unit sphere; images of one class lie close to each other, also of classes that it
was not trained on.

{model_table(description)}

{usage("this folder")}
The safetensors file holds the weights, `model.json` the rest, with a checksum of both.
"""


def model_table(description: dict[str, Any]) -> str:
    """Backbone, head and preprocessing as a table."""
    model, images, learned = description["embedder"], description["preprocessing"], description["trained_on"]
    dimension = model["embedding_dim"] or "as many as the backbone has features"
    trained = "not recorded" if learned is None else f"{learned['dataset']}, {len(learned['class_names']):,} classes"
    values = f"{images['channel_order']} in 0 to {images['value_scale']:g}, mean {images['mean']}, std {images['std']}"
    crop = f"RGB, short side {images['resize']}, center crop {images['crop']}, {images['interpolation']}"
    rows = {
        "backbone": model["backbone"],
        "dimensions": str(dimension),
        "pooling": f"{model['pooling']}, LayerNorm: {model['layer_norm']}",
        "trained on": trained,
        "images": crop,
        "normalization, inside the model": values,
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {escaped(value)} |" for name, value in rows.items())])


def usage(folder: str) -> str:
    """How a saved model is used, as a block of Python."""
    return f"""```python
from pfml.models import load_embedder

embedder = load_embedder("{folder}")
points = embedder.encode(["a.jpg", "b.jpg"])  # (2, D)
similarity = points @ points.T
```
"""


def escaped(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_{}\[\]<>|#~&$!])", r"\\\1", " ".join(text.split()))
