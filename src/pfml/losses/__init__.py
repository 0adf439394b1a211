"""Losses as modules."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.half_precision import GradientOverflowWarning
    from pfml.losses.checks import CollapseWarning
    from pfml.losses.clustering import ClusteringLoss
    from pfml.losses.dfml import FactorizedProxyAnchorLoss
    from pfml.losses.diagnostics import FieldDiagnostics
    from pfml.losses.drml import RelationalProxyAnchorLoss
    from pfml.losses.hist import HISTLoss
    from pfml.losses.htl import HierarchicalTripletLoss
    from pfml.losses.potential_field import PotentialFieldLoss
    from pfml.losses.proxy_anchor import ProxyAnchorLoss
    from pfml.losses.proxy_gml import ProxyGMLLoss
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.half_precision": ("GradientOverflowWarning",),
            "pfml.losses.checks": ("CollapseWarning",),
            "pfml.losses.clustering": ("ClusteringLoss",),
            "pfml.losses.dfml": ("FactorizedProxyAnchorLoss",),
            "pfml.losses.diagnostics": ("FieldDiagnostics",),
            "pfml.losses.drml": ("RelationalProxyAnchorLoss",),
            "pfml.losses.hist": ("HISTLoss",),
            "pfml.losses.htl": ("HierarchicalTripletLoss",),
            "pfml.losses.potential_field": ("PotentialFieldLoss",),
            "pfml.losses.proxy_anchor": ("ProxyAnchorLoss",),
            "pfml.losses.proxy_gml": ("ProxyGMLLoss",),
        },
    )

__all__ = [
    "ClusteringLoss",
    "CollapseWarning",
    "FactorizedProxyAnchorLoss",
    "FieldDiagnostics",
    "GradientOverflowWarning",
    "HISTLoss",
    "HierarchicalTripletLoss",
    "PotentialFieldLoss",
    "ProxyAnchorLoss",
    "ProxyGMLLoss",
    "RelationalProxyAnchorLoss",
]
