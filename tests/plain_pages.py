"""Pages in a tenth of their time: plots take most of it."""

from contextlib import contextmanager
from unittest import mock

from PIL import Image

from pfml.pages.page import Plot
from pfml.plots.theme import png_of_image


@contextmanager
def without_plots():
    """One pixel in place of each plot, for tests of what is around them."""
    pixel = png_of_image(Image.new("RGB", (2, 2)))
    one_pixel = {"in_themes": lambda plot, alt: Plot(pixel, alt)}
    with (
        mock.patch.multiple("pfml.pages.run", **one_pixel, project=lambda points, seed: points[:, :2]),
        mock.patch.multiple("pfml.pages.known_classes", **one_pixel),
        mock.patch.multiple("pfml.pages.audit", **one_pixel),
    ):
        yield
