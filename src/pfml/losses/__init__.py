"""Losses as modules."""

from pfml.half_precision import GradientOverflowWarning
from pfml.losses.checks import CollapseWarning
from pfml.losses.diagnostics import FieldDiagnostics
from pfml.losses.hist import HISTLoss
from pfml.losses.potential_field import PotentialFieldLoss
from pfml.losses.proxy_anchor import ProxyAnchorLoss
from pfml.losses.proxy_gml import ProxyGMLLoss

__all__ = [
    "CollapseWarning",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "HISTLoss",
    "PotentialFieldLoss",
    "ProxyAnchorLoss",
    "ProxyGMLLoss",
]
