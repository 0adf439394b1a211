"""Losses as modules."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.half_precision import GradientOverflowWarning
    from pfml.losses.checks import CollapseWarning
    from pfml.losses.diagnostics import FieldDiagnostics
    from pfml.losses.hist import HISTLoss
    from pfml.losses.potential_field import PotentialFieldLoss
    from pfml.losses.proxy_anchor import ProxyAnchorLoss
    from pfml.losses.proxy_gml import ProxyGMLLoss
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.half_precision": ("GradientOverflowWarning",),
            "pfml.losses.checks": ("CollapseWarning",),
            "pfml.losses.diagnostics": ("FieldDiagnostics",),
            "pfml.losses.hist": ("HISTLoss",),
            "pfml.losses.potential_field": ("PotentialFieldLoss",),
            "pfml.losses.proxy_anchor": ("ProxyAnchorLoss",),
            "pfml.losses.proxy_gml": ("ProxyGMLLoss",),
        },
    )

__all__ = [
    "CollapseWarning",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "HISTLoss",
    "PotentialFieldLoss",
    "ProxyAnchorLoss",
    "ProxyGMLLoss",
]
