"""Losses as modules."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.half_precision import GradientOverflowWarning
    from pfml.losses.checks import CollapseWarning
    from pfml.losses.clustering import ClusteringLoss
    from pfml.losses.contextual import ContextualLoss
    from pfml.losses.dcml import DCMLLoss
    from pfml.losses.dfml import FactorizedProxyAnchorLoss
    from pfml.losses.diagnostics import FieldDiagnostics
    from pfml.losses.diva import DiVALoss
    from pfml.losses.drml import RelationalProxyAnchorLoss
    from pfml.losses.hier import HIERLoss
    from pfml.losses.hist import HISTLoss
    from pfml.losses.htl import HierarchicalTripletLoss
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
            "pfml.losses.clustering": ("ClusteringLoss",),
            "pfml.losses.contextual": ("ContextualLoss",),
            "pfml.losses.dcml": ("DCMLLoss",),
            "pfml.losses.dfml": ("FactorizedProxyAnchorLoss",),
            "pfml.losses.diagnostics": ("FieldDiagnostics",),
            "pfml.losses.diva": ("DiVALoss",),
            "pfml.losses.drml": ("RelationalProxyAnchorLoss",),
            "pfml.losses.hier": ("HIERLoss",),
            "pfml.losses.hist": ("HISTLoss",),
            "pfml.losses.htl": ("HierarchicalTripletLoss",),
            "pfml.losses.hyp": ("HypLoss",),
            "pfml.losses.potential_field": ("PotentialFieldLoss",),
            "pfml.losses.proxy_anchor": ("ProxyAnchorLoss",),
            "pfml.losses.proxy_gml": ("ProxyGMLLoss",),
            "pfml.losses.s2sd": ("S2SDLoss",),
        },
    )

__all__ = [
    "ClusteringLoss",
    "CollapseWarning",
    "ContextualLoss",
    "DCMLLoss",
    "DiVALoss",
    "FactorizedProxyAnchorLoss",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "HIERLoss",
    "HISTLoss",
    "HierarchicalTripletLoss",
    "HypLoss",
    "PotentialFieldLoss",
    "ProxyAnchorLoss",
    "ProxyGMLLoss",
    "RelationalProxyAnchorLoss",
    "S2SDLoss",
]
