"""The notebooks are stored with small, clean outputs, name what exists, and run from the top in a new kernel."""

import ast
import base64
import importlib
import json
import re
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from runpy import run_path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[1]
TOOL = run_path(str(ROOT / "tools" / "notebooks.py"))
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LARGEST = 420 * 1024  # bytes of a file
WIDEST = 2200  # pixels of an image, at twice the resolution
#: Where a machine would show in an output, and what goes stale: paths, times and speeds, terminal commands, warnings.
NOISE = (
    r"(?<![\w.~])/(?:home|root|tmp|work|usr|opt|Users|var|private)/",
    r"[A-Z]:\\",
    r"\x1b\[",
    r"\d\s?it/s|images/s|_per_second|\d+:\d\d:\d\d",
    r"\b\d+(?:\.\d+)? (?:seconds?|ms|min)\b",
    r"Warning\b|UserWarning|Traceback",
    r"0x[0-9a-f]{6,}",
)
#: Public modules of pfml that a notebook may import from: the packages, and single ideas beside them.
DEEPEST = 2  # pfml.plots
#: Longer paths -> why there is no shorter one.
DEEPER = {"pfml.runs.folder": "a run folder is read by few, and not part of the lazy names"}

by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells_of(path, kind="code"):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == kind]


def python_of(path):
    """The Python of a notebook, without what is IPython's own."""
    sources = ["".join(cell["source"]) for cell in cells_of(path)]
    return "\n".join(re.sub(r"^%.*$", "", source, flags=re.M) for source in sources if not source.startswith("%%"))


def texts_of(path):
    """What the cells of a notebook printed or returned, as text."""
    for cell in cells_of(path):
        for output in cell["outputs"]:
            yield "".join(output.get("text", ()))
            yield from ("".join(data) for kind, data in output.get("data", {}).items() if kind.startswith("text/"))


def images_of(path):
    for cell in cells_of(path):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                yield cell, Image.open(BytesIO(base64.b64decode(output["data"]["image/png"])))


def test_there_are_four_notebooks():
    assert len(NOTEBOOKS) == 4


@by_name
def test_a_notebook_is_well_formed_and_stored_as_the_tool_stores_it(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert content["metadata"] == TOOL["METADATA"]
    assert [cell["id"] for cell in content["cells"]] == [f"cell-{k}" for k in range(len(content["cells"]))]
    assert "".join(content["cells"][0]["source"]).startswith("# ")
    if find_spec("nbformat"):
        nbformat = importlib.import_module("nbformat")
        nbformat.validate(nbformat.reads(path.read_text(encoding="utf-8"), as_version=4))


@by_name
def test_all_cells_ran_in_order_without_errors_and_warnings(path):
    cells = cells_of(path)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert [one for one in outputs if one["output_type"] == "error" or one.get("name") == "stderr"] == []


@by_name
def test_outputs_hold_no_paths_of_a_machine_no_times_and_no_noise(path):
    found = [(pattern, text) for text in texts_of(path) for pattern in NOISE if re.search(pattern, text)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "in /tmp/x/photos",
        "12.5 it/s",
        "took 3.2 seconds",
        "\x1b[1mR@1",
        "0:00:12",
        "<Axes at 0x7f0011223344>",
        "FutureWarning: x",
    ],
)
def test_noise_is_recognized(text):
    assert any(re.search(pattern, text) for pattern in NOISE)


@by_name
def test_a_notebook_is_small_and_its_images_are_described(path):
    assert path.stat().st_size < LARGEST
    images = list(images_of(path))
    for cell, image in images:
        assert image.mode == "P", "255 colors: python tools/notebooks.py stores them"
        assert image.width <= WIDEST
        assert len(cell["metadata"].get("alt", "")) > 30, "a cell with an image has a text for those who do not see it"
    assert images or path.stem == "lightning_and_trainer"


@by_name
def test_a_notebook_imports_public_names_that_exist_by_short_paths(path):
    tree = ast.parse(python_of(path))
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "pfml":
            assert node.module.count(".") < DEEPEST or node.module in DEEPER, node.module
            names += [(node.module, alias.name) for alias in node.names]
        # pfml.PowerLaw: written out
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "pfml":
            names.append(("pfml", node.attr))
    assert names
    for module, name in names:
        loaded = importlib.import_module(module)
        assert name in loaded.__all__, f"{module}.{name} is not public"
        assert hasattr(loaded, name), f"{module} has no {name}"


@by_name
def test_links_of_a_notebook_lead_to_files(path):
    text = "\n".join("".join(cell["source"]) for cell in cells_of(path, "markdown"))
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert links
    assert [link for link in links if not (path.parent / link).is_file()] == []


def test_pieces_of_a_stream_are_joined_and_paths_of_the_working_folder_are_relative(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    printed = [
        nbformat.v4.new_output("stream", name=name, text=text)
        for name, text in (("stdout", f"wrote {tmp_path}/ru"), ("stdout", "ns/a\n"), ("stderr", "b"), ("stdout", "c"))
    ]
    cell = nbformat.v4.new_code_cell("run()", outputs=printed, metadata={"alt": "x", "execution": {"started": "12:00"}})
    stored = TOOL["_tidied"](nbformat.v4.new_notebook(cells=[cell]), tmp_path).cells[0]
    assert [(one.name, one.text) for one in stored.outputs] == [
        ("stdout", "wrote runs/a\n"),
        ("stderr", "b"),
        ("stdout", "c"),
    ]
    assert stored.metadata == {"alt": "x"}
    assert stored.id == "cell-0"


def test_images_are_stored_with_few_colors():
    image = Image.radial_gradient("L").convert("RGB")
    buffer = BytesIO()
    image.save(buffer, format="PNG")
    stored = TOOL["_smaller"](base64.b64encode(buffer.getvalue()).decode())
    opened = Image.open(BytesIO(base64.b64decode(stored)))
    assert (opened.mode, opened.size) == ("P", image.size)
    assert TOOL["_smaller"](stored) == stored


@pytest.mark.slow
def test_a_cell_that_fails_fails_the_run(tmp_path):
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    client = pytest.importorskip("nbclient", reason="needs the extra notebooks")
    pytest.importorskip("ipykernel", reason="needs the extra notebooks")
    broken = tmp_path / "broken.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")]), broken)
    with pytest.raises(client.exceptions.CellExecutionError, match="ZeroDivisionError"):
        TOOL["executed"](broken, tmp_path)


@pytest.mark.slow
@by_name
def test_a_notebook_runs_in_a_new_kernel_and_an_empty_folder(path, tmp_path):
    packages = {"nbclient", "nbformat", "ipykernel", "ipywidgets"}
    packages |= {"lightning", "transformers", "accelerate"} if path.stem == "lightning_and_trainer" else set()
    packages |= {"skimage"} if path.stem == "folder_with_noisy_labels" else set()
    missing = sorted(name for name in packages if not find_spec(name))
    if missing:
        pytest.skip(f"the extra notebooks is not installed: {', '.join(missing)}")
    ran = TOOL["executed"](path, tmp_path)

    def kinds(outputs):
        return [(one["output_type"], one.get("name"), sorted(one.get("data", {}))) for one in outputs]

    stored = [kinds(cell["outputs"]) for cell in cells_of(path)]
    assert [kinds(cell.outputs) for cell in ran.cells if cell.cell_type == "code"] == stored
