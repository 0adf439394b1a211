"""The embedded glyphs are the published ones, look as told, and are the same each time."""

import hashlib
import unicodedata
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path

import pytest
import torch

from pfml.data import draw_glyphs, read_glyphs
from pfml.data.glyphs import FACES, TRAIN_GLYPHS, UNSEEN_GLYPHS, Distortion
from test_doctests import run_examples

PLAIN = Distortion(rotation=0, scale=1, shear=0, shift=0, noise=0)
WIDE = "ЖШЩЮЊMW"  # wider than the frame in some faces, hence printed smaller


@pytest.fixture(scope="module")
def glyphs():
    return read_glyphs()


def characters_by_the_rule():
    """The characters that the rule of the module's docstring gives, from the outlines in the fonts."""
    import matplotlib
    from fontTools.pens.recordingPen import DecomposingRecordingPen
    from fontTools.ttLib import TTFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = [TTFont(folder / file) for file in FACES.values()]
    common = set.intersection(*(set(font.getBestCmap()) for font in fonts))
    characters = [
        chr(code)
        for code in sorted(common)
        if unicodedata.category(chr(code)) in ("Lu", "Ll", "Lt", "Lo")
        and unicodedata.normalize("NFKD", chr(code)) == chr(code)
    ]
    same = Counter()
    for font in fonts:
        outlines, code_to_name, alike = font.getGlyphSet(), font.getBestCmap(), defaultdict(list)
        for character in characters:
            pen = DecomposingRecordingPen(outlines)
            outlines[code_to_name[ord(character)]].draw(pen)
            alike[repr(pen.value)].append(character)
        same.update(pair for group in alike.values() for pair in combinations(group, 2))
    kept = []
    for character in characters:
        if not any(same[earlier, character] > len(FACES) / 3 for earlier in kept):
            kept.append(character)
    return kept


def test_the_lists_are_those_of_the_published_set():
    lists = f"{TRAIN_GLYPHS} {UNSEEN_GLYPHS}".encode()
    assert hashlib.sha256(lists).hexdigest()[:16] == "cee1d38ecb91bca2", "another list is another data set"


@pytest.mark.slow  # it draws all outlines; a change of the lists is seen by the digest above
def test_the_glyphs_are_those_of_the_rule():
    assert sorted(TRAIN_GLYPHS + UNSEEN_GLYPHS) == characters_by_the_rule()


def test_there_are_283_glyphs_of_three_scripts_on_both_sides():
    assert (len(TRAIN_GLYPHS), len(UNSEEN_GLYPHS)) == (141, 142)
    for side in (TRAIN_GLYPHS, UNSEEN_GLYPHS):
        assert {unicodedata.name(character).split()[0] for character in side} == {"LATIN", "GREEK", "CYRILLIC"}


def test_each_glyph_has_48_images_of_32_pixels(glyphs):
    assert glyphs.train.images.shape == (6_768, 3, 32, 32)
    assert glyphs.test.images.shape == (6_816, 3, 32, 32)
    for images in (glyphs.train, glyphs.test):
        assert (images.labels.bincount() == 48).all()
        assert (images.images[:, :1] == images.images).all()
    assert glyphs.recall_at == (1, 2, 4, 8)
    assert glyphs.remarks == ()


def test_classes_and_images_have_names(glyphs):
    assert glyphs.test.class_names[0] == "U+0041 LATIN CAPITAL LETTER A"
    assert glyphs.test.name_of(29) == "A, DejaVu Serif Bold, 2"
    assert len(set(glyphs.test.sources)) == len(glyphs.test)


def test_images_are_the_same_each_time_and_in_any_selection(glyphs):
    again = draw_glyphs("DA")
    first = glyphs.test.of_classes([UNSEEN_GLYPHS.index("D"), UNSEEN_GLYPHS.index("A")])
    assert (again.images[again.labels == 0] == first.images[first.labels == 0]).all()
    assert (again.images[again.labels == 1] == first.images[first.labels == 1]).all()


def test_the_example_of_load_data(glyphs, monkeypatch):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", lambda: glyphs)
    assert run_examples("pfml.data.datasets") > 0


