from io import BytesIO

import numpy as np
from PIL import Image

from pfml.plots.theme import (
    DARK,
    LIGHT,
    PIXEL_DENSITY,
    class_colors,
    in_both_themes,
    new_figure,
    png_of_figure,
    png_of_image,
    rc_params,
)


def test_plots_are_made_in_both_themes_at_the_asked_size():
    light, dark = in_both_themes(lambda theme: new_figure(theme, width=100, height=50))
    for plot, theme in ((light, LIGHT), (dark, DARK)):
        image = Image.open(BytesIO(plot)).convert("RGB")
        assert image.size == (100 * PIXEL_DENSITY, 50 * PIXEL_DENSITY)
        assert "#{:02x}{:02x}{:02x}".format(*image.getpixel((3, 3))) == theme.paper


def test_png_bytes_pass_through_unchanged():
    assert in_both_themes(lambda theme: theme.paper.encode()) == (LIGHT.paper.encode(), DARK.paper.encode())


def test_pixels_can_be_left_to_the_page():
    colors = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    clear = np.zeros((40, 30), dtype=bool)
    clear[:10] = True
    image = np.asarray(Image.open(BytesIO(png_of_image(Image.fromarray(colors), transparent=clear))).convert("RGBA"))
    assert ((image[..., 3] == 0) == clear).all()
    assert np.abs(image[10:, :, :3].astype(int) - colors[10:]).mean() < 12  # 255 colors in place of 1,200


def test_classes_have_different_colors_brighter_on_dark_pages():
    light, dark = class_colors(24, LIGHT), class_colors(24, DARK)
    assert len(set(light)) == 24
    assert all(sum(on_dark) > sum(on_light) for on_light, on_dark in zip(light, dark, strict=True))


def test_a_name_that_no_font_has_is_plotted_without_a_warning(recwarn):
    from matplotlib.figure import Figure

    figure = Figure()
    figure.suptitle("finch\x1b[2J 鳥")
    assert png_of_figure(figure).startswith(b"\x89PNG")
    assert not [str(warning.message) for warning in recwarn if "Glyph" in str(warning.message)]


def test_plots_of_your_own_take_the_colors_of_the_theme():
    from matplotlib import rc_context
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure

    for theme in (LIGHT, DARK):
        with rc_context(rc_params(theme)):
            figure = Figure()
            axes = figure.subplots()
            lines = [axes.plot([0, 1])[0].get_color() for _ in theme.series]
        assert to_hex(figure.get_facecolor()) == to_hex(axes.get_facecolor()) == theme.paper
        assert lines[0] == theme.accent
        assert sorted(lines) == sorted(theme.series)
        assert [side for side, spine in axes.spines.items() if spine.get_visible()] == ["left", "bottom"]
