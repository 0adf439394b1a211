"""Glyphs: a retrieval set that is drawn from the fonts shipped with matplotlib, so that it needs no files.

A class is a character that all 16 text faces have. Left out are accents (characters whose compatibility decomposition
is more than themselves), modifier letters (small raised signs) and look-alikes: of the characters with the same outline
in more than a third of the faces, such as Latin A, Greek Alpha and Cyrillic A, the one with the lowest code point
stays. That leaves 283; a seeded shuffle made 141 of them training classes and 142 unseen ones. Both lists are written
down here, because they are the data set: another version of the fonts must not change it.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pfml.data.image_set import ImageSet, RetrievalData

if TYPE_CHECKING:
    from PIL import Image, ImageFont

__all__ = ["FACES", "TRAIN_GLYPHS", "UNSEEN_GLYPHS", "Distortion", "draw_glyphs", "read_glyphs"]

TRAIN_GLYPHS = (
    "BCFGHKLMNOSTYZacegijnopqstuxÐØæðøħıĸłŊŦƐƕƙƚƞƪƭƺƻƾǀǂǃȷɑɒɔɖɘɚɛɝɞɟɡɥɦɧɨɩɬɰ"  # noqa: RUF001
    "ɲɴɸɹɺɿʀʃʆʎʐʔʕʖʘʛʝʟʠʡʢʣʤʧΔΛΞΠΣΦΨΩβγκλνςφχψϛЂДЖЛУФШЩЬбдзикпцчшщъьэђњћѢѣґ"
)
UNSEEN_GLYPHS = (
    "ADEIJPQRUVWXbdfhklmrvwyzÆÞßþđĦŁŋŒœŧƀƈƒƛƥƫǁɐɓɕɗəɜɠɢɣɤɪɫɭɮɯɱɳɵɶɷɻɼɽɾʁʂʄʅʇ"  # noqa: RUF001
    "ʈʉʊʋʌʍʏʑʒʓʗʙʚʜʞʥʦʨΓΘαδζθιμξπρστυωϘϙϚϝϞϟϠϡЄЉЊЋЏБЗИКЦЧЪЫЭЮЯгжлмтфыюяєљџѲҐ"
)

FACES = {
    "DejaVu Sans": "DejaVuSans.ttf",
    "DejaVu Sans Bold": "DejaVuSans-Bold.ttf",
    "DejaVu Sans Oblique": "DejaVuSans-Oblique.ttf",
    "DejaVu Sans Bold Oblique": "DejaVuSans-BoldOblique.ttf",
    "DejaVu Sans Mono": "DejaVuSansMono.ttf",
    "DejaVu Sans Mono Bold": "DejaVuSansMono-Bold.ttf",
    "DejaVu Sans Mono Oblique": "DejaVuSansMono-Oblique.ttf",
    "DejaVu Sans Mono Bold Oblique": "DejaVuSansMono-BoldOblique.ttf",
    "DejaVu Serif": "DejaVuSerif.ttf",
    "DejaVu Serif Bold": "DejaVuSerif-Bold.ttf",
    "DejaVu Serif Italic": "DejaVuSerif-Italic.ttf",
    "DejaVu Serif Bold Italic": "DejaVuSerif-BoldItalic.ttf",
    "STIX General": "STIXGeneral.ttf",
    "STIX General Bold": "STIXGeneralBol.ttf",
    "STIX General Italic": "STIXGeneralItalic.ttf",
    "STIX General Bold Italic": "STIXGeneralBolIta.ttf",
}

SIDE = 32  # pixels of an image
EM = 22  # pixels of the em square
WIDEST = 24  # pixels; the few glyphs that would be wider are printed smaller
OVERSAMPLING = 2  # glyphs are warped at twice the resolution and then averaged, so that edges are smooth
COPIES = 3


@dataclass(frozen=True)
class Distortion:
    """How far an image may be from its glyph as printed; each value is uniform between its two signs.

    Args:
        rotation: Largest angle, in degrees.
        scale: Largest factor of size, up or down (drawn in logarithms).
        shear: Largest tangent of the slant.
        shift: Largest offset in x and in y, in pixels.
        noise: Standard deviation of the Gaussian noise of each pixel, as a fraction of the range of gray values.
    """

    rotation: float = 25.0
    scale: float = 1.3
    shear: float = 0.3
    shift: float = 3.0
    noise: float = 0.1

    def __post_init__(self) -> None:
        if not self.scale >= 1:
            raise ValueError(f"scale must be at least 1, where 1 leaves the size as it is, got {self.scale}")
        for name in ("rotation", "shear", "shift", "noise"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")

    def affine(self, random: np.random.Generator) -> tuple[float, float, float, float, float, float]:
        """A random affine map from pixels of the image to pixels of the glyph, both relative to their centers."""
        angle, size, slant, right, down = random.uniform(-1, 1, 5)
        angle = math.radians(self.rotation) * angle
        zoom = self.scale**-size
        slant = self.shear * slant
        cosine, sine = zoom * math.cos(angle), zoom * math.sin(angle)
        # the rows of shear @ rotation; the shift is applied to the image, hence before both
        row_x = (cosine + slant * sine, -sine + slant * cosine)
        row_y = (sine, cosine)
        right, down = self.shift * right, self.shift * down
        return (
            *row_x,
            -(row_x[0] * right + row_x[1] * down),
            *row_y,
            -(row_y[0] * right + row_y[1] * down),
        )


def read_glyphs(root: Path | None = None) -> RetrievalData:
    """The glyphs: 141 classes to train on (6,768 images) and 142 unseen classes (6,816 images), 32 x 32 pixels.

    Args:
        root: Has no meaning here, since nothing is read from files; must be None.
    """
    if root is not None:
        raise ValueError(f"glyphs are drawn, not read: root must be None, got {root}")
    return RetrievalData("glyphs", train=draw_glyphs(TRAIN_GLYPHS), test=draw_glyphs(UNSEEN_GLYPHS))


def draw_glyphs(
    characters: str,
    *,
    copies: int = COPIES,
    distortion: Distortion = Distortion(),
    seed: int = 0,
) -> ImageSet:
    """Images of `characters`, one class each: `copies` distorted glyphs in each of the 16 faces.

    An image depends only on its character, face, copy and `seed`, so that it is the same in any selection.

    Args:
        characters: Different ones, of `TRAIN_GLYPHS` and `UNSEEN_GLYPHS`: the faces may lack others.
        copies: Images per character and face.
        distortion: How strongly glyphs are distorted.
        seed: Of all random numbers.
    """
    for k, character in enumerate(characters):
        if character not in TRAIN_GLYPHS + UNSEEN_GLYPHS:
            raise ValueError(f"characters must be of TRAIN_GLYPHS and UNSEEN_GLYPHS, got {character!r} at index {k}")
    if copies < 1:
        raise ValueError(f"copies must be at least 1, got {copies}")
    shape = (len(characters), len(FACES), copies, SIDE, SIDE)
    gray = np.empty(shape, dtype=np.uint8)
    for f, plates in enumerate(_plates_by_face(characters)):
        for k, (character, plate) in enumerate(zip(characters, plates, strict=True)):
            for copy in range(copies):
                random = np.random.default_rng([seed, ord(character), f, copy])
                gray[k, f, copy] = _distorted(plate, distortion, random)
    pixels = torch.from_numpy(gray).view(-1, 1, SIDE, SIDE).repeat(1, 3, 1, 1)
    labels = torch.arange(len(characters)).repeat_interleave(len(FACES) * copies)
    sources = tuple(
        f"{character}, {face}, {copy}" for character in characters for face in FACES for copy in range(copies)
    )
    return ImageSet(pixels, labels, tuple(_class_name(character) for character in characters), sources)


def _class_name(character: str) -> str:
    return f"U+{ord(character):04X} {unicodedata.name(character)}"


def _plates_by_face(characters: str) -> Iterator[list[Image.Image]]:
    """For each face the glyphs as printed, undistorted, at a higher resolution."""
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    for file in FACES.values():
        # the basic layout needs no library that some builds of Pillow lack
        font = ImageFont.truetype(folder / file, EM * OVERSAMPLING, layout_engine=ImageFont.Layout.BASIC)
        yield [_plate(font, character) for character in characters]


def _plate(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """The glyph, bright on dark, with the middle of its ink in the middle of a square twice as wide as an image."""
    from PIL import Image

    ink = _ink(font, character)
    excess = ink.width / (WIDEST * OVERSAMPLING)
    if excess > 1:
        ink = _ink(font.font_variant(size=int(font.size / excess)), character)
    side = 2 * SIDE * OVERSAMPLING
    plate = Image.new("L", (side, side))
    plate.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
    return plate


def _ink(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """The glyph within its bounding box; that of the font also has the blank around it."""
    from PIL import Image, ImageDraw

    sheet = Image.new("L", (4 * EM * OVERSAMPLING, 4 * EM * OVERSAMPLING))
    ImageDraw.Draw(sheet).text((EM * OVERSAMPLING, EM * OVERSAMPLING), character, fill=255, font=font)
    return sheet.crop(sheet.getbbox())


def _distorted(plate: Image.Image, distortion: Distortion, random: np.random.Generator) -> np.ndarray:
    """One 32 x 32 uint8 image of a glyph."""
    from PIL import Image

    xx, xy, x0, yx, yy, y0 = distortion.affine(random)
    side, middle, center = SIDE * OVERSAMPLING, SIDE * OVERSAMPLING / 2, plate.width / 2
    matrix = (
        *(xx, xy, center + OVERSAMPLING * x0 - (xx + xy) * middle),
        *(yx, yy, center + OVERSAMPLING * y0 - (yx + yy) * middle),
    )
    warped = plate.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    noise = random.standard_normal((SIDE, SIDE), dtype=np.float32) * (255 * distortion.noise)
    return np.clip(np.asarray(warped.reduce(OVERSAMPLING)) + noise, 0, 255).round().astype(np.uint8)
