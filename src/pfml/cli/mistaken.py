"""What was typed in another place than where it belongs, and where that is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pfml.terminal import shell_words

__all__ = ["about_stray_argument", "refuse_images_first"]

IMAGES = ("images are", "data")
#: Command -> what a further argument may have been meant as, and the option that takes it.
MEANT = {
    "train": IMAGES,
    "tune": IMAGES,
    "evaluate": IMAGES,
    "calibrate": IMAGES,
    "serve": ("an index elsewhere is", "index"),
    "audit": ("another embedder is", "model"),
    "export": ("where to is", "out"),
}


def about_stray_argument(command: str, message: str) -> str:
    """The option that was meant, to end a parser's message on an argument too many with; empty if none is."""
    found = re.fullmatch(r"unrecognized arguments: ([^-].*)", message)
    if found is None or command not in MEANT:
        return ""
    what, option = MEANT[command]
    # several arguments come as one text; a name with blanks is one only if it is there
    is_one = " " not in found[1] or Path(found[1]).exists()
    return f"; {what} given as --{option} {shell_words(found[1])}" if is_one else ""


def refuse_images_first(command: str, run: Path, images: Sequence[Path]) -> None:
    """Raise ValueError if `run` is no model, but the one place of `images` is: they were typed in the other order."""
    if len(images) == 1 and not _has_model(run) and _has_model(images[0]):
        order = shell_words("pfml", command, str(images[0]), str(run))
        raise ValueError(f"the run comes before the images: {order}")


def _has_model(folder: Path) -> bool:
    return any((place / "model.json").is_file() for place in (folder, folder / "model"))
