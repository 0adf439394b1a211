"""From suspects to corrected labels, and back into training; the page and the command."""

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from noisy_runs import noisy_config
from PIL import Image
from test_audit import clusters

from pfml.audit import audit, audit_run, corrections_of, read_decisions, write_suspects, write_table
from pfml.audit.run_audit import has_untrained
from pfml.cli import main
from pfml.data import ImageSet, LabelNoise, RetrievalData, load_data
from pfml.data.corrections import Corrections
from pfml.evaluation import embed
from pfml.models import EmbedderConfig, create_embedder
from pfml.pages.audit import audit_page
from pfml.plots.grids import thumbnails
from pfml.runs.config import BatchConfig
from pfml.runs.config_files import read_config, write_config
from pfml.runs.data import prepare_data
from pfml.training import DataConfig, LossConfig, RunConfig, run

COLORS = {"blue": (20, 40, 220), "green": (30, 200, 40), "red": (220, 30, 30), "gray": (128, 128, 128)}


@pytest.fixture(scope="module")
def judged():
    points, images, true = clusters()
    return audit(points, images, true_labels=true, compare=["k-NN disagreement"])


@pytest.fixture(scope="module")
def labeled_images(tmp_path_factory):
    """Three classes to train on and one unseen, twelve images each, as a table with splits."""
    folder = tmp_path_factory.mktemp("images")
    random = torch.Generator().manual_seed(0)
    rows = []
    for name, color in COLORS.items():
        for number in range(12):
            shift = torch.randint(-12, 13, (3,), generator=random).tolist()
            level = tuple(max(0, min(255, c + s)) for c, s in zip(color, shift, strict=True))
            Image.new("RGB", (20, 20), level).save(folder / f"{name}-{number}.png")
            rows.append((f"{name}-{number}.png", name, "test" if name == "gray" else "train"))
    with open(folder / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    return folder / "table.csv"


@pytest.fixture(scope="module")
def noisy_run(labeled_images, tmp_path_factory):
    """A zero-shot run on the images with label noise: colors need no training."""
    out = tmp_path_factory.mktemp("runs") / "noisy"
    run(noisy_config(labeled_images), out)
    return out


def test_listed_labels_are_replaced_by_the_suggested_ones(judged):
    corrections = corrections_of(judged)
    assert corrections.dropped == 0
    corrected = corrections.apply(judged.images)
    mislabeled_before = int((judged.images.labels != judged.true_labels).sum())
    assert mislabeled_before == 36
    assert int((corrected.labels != judged.true_labels).sum()) <= 2


def test_listed_images_are_left_out(judged):
    kept = corrections_of(judged, policy="drop").apply(judged.images)
    assert len(kept) == len(judged.images) - len(judged.sure())
    dropped = set(judged.images.sources) - set(kept.sources)
    assert dropped == {judged.images.name_of(k) for k in judged.sure().tolist()}


def test_a_higher_precision_corrects_fewer():
    points, images, _ = clusters(spread=0.6)
    found = audit(points, images)
    assert 0 < len(corrections_of(found, precision=0.95)) < len(corrections_of(found, precision=0.5))


def test_an_unknown_policy_is_refused(judged):
    with pytest.raises(ValueError, match="policy must be one of relabel, drop, keep"):
        corrections_of(judged, policy="delete")


def test_decisions_go_before_the_policy(judged, tmp_path):
    first, second, third, fourth = judged.sure()[:4].tolist()
    names = judged.images.class_names
    elsewhere = next(c for c in range(6) if c not in (judged.images.labels[third], judged.scores.suggested[third]))
    table = tmp_path / "decisions.csv"
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("path", "decision", "label"))
        writer.writerow((judged.images.name_of(first), "relabel", names[elsewhere]))
        writer.writerow((judged.images.name_of(first), "accept", ""))  # the last line counts
        writer.writerow((judged.images.name_of(second), "reject", ""))
        writer.writerow((judged.images.name_of(third), "relabel", names[elsewhere]))
        writer.writerow((judged.images.name_of(fourth), "drop", ""))
    decided = corrections_of(judged, policy="keep", decisions=table).labels
    assert decided == {first: int(judged.scores.suggested[first]), third: elsewhere, fourth: None}
    others = corrections_of(judged, policy="drop", decisions=table).labels
    assert others[first] == int(judged.scores.suggested[first])
    assert second not in others
    assert len(others) == len(judged.sure()) - 1


