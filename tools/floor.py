"""The oldest versions that pyproject.toml allows, as constraints of pip: python tools/floor.py > FILE.

Every lower bound becomes a pin (numpy>=1.26 becomes numpy==1.26), of the package, of its extras and of the tools that
the tests need. `make test-floor` installs them and runs the tests, so a bound is a version that was tested.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
#: What an old version needs beside it, though its metadata does not say so.
BESIDE = ("pyarrow<18",)  # datasets with NumPy 1


def pins() -> list[str]:
    """name==version for every requirement with a lower bound."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    bounds = [re.match(r"([\w.-]+)(?:\[.*\])?>=([\w.]+)", requirement) for group in groups for requirement in group]
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound} | set(BESIDE))


if __name__ == "__main__":
    print("\n".join(pins()))
