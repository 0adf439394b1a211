"""Losses as modules."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.half_precision import GradientOverflowWarning
    from pfml.losses.checks import CollapseWarning
    from pfml.losses.contextual import ContextualLoss
    from pfml.losses.dcml import DCMLLoss
    from pfml.losses.diagnostics import FieldDiagnostics
    from pfml.losses.diva import DiVALoss
    from pfml.losses.hier import HIERLoss
    from pfml.losses.hist import HISTLoss
    from pfml.losses.hyp import HypLoss
    from pfml.losses.potential_field import PotentialFieldLoss
    from pfml.losses.proxy_anchor import ProxyAnchorLoss
    from pfml.losses.proxy_gml import ProxyGMLLoss
    from pfml.losses.s2sd import S2SDLoss
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.half_precision": ("GradientOverflowWarning",),
            "pfml.losses.checks": ("CollapseWarning",),
            "pfml.losses.contextual": ("ContextualLoss",),
            "pfml.losses.dcml": ("DCMLLoss",),
            "pfml.losses.diagnostics": ("FieldDiagnostics",),
            "pfml.losses.diva": ("DiVALoss",),
            "pfml.losses.hier": ("HIERLoss",),
            "pfml.losses.hist": ("HISTLoss",),
            "pfml.losses.hyp": ("HypLoss",),
            "pfml.losses.potential_field": ("PotentialFieldLoss",),
            "pfml.losses.proxy_anchor": ("ProxyAnchorLoss",),
            "pfml.losses.proxy_gml": ("ProxyGMLLoss",),
            "pfml.losses.s2sd": ("S2SDLoss",),
        },
    )

__all__ = [
    "CollapseWarning",
    "ContextualLoss",
    "DCMLLoss",
    "DiVALoss",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "HIERLoss",
    "HISTLoss",
    "HypLoss",
    "PotentialFieldLoss",
    "ProxyAnchorLoss",
    "ProxyGMLLoss",
    "S2SDLoss",
]