def test_accept_takes_the_label_that_the_person_saw(judged, tmp_path):
    first = int(judged.listed()[0])
    seen = next(c for c in range(6) if c not in (judged.images.labels[first], judged.scores.suggested[first]))
    table = tmp_path / "decisions.csv"
    table.write_text(f"path,decision,label\n{judged.images.name_of(first)},accept,{judged.images.class_names[seen]}\n")
    assert corrections_of(judged, policy="keep", decisions=table).labels == {first: seen}


def test_decisions_by_absolute_paths_are_about_a_folder_that_was_typed_as_a_relative_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points, images, _ = clusters()
    files = tuple(Path("photos", f"{k}.png") for k in range(len(images)))
    found = audit(points, ImageSet(files, images.labels, images.class_names))
    lines = [f"{(tmp_path / files[3]).absolute()},drop,", f"{tmp_path}/../{tmp_path.name}/photos/4.png,drop,"]
    Path("decisions.csv").write_text("\n".join(["path,decision,label", *lines, "photos/5.png,drop,"]) + "\n")
    assert read_decisions(Path("decisions.csv"), found) == {3: None, 4: None, 5: None}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,decision"], "must have the columns path, decision and label"),
        (["path,decision,label", "nowhere,accept,"], "line 2 must name an image of the audit"),
        (["path,decision,label", "image-1,acept,"], "did you mean"),
        (["path,decision,label", "image-1,relabel,z"], "must name a class of the audit"),
    ],
)
def test_decisions_that_cannot_be_read_are_refused(judged, tmp_path, lines, message):
    (tmp_path / "decisions.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=message):
        read_decisions(tmp_path / "decisions.csv", judged)


def test_a_list_of_corrections_is_read_as_it_was_written(judged, tmp_path):
    corrections = Corrections({3: 1, 7: None, 40: 5})
    corrections.write(tmp_path / "list.csv", judged.images)
    assert Corrections.read(tmp_path / "list.csv", judged.images) == corrections


def test_a_list_for_other_labels_is_refused(judged, tmp_path):
    corrections_of(judged).write(tmp_path / "list.csv", judged.images)
    clean = judged.images.with_labels(judged.true_labels)
    with pytest.raises(ValueError, match="the list was made for other labels"):
        Corrections.read(tmp_path / "list.csv", clean)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["path,label"], "give it as data.name"),
        (["nowhere,a,b"], "must name a training image"),
        (["image-0,a"], "must have 3 cells"),
    ],
)
def test_a_broken_list_is_refused(judged, tmp_path, lines, message):
    header = [] if "path" in lines[0] else ["image,given class,corrected class"]
    (tmp_path / "list.csv").write_text("\n".join([*header, *lines]) + "\n")
    with pytest.raises(ValueError, match=message):
        Corrections.read(tmp_path / "list.csv", judged.images)


def test_a_class_keeps_an_image():
    images = ImageSet(torch.zeros(3, 3, 2, 2, dtype=torch.uint8), torch.tensor([0, 0, 1]), ("a", "b"))
    with pytest.raises(ValueError, match="must leave every class an image, got none left of 'b'"):
        Corrections({2: None}).apply(images)


def test_the_table_keeps_the_division_and_is_a_data_set(labeled_images, tmp_path):
    data = load_data(str(labeled_images))
    first, second = 0, 1
    write_table(tmp_path / "new" / "corrected.csv", data, Corrections({first: 2, second: None}))
    again = load_data(str(tmp_path / "new" / "corrected.csv"))
    assert again.train.class_names == data.train.class_names
    assert (len(again.train), len(again.test)) == (len(data.train) - 1, len(data.test))
    assert int(again.train.labels[0]) == 2
    assert again.train.images[0].resolve() == data.train.images[first].resolve()
    assert data.train.images[second].resolve() not in {path.resolve() for path in again.train.images}


def test_generated_images_have_no_table(tmp_path):
    _points, images, _ = clusters()
    other = replace(images, class_names=tuple("uvwxyz"))
    with pytest.raises(ValueError, match="--data.corrections"):
        write_table(tmp_path / "table.csv", RetrievalData("generated", images, other), Corrections({}))


