"""Losses as modules."""

from pfml.losses.checks import CollapseWarning
from pfml.losses.diagnostics import FieldDiagnostics
from pfml.losses.potential_field import PotentialFieldLoss
from pfml.losses.proxy_anchor import ProxyAnchorLoss

__all__ = ["CollapseWarning", "FieldDiagnostics", "PotentialFieldLoss", "ProxyAnchorLoss"]