def test_no_two_images_of_a_glyph_are_the_same(glyphs):
    images = glyphs.test.images[:48, 0].flatten(1)
    assert len(images.unique(dim=0)) == 48


def test_raw_pixels_find_about_27_percent_of_the_unseen_glyphs(glyphs):
    vectors = torch.nn.functional.normalize(glyphs.test.images[:, 0].flatten(1).float(), dim=1)
    queries = torch.arange(0, len(vectors), 4)
    similarity = vectors[queries] @ vectors.T
    similarity[torch.arange(len(queries)), queries] = -1
    hits = glyphs.test.labels[similarity.argmax(dim=1)] == glyphs.test.labels[queries]
    assert 0.25 < hits.float().mean() < 0.31


def test_plain_glyphs_are_centered_and_inside_the_frame():
    some = sorted({*(TRAIN_GLYPHS + UNSEEN_GLYPHS)[::5], *WIDE})
    images = draw_glyphs("".join(some), copies=1, distortion=PLAIN).images[:, 0] > 8
    assert images.flatten(1).any(dim=1).all()
    frame = torch.ones(32, 32, dtype=torch.bool)
    frame[2:-2, 2:-2] = False
    assert not images[:, frame].any()
    for along in (images.any(dim=1), images.any(dim=2)):
        first = along.int().argmax(dim=1)
        last = 31 - along.flip(1).int().argmax(dim=1)
        assert (first + last - 31).abs().max() <= 2


def test_glyphs_differ_between_faces_and_characters():
    images = draw_glyphs("Ag", copies=1, distortion=PLAIN).images[:, 0].flatten(1)
    assert len(images.unique(dim=0)) == 32


@pytest.mark.parametrize(
    "stronger",
    [{"rotation": 30.0}, {"scale": 1.5}, {"shear": 0.5}, {"shift": 4.0}, {"noise": 0.2}],
    ids=lambda option: next(iter(option)),
)
def test_each_distortion_changes_the_images(stronger):
    plain = {"rotation": 0, "scale": 1, "shear": 0, "shift": 0, "noise": 0}
    changed = draw_glyphs("R", copies=1, distortion=Distortion(**{**plain, **stronger}))
    assert (changed.images != draw_glyphs("R", copies=1, distortion=PLAIN).images).flatten(1).any(dim=1).all()


def test_a_shift_moves_the_glyph_by_at_most_its_value():
    moved = draw_glyphs("O", copies=20, distortion=Distortion(rotation=0, scale=1, shear=0, shift=4, noise=0))
    ink = moved.images[:, 0].double()
    middle = (ink * (torch.arange(32.0) - 15.5)).sum(dim=(1, 2)) / ink.sum(dim=(1, 2))
    assert 3 < middle.abs().max() < 4.5


def test_a_rotation_turns_the_glyph_by_at_most_its_value():
    turned = draw_glyphs("I", copies=20, distortion=Distortion(rotation=30, scale=1, shear=0, shift=0, noise=0))
    ink = turned.images[turned.labels == 0, 0][:20].double()  # upright sans serif
    y, x = torch.meshgrid(torch.arange(32.0) - 15.5, torch.arange(32.0) - 15.5, indexing="ij")
    slant = torch.rad2deg(torch.atan2((ink * x * y).sum(dim=(1, 2)), (ink * y * y).sum(dim=(1, 2))))
    assert 22 < slant.abs().max() < 31


def test_another_seed_gives_other_images_and_copies_their_number():
    assert len(draw_glyphs("AB", copies=2)) == 64
    assert (draw_glyphs("A", copies=1, seed=1).images != draw_glyphs("A", copies=1).images).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: draw_glyphs("A", copies=0), "copies must be at least 1, got 0"),
        (lambda: draw_glyphs("A3"), "characters must be of .*got '3' at index 1"),
        (lambda: draw_glyphs("AA"), "class names must differ"),
        (lambda: read_glyphs(Path("somewhere")), "root must be None, got somewhere"),
        (lambda: Distortion(scale=0.9), "scale must be at least 1.*got 0.9"),
        (lambda: Distortion(noise=-0.1), "noise must not be negative, got -0.1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
