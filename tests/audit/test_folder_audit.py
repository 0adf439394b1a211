"""`pfml audit FOLDER`: images without a run, from the folder to a table that trains."""

import csv
import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from pfml.audit.folder_audit import audit_folder, load_all
from pfml.cli import main
from pfml.data import load_data
from pfml.models import create_embedder

COLORS = {"blue": (20, 40, 220), "green": (30, 200, 40), "red": (220, 30, 30), "gray": (128, 128, 128)}
pytestmark = pytest.mark.usefixtures("without_plots", "_colors_as_embeddings")


@pytest.fixture
def _colors_as_embeddings(monkeypatch):
    """Mean colors in place of the pretrained backbone, which would take most of the time."""

    def embedded(embedder, images, **options):
        return torch.stack([_color(path) for path in images.images])

    model = create_embedder("convnet", weights="none", embedding_dim=8)
    monkeypatch.setattr("pfml.audit.folder_audit.create_embedder", lambda name, **options: model)
    monkeypatch.setattr("pfml.audit.folder_audit.embed", embedded)


def _color(path):
    with Image.open(path) as image:
        pixels = torch.tensor(list(image.convert("RGB").resize((4, 4)).tobytes())).view(-1, 3).double()
    return pixels.mean(dim=0) - 100


def draw(folder, each=12, seed=0):
    """Class folders of noise around a color."""
    random = torch.Generator().manual_seed(seed)
    for name, color in COLORS.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = torch.tensor(color) + torch.randint(-20, 21, (3,), generator=random)
            noise = torch.randint(-15, 16, (20, 20, 3), generator=random)
            Image.fromarray((pixels + noise).clamp(0, 255).byte().numpy()).save(folder / name / f"{number}.png")
    return folder


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Four classes, a blue image among the red ones, and an exact copy in another class."""
    monkeypatch.chdir(tmp_path)
    folder = draw(tmp_path / "photos")
    (folder / "blue" / "0.png").rename(folder / "red" / "wrong.png")
    (folder / "gray" / "copy.png").write_bytes((folder / "green" / "3.png").read_bytes())
    return folder


def files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder_gives_tables_and_a_page_elsewhere(photos, capsys):
    before = files(photos)
    main(["audit", "photos", "--top", "2", "--device", "cpu"])
    out = Path("out/audit/photos")
    assert files(photos) == before, "nothing is written into the folder"
    assert {path.name for path in out.iterdir()} == {
        "suspects.csv", "duplicates.csv", "outliers.csv", "classes.csv", "quality.csv", "audit.html",
    }  # fmt: skip
    suspects = {Path(row["path"]).name: row["suggested"] for row in rows(out / "suspects.csv")[:2]}
    assert suspects == {"wrong.png": "blue", "copy.png": "green"}
    copies = rows(out / "duplicates.csv")
    assert {(row["class"], row["copy"], row["across_classes"]) for row in copies} >= {
        ("green", "exact", "yes"),
        ("gray", "exact", "yes"),
    }
    printed = capsys.readouterr().out
    assert "2 images have an exact copy in another class (gray/copy.png and green/3.png)" in printed
    assert "across classes 1" in printed
    assert "Exact copies across classes" in (out / "audit.html").read_text()


def test_decisions_on_a_folder_become_a_table_that_trains(photos, capsys):
    decided = [("red/wrong.png", "accept"), ("gray/copy.png", "drop")]
    lines = ["path,decision,label", *(f"{name},{decision}," for name, decision in decided)]
    Path("decisions.csv").write_text("\n".join(lines) + "\n")
    main(["audit", "photos", "--apply", "--decisions", "decisions.csv", "--out-dir", "elsewhere", "--no-faults"])
    assert "1 relabeled, 1 left out, for pfml train --data.name elsewhere/corrected.csv" in capsys.readouterr().out
    corrected, roles = load_data("elsewhere/corrected.csv").joined()
    assert set(roles) == {"train", "test"}, "it is divided as a folder is"
    labels = {
        path.resolve(): corrected.class_names[k] for path, k in zip(corrected.images, corrected.labels, strict=True)
    }
    assert labels[photos / "red" / "wrong.png"] == "blue"
    assert photos / "gray" / "copy.png" not in labels
    assert len(labels) == 48
    assert not Path("elsewhere/duplicates.csv").exists()


def test_other_tools_get_the_suspects(photos, capsys):
    main(["audit", "photos", "--top", "3", "--to", "label-studio", "fiftyone"])
    out = Path("out/audit/photos")
    assert len(json.loads((out / "label-studio.json").read_text())) == len(rows(out / "suspects.csv"))
    assert len(json.loads((out / "fiftyone" / "samples.json").read_text())["samples"]) >= 3
    assert "LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT=" in capsys.readouterr().out


def test_a_folder_that_is_divided_keeps_its_parts_and_leaks_are_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "photos" / "train")
    draw(tmp_path / "photos" / "test", each=4, seed=1)
    (tmp_path / "photos" / "test" / "red" / "0.png").write_bytes(
        (tmp_path / "photos" / "train" / "red" / "5.png").read_bytes()
    )
    assert {role: len(part) for role, part in load_all("photos").parts.items()} == {"train": 48, "test": 16}
    main(["audit", "photos", "--json", "--quiet", "--part", "test", "--top", "100"])
    content = json.loads(capsys.readouterr().out)
    assert {one["part"] for one in content["suspects"]} == {"test"}
    assert len(content["suspects"]) == 16
    assert any(group["is_across_parts"] and group["is_exact"] for group in content["faults"]["duplicates"])
    found, data = audit_folder("photos", device="cpu")
    assert "1 held-out image is an exact copy of training images" in " ".join(data.remarks)
    assert set(found.roles) == {"train", "test"}


def test_test_classes_of_which_some_train_are_taken_together(tmp_path):
    draw(tmp_path / "photos" / "train", each=2)
    draw(tmp_path / "photos" / "test", each=2)
    (tmp_path / "photos" / "test" / "red").rename(tmp_path / "photos" / "test" / "new")
    assert {role: len(part) for role, part in load_all(tmp_path / "photos").parts.items()} == {"train": 16, "test": 0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--out-dir", "photos/audit"), "--out-dir must lie outside of photos"),
        (("--law", "run"), "--law run is that of a run, and photos is none"),
    ],
)
@pytest.mark.usefixtures("photos")
def test_what_does_not_suit_a_folder_is_refused(options, message):
    with pytest.raises(SystemExit, match=message):
        main(["audit", "photos", *options])
