"""Configurations in layers, as nested dicts: each overrides those below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["flattened", "merged", "with_changes"]


def flattened(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value, without the groups.

    Example:
        >>> flattened({"epochs": 8, "model": {"backbone": "resnet50"}})
        {'epochs': 8, 'model.backbone': 'resnet50'}
    """
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The values of both, those of `above` where both have one; so within groups.

    Example:
        >>> merged({"epochs": 8, "model": {"backbone": "resnet50"}}, {"model": {"image_size": 256}})
        {'epochs': 8, 'model': {'backbone': 'resnet50', 'image_size': 256}}
    """
    result = dict(below)
    for name, value in above.items():
        old = result.get(name)
        result[name] = merged(old, value) if isinstance(value, Mapping) and isinstance(old, Mapping) else value
    return result


def with_changes(content: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`content` of a configuration below `changes`; the options of a loss are dropped with that loss.

    Example:
        >>> with_changes({"loss": {"name": "pfml", "options": {"delta": 0.5}}}, {"loss": {"name": "proxy-anchor"}})
        {'loss': {'name': 'proxy-anchor'}}
    """
    loss = changes.get("loss", {}).get("name")
    if loss is not None and loss != content.get("loss", {}).get("name", loss):
        content = {**content, "loss": {}}
    return merged(content, changes)
