"""Plots: curves, verification, the ladder, fields, maps, grids of images, and their theme."""

from typing import TYPE_CHECKING

from pfml.lazy import lazy_names

if TYPE_CHECKING:
    from pfml.plots.field_slice import measure_field, plot_field_slice
    from pfml.plots.grids import Retrievals, choose_queries, image_grid, plot_retrievals, retrieve, thumbnails
    from pfml.plots.ladder import logged_rungs, plot_ladder
    from pfml.plots.maps import plot_proxy_map, project
    from pfml.plots.theme import DARK, LIGHT, Theme, png_of_figure, rc_params
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "pfml.plots.field_slice": ("measure_field", "plot_field_slice"),
            "pfml.plots.grids": (
                "Retrievals",
                "choose_queries",
                "image_grid",
                "plot_retrievals",
                "retrieve",
                "thumbnails",
            ),
            "pfml.plots.ladder": ("logged_rungs", "plot_ladder"),
            "pfml.plots.maps": ("plot_proxy_map", "project"),
            "pfml.plots.theme": ("DARK", "LIGHT", "Theme", "png_of_figure", "rc_params"),
        },
    )

__all__ = [
    "DARK",
    "LIGHT",
    "Retrievals",
    "Theme",
    "choose_queries",
    "image_grid",
    "logged_rungs",
    "measure_field",
    "plot_field_slice",
    "plot_ladder",
    "plot_proxy_map",
    "plot_retrievals",
    "png_of_figure",
    "project",
    "rc_params",
    "retrieve",
    "thumbnails",
]
