"""Configurations in layers, as nested dicts: each overrides those below it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["merged", "with_changes"]


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the second where both have a value; groups are merged likewise.

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
    """The same for the content of a configuration: options of a loss make no sense for another one.

    Example:
        >>> with_changes({"loss": {"name": "pfml", "options": {"delta": 0.5}}}, {"loss": {"name": "proxy-anchor"}})
        {'loss': {'name': 'proxy-anchor'}}
    """
    loss = changes.get("loss", {}).get("name")
    if loss is not None and loss != content.get("loss", {}).get("name", loss):
        content = {**content, "loss": {}}
    return merged(content, changes)