def test_a_run_knows_its_truth_also_after_corrections(noisy_run, tmp_path):
    found, data = audit_run(noisy_run)
    assert found.true_labels is not None
    assert found.roles == ("train",) * len(data.train) + ("test",) * len(data.test)
    assert found.images.class_names == (*data.train.class_names, *data.test.class_names)
    wrong = (found.true_labels != found.images.labels).nonzero()[:, 0].tolist()
    assert len(wrong) == 7
    assert max(wrong) < len(data.train)
    half = Corrections({wrong[0]: int(found.true_labels[wrong[0]]), wrong[1]: None})
    half.write(tmp_path / "list.csv", data.train)
    config = DataConfig(data_path(noisy_run), noise=LabelNoise(rate=0.2), corrections=tmp_path / "list.csv")
    corrected, _ = prepare_data(config)
    assert len(corrected.train) == len(data.train) - 1
    assert any("1 image another label and leaves 1 out" in remark for remark in corrected.remarks)


def data_path(folder):
    return read_config(folder / "config.yaml").data.name


def test_the_laws_and_models_of_an_audit_are_those_asked_for(noisy_run):
    from pfml.training import load_field

    assert audit_run(noisy_run, law="run")[0].law == load_field(noisy_run).law
    fitted = audit_run(noisy_run)[0]
    assert fitted.law != load_field(noisy_run).law
    other = audit_run(noisy_run, model=noisy_run / "model")[0]
    torch.testing.assert_close(other.points, fitted.points)
    torch.testing.assert_close(other.attractions, fitted.attractions, msg="proxies are no charges")


def test_the_pretrained_backbone_judges_where_the_run_has_one(noisy_run, tmp_path, monkeypatch, capsys):
    config = read_config(noisy_run / "config.yaml")
    pretrained = shutil.copytree(noisy_run, tmp_path / "pretrained")
    write_config(pretrained / "config.yaml", replace(config, model=replace(config.model, weights="weights.pth")))
    untrained = create_embedder("convnet", weights="none", embedding_dim=None)
    monkeypatch.setattr("pfml.audit.run_audit.untrained_embedder", lambda config: untrained)
    found = audit_run(pretrained)[0]
    torch.testing.assert_close(found.points, torch.nn.functional.normalize(embed(untrained, found.images)))
    trained = audit_run(pretrained, model=pretrained)[0]
    torch.testing.assert_close(trained.points, audit_run(noisy_run)[0].points)

    def missing(config):
        raise FileNotFoundError("weights.pth is not there")

    monkeypatch.setattr("pfml.audit.run_audit.untrained_embedder", missing)
    with pytest.raises(ValueError, match=r"weights.pth is not there\): pfml audit .* --model .* by the trained model"):
        audit_run(pretrained)


def test_the_page_shows_suspects_and_the_comparison(judged):
    suspects = judged.suspects(judged.ranked(2), neighbors=3)
    html = audit_page(judged, suspects, title="Audit of <run>")
    assert "Audit of &lt;run&gt;" in html
    assert f"{suspects[0].given}, rather {suspects[0].suggested}?" in html
    assert "k-NN disagreement" in html
    assert html.count("<figure>") == 2 + 2  # suspects, scores, precision over recall


def test_an_image_that_is_near_several_suspects_is_decoded_once(judged):
    suspects = judged.suspects(judged.ranked(12), neighbors=3)
    with mock.patch("pfml.pages.audit.thumbnails", wraps=thumbnails) as decoded:
        audit_page(judged, suspects, title="Audit")
    [indices] = [call.args[1] for call in decoded.call_args_list]
    assert len(indices) == len(set(indices)) < 12 * 4
    assert set(indices) == {k for one in suspects for k in (one.index, *(near.index for near in one.neighbors))}


