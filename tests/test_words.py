"""The words are the field's: a short list of words that were replaced, and of British spellings, must not come back."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "Makefile")
SUFFIXES = {".py", ".js", ".html", ".css", ".yaml", ".j2", ".md", ".ipynb"}

#: A word that was replaced, as a pattern -> what to write instead. Help texts stand in the sources.
REPLACED = {
    r"\bmates?\b|_mates?\b": "positives, samples of the same class",
    r"\bwrong labels?\b": "label noise, noisy labels",
    r"(?<![a-z])trunk": "backbone",
    r"(?<![a-z])pictures?(?![a-z])": "plots, figures, images",
    r"\b(?:go|goes|going|gone|went) on (?:from|with|where)\b": "resume",
    r"\blet be\b": "uninterrupted",
    r"(?<![a-z])pulse": "heartbeat",
    r"\blast words\b": "error reporting",
    r"\bwish(?:es)?\b": "shutdown request",
    r"\blooked at by\b|\bis looked at\b": "is being traced, is read",
    r"\bbells?\b": "Gaussian components",
    r"\bguests?\b|\bmeetings?\b": "remote shard, schedule",
    r"\bas it (?:comes|came)\b": "untrained, pretrained",
    r"\bfor ever\b": "forever",
}
#: The same for what readers see first, the pages of docs/ and of the root: in code these words may be right.
REPLACED_ON_PAGES = {
    r"\banew\b": "again, is reset",
    r"\bone's own\b": "your own",
    r"\bstands? for\b": "means",
    r"\bin the places? of\b|\bin one place\b": "instead of, in one module",
    r"\bthe letters\b": "glyphs",
    r"\b(?:a|the|its) share of\b": "fraction of",
    r"\b(?:whole|different|pretrained) network\b": "model, backbone, architecture",
}
BRITISH = (
    "analyse behaviour catalogue centre colour defence favour generalis grey initialis judgement labelled licence "
    "maximis memoris minimis modelled neighbour normalis optimis(?=[ei]) organis(?=[ei]) parallelis(?=[ei]) quantis "
    "randomis recognis regularis serialis standardis summaris synchronis(?=[ei]) travelled visualis whilst"
)
#: What may stand anywhere -> why.
ALLOWED = {
    "aria-labelledby": "an attribute of HTML",
    "</?picture>": "an element of HTML",
    r'"trunk"|(?:freeze|none or) trunk': "a value of --freeze, in pytorch-metric-learning's word",
}


def sources(folders=("src", "docs")):
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return sorted([*files, *(ROOT / name for name in PAGES)])


@cache
def lines_of(path):
    """The lines of a file, without what may stand anywhere."""
    allowed = re.compile("|".join(ALLOWED))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":  # its outputs hold images, whose letters mean nothing
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    return [allowed.sub("", line) for line in text.splitlines()]


def found(pattern, files):
    """Where the pattern occurs, as "file:line: the line"."""
    matches = re.compile(pattern, re.IGNORECASE).search
    for path in files:
        for number, line in enumerate(lines_of(path), 1):
            if matches(line):
                yield f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"


@pytest.mark.parametrize("pattern", REPLACED)
def test_a_word_that_was_replaced_does_not_come_back(pattern):
    lines = list(found(pattern, sources()))
    assert not lines, f"write {REPLACED[pattern]!r} instead in {len(lines)} lines:\n" + "\n".join(lines)


@pytest.mark.parametrize("pattern", REPLACED_ON_PAGES)
def test_a_word_that_was_replaced_does_not_come_back_to_the_pages(pattern):
    lines = list(found(pattern, sources(["docs"])))
    assert not lines, f"write {REPLACED_ON_PAGES[pattern]!r} instead in {len(lines)} lines:\n" + "\n".join(lines)


def test_spelling_is_american():
    lines = list(found("|".join(rf"\b{word}" for word in BRITISH.split()), sources()))
    assert not lines, f"British spelling in {len(lines)} lines:\n" + "\n".join(lines)
