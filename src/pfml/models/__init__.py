"""Backbones, heads, and the embedder made of them."""

from pfml.models.embedder import Embedder, EmbedderConfig, TrainedOn, create_embedder, load_embedder

__all__ = ["Embedder", "EmbedderConfig", "TrainedOn", "create_embedder", "load_embedder"]
