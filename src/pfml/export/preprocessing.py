"""The way of an image into the exported network, written down for programs that do not have pfml."""

from __future__ import annotations

from typing import Any

from pfml.models import Embedder

__all__ = ["INPUT", "OUTPUT", "preprocessing_description"]

INPUT, OUTPUT = "images", "embeddings"


def preprocessing_description(embedder: Embedder) -> dict[str, Any]:
    """What the caller does to an image, what the model does by itself, and what comes out, as plain values."""
    images = embedder.preprocessing
    return {
        "input": {
            "name": INPUT,
            "shape": ["batch", 3, images.crop, images.crop],
            "dtype": "float32",
            "layout": "NCHW",
            "channel_order": "rgb",
            "value_range": [0.0, 1.0],
        },
        "before_the_model": [
            {
                "step": "resize",
                "short_side": images.resize,
                "long_side": "floor(short_side * long / short), in integers",
                "interpolation": images.interpolation,
                "antialias": True,
                "clip": [0.0, 255.0],
                "rounding": "none: on float values; an image whose short side fits already is not resized",
            },
            {
                "step": "center_crop",
                "side": images.crop,
                "offset": "round((length - side) / 2), half to even",
            },
            {"step": "scale", "factor": 1 / 255, "from": "8-bit values"},
        ],
        "inside_the_model": {
            "note": "The model normalizes by itself: do not normalize before it.",
            "channel_order": images.channel_order,
            "value_scale": images.value_scale,
            "mean": list(images.mean),
            "std": list(images.std),
        },
        "output": {
            "name": OUTPUT,
            "shape": ["batch", embedder.embedding_dim],
            "dtype": "float32",
            "unit_vectors": True,
            "distance": "Euclidean; its order is that of the cosine",
        },
    }