def test_suspects_are_written_with_their_evidence(judged, tmp_path):
    suspects = judged.suspects(judged.ranked(40), neighbors=2)
    write_suspects(tmp_path / "audit" / "suspects.csv", suspects, judged.listed())
    with open(tmp_path / "audit" / "suspects.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [one.image for one in suspects]
    assert [row["listed"] for row in rows].count("yes") == len(judged.listed())
    assert rows[0]["suggested"] == suspects[0].suggested
    assert rows[0]["neighbors"].count(" at ") == 2


@pytest.mark.usefixtures("without_plots")
def test_the_command_goes_from_a_run_to_a_run_on_corrected_labels(noisy_run, tmp_path, capsys):
    out = tmp_path / "corrected.csv"
    decisions = tmp_path / "decisions.csv"
    with open(noisy_run / "noise.csv", newline="") as file:
        wrong = list(csv.DictReader(file))
    lines = [f"{row['image']},relabel,{row['true class']}" for row in wrong]
    decisions.write_text("\n".join(["path,decision,label", *lines]) + "\n")
    main(["audit", str(noisy_run), "--top", "3", "--apply", "--decisions", str(decisions), "--out", str(out)])
    printed = capsys.readouterr().out
    assert "7 images relabeled, 0 left out" in printed
    assert (noisy_run / "audit" / "audit.html").is_file()
    listed = noisy_run / "audit" / "corrections.csv"
    config = DataConfig(data_path(noisy_run), noise=LabelNoise(rate=0.2), corrections=listed)
    assert prepare_data(config)[0].train.labels.tolist() == load_data(data_path(noisy_run)).train.labels.tolist()
    assert load_data(str(out)).train.labels.tolist() == load_data(data_path(noisy_run)).train.labels.tolist()


@pytest.mark.usefixtures("without_plots")
def test_the_command_counts_suspects_and_names_what_it_cannot_judge(labeled_images, tmp_path, capsys):
    rows = list(csv.DictReader(labeled_images.read_text().splitlines()))
    lines = [f"{labeled_images.parent / row['path']},{row['label']},{row['split']}" for row in rows]
    Image.new("RGB", (20, 20), (10, 10, 10)).save(tmp_path / "black.png")
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["path,label,split", *lines, "black.png,black,train"]) + "\n")
    run(replace(noisy_config(table), data=DataConfig(str(table))), tmp_path / "run")
    main(["audit", str(tmp_path / "run"), "--top", "1000"])
    printed = capsys.readouterr().out
    assert "1 image is alone in its class and cannot be judged: " in printed
    assert "black.png (black; the nearest class is " in printed
    assert "inf" not in printed.replace(str(tmp_path), "")
    with open(tmp_path / "run" / "audit" / "suspects.csv", newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 48, "all that were judged, as --top asks"
    suspects = sum(row["listed"] == "yes" for row in written) or sum(float(row["score"]) > 0 for row in written)
    assert suspects < 48
    assert f"suspects.csv: {suspects} suspects and {48 - suspects} more images, in order;" in printed
    page = (tmp_path / "run" / "audit" / "audit.html").read_text()
    assert "black.png" in page
    assert f"{labeled_images.parent}/" not in page, "suspects are named without the folders that all images share"


@pytest.mark.usefixtures("without_plots")
def test_the_command_says_how_to_review_what_apply_is_not_sure_of(noisy_run, labeled_images, tmp_path, capsys):
    options = ["--apply", "--precision", "1", "--no-faults"]
    main(["audit", str(noisy_run), *options, "--out-dir", str(tmp_path / "audit")])
    printed = capsys.readouterr().out
    assert "0 labels; left for review: 7 suspects" in printed
    decided = noisy_run / "audit" / "decisions.csv"  # where the page writes them
    assert f"pfml serve {noisy_run}, view Audit; then pfml audit {noisy_run} --apply --decisions {decided}" in printed
    assert "below the line: mislabeled with less than 50% probability" in printed
    rows = list(csv.DictReader(labeled_images.read_text().splitlines()))
    rows[0]["label"], rows[12]["label"] = rows[12]["label"], rows[0]["label"]
    lines = [f"{labeled_images.parent / row['path']},{row['label']}" for row in rows]
    table = tmp_path / "photos.csv"
    table.write_text("\n".join(["path,label", *lines]) + "\n")
    main(["audit", str(table), *options, "--top", "2", "--out-dir", str(tmp_path / "page")])
    printed = capsys.readouterr().out
    assert "below the line" not in printed, "all that is shown is listed, or nothing"
    page = tmp_path / "page" / "audit.html"
    assert f"by {page} write the columns path, decision and label to a CSV; then pfml audit {table} --apply" in printed


def test_what_apply_does_needs_apply(noisy_run, tmp_path, capsys):
    with pytest.raises(SystemExit, match="give --apply, too"):
        main(["audit", str(noisy_run), "--policy", "drop"])


@pytest.mark.usefixtures("without_plots")
def test_training_and_held_out_images_are_judged_in_one_field(labeled_images, tmp_path, capsys):
    rows = list(csv.DictReader(labeled_images.read_text().splitlines()))
    unseen = sorted(COLORS)[:2]
    names = (unseen[0], unseen[1], "red", unseen[0])
    swapped = [[row for row in rows if row["label"] == name][k] for k, name in enumerate(names)]
    suggested = [row["label"] for row in swapped]
    for row, other in zip(swapped, (unseen[1], unseen[0], unseen[0], "red"), strict=True):
        row["label"] = other
    split = {name: "test" if name in unseen else "train" for name in COLORS}
    lines = [f"{labeled_images.parent / row['path']},{row['label']},{split[row['label']]}" for row in rows]
    (tmp_path / "table.csv").write_text("\n".join(["path,label,split", *lines]) + "\n")
    config = replace(noisy_config(""), data=DataConfig(str(tmp_path / "table.csv")), batch=BatchConfig(8, 4))
    run(config, tmp_path / "run")
    decisions = tmp_path / "decisions.csv"
    decided = [f"{labeled_images.parent / row['path']},accept," for row in swapped]
    decisions.write_text("\n".join(["path,decision,label", *decided]) + "\n")
    out = tmp_path / "corrected.csv"
    main(["audit", str(tmp_path / "run"), "--top", "4", "--apply", "--decisions", str(decisions), "--out", str(out)])
    printed = capsys.readouterr().out
    with open(tmp_path / "run" / "audit" / "suspects.csv", newline="") as file:
        found = {Path(row["path"]).name: (row["part"], row["suggested"]) for row in csv.DictReader(file)}
    wanted = [("test", name) for name in suggested[:3]] + [("train", suggested[3])]
    assert found == {row["path"]: name for row, name in zip(swapped, wanted, strict=True)}
    assert "corrections.csv: 0 images relabeled, 1 left out (1 of a held-out class)" in printed
    assert "4 relabeled, 0 left out, for pfml train" in printed
    corrected = load_data(str(out))
    assert corrected.train.class_names == ("green", "red")
    assert [len(corrected.train), len(corrected.test)] == [24, 24]
    by_file = {path.name: name for name, path in labels_of(corrected)}
    assert [by_file[row["path"]] for row in swapped] == suggested
    main(["audit", str(tmp_path / "run"), "--apply", "--decisions", str(decisions)])
    assert "3 labels of held-out images are corrected only in a table" in capsys.readouterr().out
    main(["audit", str(tmp_path / "run"), "--part", "train", "--top", "100"])
    with open(tmp_path / "run" / "audit" / "suspects.csv", newline="") as file:
        assert {row["part"] for row in csv.DictReader(file)} == {"train"}


def labels_of(data):
    """Class name and file of every image."""
    for images in data.parts.values():
        yield from zip((images.class_names[k] for k in images.labels.tolist()), images.images, strict=True)


def test_a_missing_list_of_decisions_is_refused_before_anything_is_embedded(noisy_run, monkeypatch):
    monkeypatch.setattr("pfml.audit.run_audit.embed", None)
    with pytest.raises(
        SystemExit, match=r"must be a CSV file or an export of Label Studio or FiftyOne, got nowhere\.csv"
    ):
        main(["audit", str(noisy_run), "--apply", "--decisions", "nowhere.csv"])


@pytest.mark.parametrize(
    ("loss", "effort", "weights", "wanted"),
    [
        ("pfml", None, "default", True),
        ("pfml", None, "none", False),
        ("zero-shot", None, "default", False),
        ("zero-shot", "minutes", "default", True),  # the ladder has fitted a head to the labels
    ],
)
def test_the_backbone_judges_as_it_was_if_the_run_has_learned_labels(loss, effort, weights, wanted):
    model = EmbedderConfig("efficientnet_lite0", weights=weights)
    assert has_untrained(RunConfig(loss=LossConfig(loss), effort=effort, model=model)) is wanted
