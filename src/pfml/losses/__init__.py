"""Losses as modules."""

from pfml.losses.checks import CollapseWarning
from pfml.losses.diagnostics import FieldDiagnostics
from pfml.losses.potential_field import PotentialFieldLoss

__all__ = ["CollapseWarning", "FieldDiagnostics", "PotentialFieldLoss"]
