"""Run the notebooks of docs/notebooks again and store their outputs: python tools/notebooks.py [NAME ...].

Each runs in a kernel of its own, in an empty folder. What is stored is the same wherever it was run: images of at most
255 colors, cells numbered from the top, no times and no versions. Needs the extra notebooks.
"""

from __future__ import annotations

import base64
import os
import sys
import sysconfig
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nbformat import NotebookNode

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
#: Seconds that a cell may take.
TIMEOUT = 900
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: Path) -> NotebookNode:
    """The notebook with its outputs, after all cells ran in `folder`; a cell that fails raises CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    # `pfml` in a cell is the command of this interpreter
    commands = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": commands}
    client = NotebookClient(notebook, timeout=TIMEOUT, resources={"metadata": {"path": str(folder)}})
    client.execute(env=environment)
    return _tidied(notebook, folder)


def _tidied(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook as it is stored; paths in `folder` become relative."""
    notebook.metadata = METADATA
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
        cell.metadata = {name: value for name, value in cell.metadata.items() if name == "alt"}
        if cell.cell_type == "code":
            cell.outputs = _joined(cell.outputs)
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":
                output.text = output.text.replace(f"{folder}{os.sep}", "")
            elif "image/png" in output.get("data", {}):
                output.data["image/png"] = _smaller(output.data["image/png"])
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs with consecutive pieces of one stream as one."""
    joined: list[NotebookNode] = []
    for output in outputs:
        last = joined[-1] if joined else None
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
        else:
            joined.append(output)
    return joined


def _smaller(image: str) -> str:
    """A PNG in base64 with at most 255 colors."""
    from PIL import Image

    from pfml.plots.theme import png_of_image

    opened = Image.open(BytesIO(base64.b64decode(image)), formats=["PNG"])
    return image if opened.mode == "P" else base64.b64encode(png_of_image(opened)).decode()


def main(names: list[str]) -> None:
    """Run and store the notebooks of these names, or all."""
    import nbformat

    for path in [FOLDER / f"{name}.ipynb" for name in names] or sorted(FOLDER.glob("*.ipynb")):
        with TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder).resolve())
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main(sys.argv[1:])
