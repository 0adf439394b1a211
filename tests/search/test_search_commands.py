"""`pfml index`, `pfml search` and `pfml calibrate`."""

import csv
import json
import re
import shlex
import sys
from dataclasses import replace
from io import StringIO

import pytest
from command_output import failure, said, said_in_part

from pfml.data import load_data, with_validation
from pfml.data.image_set import ImageSet
from pfml.evaluation import embed
from pfml.models import TrainedOn
from pfml.runs.config_files import write_config
from pfml.search import ImageIndex, ModelIdentity, Threshold
from pfml.search.scores import CANDIDATES
from pfml.training import BatchConfig, DataConfig, LossConfig, RunConfig, run
from small_data import few_glyphs, small_config, small_embedder
from small_index import write_images
from small_threshold import made_threshold

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def model(tmp_path):
    embedder = small_embedder()
    embedder.save(tmp_path / "run")
    return embedder


@pytest.fixture
def workspace(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images")
    return tmp_path


def save_threshold(folder, distance, model):
    """One by the plain distance."""
    made_threshold(value=-distance, distance=distance, model=ModelIdentity.of(model)).save(folder)


def test_index_says_what_it_did_each_time(workspace, capsys):
    assert "5 added\n" in said(capsys, "index", "run", "images")
    (workspace / "images/a/1.png").unlink()
    (workspace / "images/a/bad.png").write_text("no image")
    printed = said_in_part(capsys, "index", "run", "images")
    assert "0 added, 4 unchanged, 1 removed, 1 unreadable" in printed
    assert "left out: " in printed
    assert "bad.png: is not an image" in printed
    assert "4 images of 2 classes in 1 shard, 1 removed that --compact" in printed
    assert "4 images of 2 classes in 1 shard\n" in said(capsys, "index", "run", "--compact")


def test_index_names_a_folder_that_was_moved_and_how_to_take_its_images_out(workspace, capsys):
    assert "is gone" not in said(capsys, "index", "run", "images")
    (workspace / "images").rename(workspace / "my images")
    printed = said(capsys, "index", "run", "my images")
    assert "10 images of 2 classes" in printed, "the old ones are there, too"
    gone = re.search(r"warning: .*/images is gone, and its 5 images are still found: pfml (.*) takes them out", printed)
    printed = said(capsys, *shlex.split(gone[1]))
    assert "5 removed" in printed
    assert "5 images of 2 classes" in printed
    assert "is gone" not in printed


@pytest.fixture
def priced(workspace, capsys):
    rows = ["path,price,tags", "a/1.png,3,old", "a/2.png,12,new;old", "b/3.png,,new", "b/4.png,25,"]
    (workspace / "meta.csv").write_text("\n".join(rows))
    printed = said(capsys, "index", "run", "images", "--metadata=meta.csv")
    assert "metadata: price (number), tags (list)" in printed
    assert "1 of 5 images in" in printed
    return workspace


def hits_of(answer):
    return {hit["path"].split("/images/")[1] for result in answer["results"] for hit in result["hits"]}


def test_metadata_are_indexed_shown_and_filtered_by(priced, capsys):
    answer = json.loads(said(capsys, "search", "run", "images/b/3.png", "--where=price < 20", "--json"))
    assert hits_of(answer) == {"a/1.png", "a/2.png"}
    assert {"price": 12.0, "tags": ["new", "old"]} in [hit["metadata"] for hit in answer["results"][0]["hits"]]
    assert "new, old" in said(capsys, "search", "run", "images/b/3.png", "--where", "tags contains new")
    answer = json.loads(
        said(capsys, "search", "run", "images/b/3.png", "--where=class = b", "--rerank", "--class=b", "--json")
    )
    assert hits_of(answer) == {"b/3.png", "b/4.png", "b/deep/5.png"}
    error = failure("search", "run", "images/b/3.png", "--where=prise < 20")
    assert "path (text), price (number), tags (list), got 'prise'; did you mean 'price'?" in error
    (priced / "meta.csv").write_text("path,price\na/1.png,cheap")
    assert "meta.csv, line 2, column price must be a number as in the index, got 'cheap'" in failure(
        "index", "run", "images", "--metadata=meta.csv"
    )
    printed = said(capsys, "index", "run", "images", "--metadata=meta.csv", "--columns=price:text", "--json")
    done = json.loads(printed[printed.index("{") :])
    assert (done["with_new_metadata"], done["unchanged"], done["columns"]["price"]) == (4, 5, "text")
    assert "need the images too" in failure("index", "run", "--compact", "--columns=price:text")
    assert "TYPE one of" in failure("index", "run", "images", "--metadata=meta.csv", "--columns=price:numbers")


def test_search_by_several_images_ids_and_negatives(priced, capsys):
    two = ("images/a/1.png", "images/b/3.png")
    apart = json.loads(said(capsys, "search", "run", *two, "--json", "--k=2"))["results"]
    assert [result["hits"][0]["distance"] for result in apart] == pytest.approx([0, 0], abs=1e-3)
    for how in ("mean", "any"):
        [one] = json.loads(said(capsys, "search", "run", *two, f"--combine={how}", "--json"))["results"]
        assert one["unknown"] is None
        assert (one["hits"][0]["distance"] < 1e-3) == (how == "any")
    [own] = json.loads(said(capsys, "search", "run", "--id=2", "--json"))["results"]
    assert 2 not in [hit["id"] for hit in own["hits"]]
    assert len(own["hits"]) == 4
    answer = said(capsys, "search", "run", two[0], "--unlike", two[1], "--unlike-id=1", "--json")
    [moved] = json.loads(answer)["results"]
    assert moved["hits"][0]["distance"] > 0.01
    assert 1 not in [hit["id"] for hit in moved["hits"]]
    assert "an id must be one of the index" in failure("search", "run", "--id=99")
    assert "needs an image to search by" in failure("search", "run")
    assert "give it without --expand" in failure("search", "run", two[0], "--combine=any", "--rerank")


def test_search_expands_queries_or_re_ranks(workspace, capsys):
    said(capsys, "index", "run", "images")
    for option in ("--expand=2", "--rerank"):
        answer = json.loads(said(capsys, "search", "run", "images/b/3.png", "--k=5", option, "--json"))
        assert len(answer["results"][0]["hits"]) == 5
    assert "must not be given together" in failure("search", "run", "images/b/3.png", "--expand", "--rerank")


def test_search_prints_a_row_for_each_image_found(workspace, capsys, model):
    said(capsys, "index", "run", "images", "--shard-images=2", "--batch_size=1", "--workers=1")
    assert ImageIndex.open("run/index").num_shards == 3
    printed = said(capsys, "search", "run", "images/b/3.png", "--k=3")
    rows = [line for line in printed.splitlines() if "images/" in line and "│" in line]
    assert len(rows) == 3
    assert "0.0000" in rows[0]
    assert "images/b/3.png" in rows[0]
    assert "images/b/3.png: b, 3 of 5, potential 1.00\n" in printed
    assert "no threshold" in printed
    only = said(capsys, "search", "run", "images/b/3.png", "--class", "a")
    assert "images/b/4.png" not in only
    assert "images/a/1.png" in only
    assert "images/b/3.png: b, 3 of 5" in only, "the verdict is of all classes"


def test_json_holds_the_distances_and_verdicts(workspace, capsys, model):
    said(capsys, "index", "run", "images")
    index, identity = ImageIndex.open("run/index"), ModelIdentity.of(model)
    files = [workspace / "images/a/1.png", workspace / "images/b/4.png"]
    expected = index.search(embed(model, ImageSet.unlabeled(files)), 3, model=identity)
    save_threshold("run", 1e-4, model)
    found = json.loads(said(capsys, "search", "run", *files, "--k=3", "--json"))
    measured = {"count": 1, "total": 100, "low": 0.0, "high": 0.05}
    assert found["threshold"] == {
        "score": "distance", "value": -1e-4, "class_values": {}, "false_accept_rate": 0.01, "false_accepts": measured
    }  # fmt: skip
    for answer, hits in zip(found["results"], expected, strict=True):
        assert [hit["path"] for hit in answer["hits"]] == [hit.path for hit in hits]
        assert [hit["distance"] for hit in answer["hits"]] == pytest.approx([hit.distance for hit in hits], abs=1e-5)
        assert answer["unknown"] is False
        verdict = answer["verdict"]
        assert (verdict["class_name"], verdict["is_known"]) == (hits[0].class_name, True)
        assert verdict["votes"] == {"a": 2, "b": 3}[verdict["class_name"]]
        assert (verdict["of"], verdict["score"]) == (5, pytest.approx(0.0, abs=1e-5))
        assert verdict["potential"] == pytest.approx(1.0, abs=1e-3)
    printed = said(capsys, "search", "run", files[0], "--k=3")
    [score] = re.findall(rf"{re.escape(str(files[0]))}: known, a, 2 of 5, potential 1.00, score (\S+)\n", printed)
    assert float(score) == pytest.approx(0.0, abs=1e-5)
    assert "an image is unknown if its score (distance) is below -0.0001; measured false accept rate 1.00%" in printed
    assert "(1 of 100; 95 %: 0.00% to 5.00%)" in printed
    assert "asked 0.01" in printed


def test_csv_has_a_line_for_each_image_found(priced, capsys, model):
    save_threshold(priced / "run", 0.5, model)
    lines = list(csv.DictReader(StringIO(said(capsys, "search", "run", "images/a/1.png", "--id=1", "--k=2", "--csv"))))
    assert [(line["rank"], line["query"]) for line in lines[:2]] == [("1", "images/a/1.png"), ("2", "images/a/1.png")]
    assert len(lines) == 4
    first = lines[0]
    assert (first["known"], first["class"], first["price"]) == ("yes", "a", "3")
    assert first["path"] == str(priced / "images/a/1.png")
    assert float(first["distance"]) < 1e-3
    assert lines[2]["query"].startswith("images/"), "an image of the index is named as the results are"
    assert "--json and --csv" in failure("search", "run", "images/a/1.png", "--csv", "--json")


def test_no_image_asked_for_is_refused(priced):
    assert "--k must be at least 1, got 0" in failure("search", "run", "images/a/1.png", "--k=0")


def test_images_without_a_class_have_a_verdict_by_distance_alone(workspace, capsys, model):
    write_images(workspace / "flat", ["1.png", "2.png"])
    said(capsys, "index", "run", "flat")
    save_threshold("run", 1e-4, model)
    write_images(workspace, ["query.png"])
    found = json.loads(said(capsys, "search", "run", "flat/1.png", "query.png", "--json"))["results"]
    assert [one["verdict"]["is_known"] for one in found] == [True, False]
    assert {(one["verdict"]["class_name"], one["verdict"]["of"]) for one in found} == {(None, 0)}
    printed = said(capsys, "search", "run", "flat/1.png", "query.png")
    assert "flat/1.png: known, no class among the nearest" in printed
    assert "query.png: unknown, no class among the nearest" in printed


def test_a_query_that_cannot_be_read_is_named_and_the_others_are_answered(workspace, capsys):
    said(capsys, "index", "run", "images")
    (workspace / "images/a/bad.png").write_text("no image")
    printed = said_in_part(capsys, "search", "run", "images/a/bad.png", "images/b/3.png", "--k=1")
    assert "left out: images/a/bad.png: is not an image of a known format" in printed
    assert "1 of 2 images cannot be read" in printed
    assert "0.0000" in printed
    found = json.loads(said_in_part(capsys, "search", "run", "images/a", "--k=1", "--json"))
    assert [answer["query"] for answer in found["results"]] == ["images/a/1.png", "images/a/2.png"]
    [left_out] = found["left_out"]
    assert left_out["path"] == "images/a/bad.png"
    assert left_out["reason"].startswith("is not an image of a known format")
    assert "images/a/bad.png: is not an image" in failure("search", "run", "images/a/bad.png")


def test_a_query_that_is_near_nothing_is_unknown(workspace, capsys, model):
    said(capsys, "index", "run", "images")
    save_threshold("run", 0.0, model)
    write_images(workspace, ["query.png"])
    found = json.loads(said(capsys, "search", "run", "query.png", "--json"))
    assert found["results"][0]["unknown"] is True
    assert found["results"][0]["verdict"]["is_known"] is False
    assert "query.png: unknown, most like " in said(capsys, "search", "run", "query.png")


def test_a_threshold_of_another_model_is_refused(workspace, capsys, model):
    import torch

    said(capsys, "index", "run", "images")
    with torch.random.fork_rng():
        torch.manual_seed(9)
        save_threshold("run", 0.5, small_embedder())
    assert "threshold.json belongs to" in failure("search", "run", "images/a/1.png")


def test_an_index_elsewhere_is_searched_by_name_and_by_faiss(workspace, capsys):
    pytest.importorskip("faiss", reason="needs the extra faiss")
    said(capsys, "index", "run", "images", "--out=elsewhere")
    assert not (workspace / "run/index").exists()
    printed = said(capsys, "search", "run", "images/a/1.png", "--index=elsewhere", "--backend=faiss")
    assert "images/a/1.png" in printed
    assert "backend must be one of" in failure("search", "run", "images", "--index=elsewhere", "--backend=x")


def test_images_folders_and_classes_are_removed_by_name(workspace, capsys):
    said(capsys, "index", "run", "images")
    assert "1 removed" in said(capsys, "index", "run", "--remove", "images/a/1.png")
    assert "1 removed" in said(capsys, "index", "run", "--remove", "images/a/../b/deep")
    assert "1 removed" in said(capsys, "index", "run", "--remove-class", "a")
    assert {entry.class_name for entry in ImageIndex.open("run/index").entries()} == {"b"}
    assert "must be in the index" in failure("index", "run", "--remove", "images/none.png")
    assert "needs images to add" in failure("index", "run")


def test_what_was_removed_stays_out_until_that_is_undone(workspace, capsys):
    said(capsys, "index", "run", "images")
    said(capsys, "index", "run", "--remove-class", "a")
    said(capsys, "index", "run", "--remove", "images/b/3.png")
    printed = said(capsys, "index", "run", "images")
    assert "0 added, 2 unchanged, 3 kept out, since they were removed before (--undo takes back" in printed
    printed = said(capsys, "index", "run", "images", "--undo")
    assert "undone: deleted 1 image\n" in printed
    assert "0 added, 3 unchanged, 2 kept out" in printed
    answer = json.loads(said(capsys, "index", "run", "--undo", "--json"))
    assert (answer["images"], answer["classes"], answer["kept_out"]) == (5, 2, 0)
    assert "there must be an edit to undo" in failure("index", "run", "--undo")
    assert "make no other one" in failure("index", "run", "--undo", "--remove-class", "a")


def test_classes_are_renamed_and_merged_and_search_says_so(workspace, model, capsys):
    said(capsys, "index", "run", "images")
    save_threshold(workspace / "run", 2.0, model)
    assert "renamed a to gull\n" in said(capsys, "index", "run", "--rename-class", "a", "gull")
    assert "known, gull, " in said(capsys, "search", "run", "images/a/1.png")
    assert "merge 'b' into it" in failure("index", "run", "--rename-class", "b", "gull")
    printed = said(capsys, "index", "run", "--merge-class", "b", "gull")
    assert "merged b into gull (3 images)\n" in printed
    assert "5 images of 1 classes" in printed
    printed = said(capsys, "search", "run", "images/b/3.png", "--class", "gull")
    assert "known, gull, 5 of 5" in printed
    assert "measured before classes were merged: pfml calibrate run measures again" in printed
    assert "0 added, 5 unchanged" in said(capsys, "index", "run", "images")
    said(capsys, "index", "run", "--undo")
    assert "measured before" not in said(capsys, "search", "run", "images/b/3.png")


def test_a_run_is_calibrated_with_the_classes_of_its_index(workspace, model, capsys):
    names = [f"{name}/{k}.png" for name in "abcdefgh" for k in range(8)]
    write_images(workspace / "more", names)
    said(capsys, "index", "run", "more")
    data = ("--data", "more", "--false-accept-rate=0.2")
    said(capsys, "calibrate", "run", *data)
    before = Threshold.load("run")
    unseen = set(before.class_names)
    assert len(unseen) > 4
    first, second, third, *_ = sorted(unseen)
    said(capsys, "index", "run", "--merge-class", first, second, "--remove-class", third)
    assert not before.measures(ImageIndex.open("run/index").edits)
    printed = said(capsys, "calibrate", "run", *data)
    assert "2 classes are renamed, merged or left out as in the index" in printed
    after = Threshold.load("run")
    assert set(after.class_names) == unseen - {first, third}
    assert after.measures(ImageIndex.open("run/index").edits)
    assert after.measured_on == (before.measured_on[0] - 8, before.measured_on[1] - 2)
    assert "measured before" not in said(capsys, "search", "run", "images/b/3.png")


def test_an_unseen_class_that_became_part_of_a_trained_one_is_not_calibrated_on(workspace, capsys):
    embedder = small_embedder()
    embedder.trained_on = TrainedOn("more", ("zebra",))
    embedder.save(workspace / "run")
    write_images(workspace / "more", [f"{name}/{k}.png" for name in "abcdefghi" for k in range(8)])
    write_images(workspace / "zoo", ["zebra/1.png"])
    said(capsys, "index", "run", "more")
    said(capsys, "index", "run", "zoo")
    said(capsys, "calibrate", "run", "--data", "more", "--false-accept-rate=0.2")
    unseen = Threshold.load("run").class_names
    said(capsys, "index", "run", "--merge-class", unseen[0], "zebra")
    said(capsys, "calibrate", "run", "--data", "more", "--false-accept-rate=0.2")
    assert Threshold.load("run").class_names == unseen[1:]


def test_a_run_is_calibrated_on_all_classes_that_it_has_not_seen(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
    config = small_config(epochs=1)
    run_config = RunConfig(
        **{**vars(config), "batch": BatchConfig(size=16, samples_per_class=4), "loss": LossConfig("pfml", {})},
        data=DataConfig("glyphs", validation="half"),
        model=small_embedder().config,
    )
    run(run_config, tmp_path / "run")
    printed = said(capsys, "calibrate", tmp_path / "run", "--false-accept-rate=0.2")
    threshold = Threshold.load(tmp_path / "run")
    assert threshold.false_accept_rate == 0.2
    assert threshold.data == "validation and test classes of glyphs"
    divided = with_validation(load_data("glyphs"), "half")
    assert threshold.measured_on[1] == divided.validation.num_classes + divided.test.num_classes
    assert f"threshold {threshold.scoring.name} {threshold.value:.4g}" in printed
    for name in CANDIDATES:
        accepted = f"  {name + ':':<14}accepts {threshold.compared[name]:.1%} of known images"
        assert (f"{accepted}, chosen" in printed) == (name == threshold.scoring.name)
        assert accepted in printed
    assert "combination is chosen unless another score accepts more than 1.5 times as many\n" in printed
    assert str(threshold.false_accepts) in printed
    assert str(threshold.false_rejects) in printed
    said(capsys, "calibrate", tmp_path / "run", "--data=glyphs", "--false-accept-rate=0.2", "--seed=3")
    other = Threshold.load(tmp_path / "run")
    assert other.data == "test classes of glyphs"
    assert other.value != threshold.value
    said(capsys, "calibrate", tmp_path / "run", "--data=glyphs", "--false-accept-rate=0.2", "--score=margin")
    assert Threshold.load(tmp_path / "run").scoring.name == "margin"
    untrained = save_model(tmp_path / "untrained")
    said(capsys, "calibrate", untrained, "--data=glyphs", "--false-accept-rate=0.2")
    everything = Threshold.load(untrained)
    assert everything.data == "train and test classes of glyphs"
    assert everything.measured_on[1] == divided.test.num_classes + load_data("glyphs").train.num_classes
    run(replace(run_config, loss=LossConfig("zero-shot")), tmp_path / "zero-shot")
    said(capsys, "calibrate", tmp_path / "zero-shot", "--false-accept-rate=0.2")
    of_run = Threshold.load(tmp_path / "zero-shot")
    assert of_run.data == "train, validation and test classes of glyphs", "it was trained on none of them"
    assert of_run.measured_on == everything.measured_on
    assert "does not say its data" in failure("calibrate", save_model(tmp_path / "model alone"))


def write_train_table(workspace, classes=6, images=5):
    """A table whose rows are all for training."""
    names = [f"new {k // images}/{k % images}.png" for k in range(classes * images)]
    write_images(workspace / "new", names)
    rows = [f"new/{name},{name.split('/')[0]},train" for name in names]
    (workspace / "new.csv").write_text("\n".join(["path,label,split", *rows]))


def test_a_table_for_training_alone_is_indexed_and_calibrated_on(workspace, capsys):
    write_train_table(workspace)
    assert "30 added" in said(capsys, "index", "run", "new.csv")
    assert ImageIndex.open("run/index").class_counts()["new 3"] == 5
    printed = said(capsys, "calibrate", "run", "--data=new.csv", "--false-accept-rate=0.2")
    assert "no row of new.csv is for testing: all of its 6 classes are taken" in printed
    threshold = Threshold.load("run")
    assert threshold.data == "all classes of new.csv"
    assert threshold.measured_on == (30, 6)


def test_a_table_of_classes_that_were_trained_on_is_no_calibration(workspace, capsys, model):
    write_train_table(workspace)
    model.save("run", trained_on=TrainedOn("csv", ("new 0", "new 1")))
    message = failure("calibrate", "run", "--data=new.csv", "--false-accept-rate=0.2")
    assert "the calibration classes must be unseen, but new 0, new 1 are also trained on" in message


def test_a_table_of_one_class_is_indexed(workspace, capsys):
    (workspace / "one.csv").write_text("path,label\nimages/a/1.png,a\nimages/a/2.png,a\n")
    assert "2 added" in said(capsys, "index", "run", "one.csv")
    (workspace / "one.csv").write_text("path,label\n")
    assert "one.csv must list an image at least" in failure("index", "run", "one.csv")
    assert len(ImageIndex.open("run/index")) == 2, "a table that lost its rows does not empty the index"


def test_calibration_leaves_out_what_cannot_be_read(workspace, capsys):
    write_train_table(workspace)
    (workspace / "new/new 2/1.png").write_text("no image")
    printed = said(capsys, "calibrate", "run", "--data=new.csv", "--false-accept-rate=0.2")
    assert "1 of 30 images cannot be read and is left out: new/new 2/1.png: is not an image" in printed


def test_a_threshold_that_calls_most_known_images_unknown_is_warned_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
    folder = save_model(tmp_path / "model")
    printed = said(capsys, "calibrate", folder, "--data=glyphs", "--false-accept-rate=0.05")
    rejects = Threshold.load(folder).false_rejects.value
    assert rejects > 0.5, "a model that has learned nothing"
    assert f"warning: {rejects:.0%} of known images would be called unknown" in printed
    assert "--false-accept-rate than 0.05" in printed
    printed = said(capsys, "calibrate", folder, "--data=glyphs", "--false-accept-rate=0.9")
    assert Threshold.load(folder).false_rejects.value < 0.5
    assert "warning" not in printed


def test_a_rate_that_was_not_kept_is_warned_of(workspace, capsys, monkeypatch):
    write_train_table(workspace)
    monkeypatch.setattr("pfml.search.threshold.MISSED", 0.0)
    printed = said(capsys, "calibrate", "run", "--data=new.csv", "--false-accept-rate=0.2")
    rate = Threshold.load("run").false_accepts
    assert rate.value > 0
    assert f"warning: {rate.value:.2%} of images of other classes were accepted" in printed
    assert "the asked 0.2" in printed
    monkeypatch.setattr("pfml.search.threshold.MISSED", 100.0)
    printed = said(capsys, "calibrate", "run", "--data=new.csv", "--false-accept-rate=0.2")
    assert rate.low <= 0.2 <= rate.high
    assert "of images of other classes were accepted" not in printed


def save_model(folder):
    small_embedder().save(folder)
    return folder


def test_calibration_takes_the_corrected_labels_of_the_run(workspace, capsys, monkeypatch):
    import pfml.search

    names = [f"{name}/{k}.png" for name in "pqrs" for k in range(6)]
    write_images(workspace / "photos", names)
    (workspace / "run/audit").mkdir()
    table = workspace / "run/audit/corrections.csv"
    table.write_text("image,given class,corrected class\np/0.png,p,q\nr/1.png,r,\n")
    model = small_embedder().config
    used = []

    def calibrate_known(embedder, data, **options):
        used.append([data.train.class_names[label] for label in data.train.labels.tolist()])
        return pfml.search.calibration.calibrate_known(embedder, data, **options)

    monkeypatch.setattr("pfml.search.calibrate_known", calibrate_known)
    for corrections in (None, table):
        data = DataConfig(str(workspace / "photos"), split="none", corrections=corrections)
        write_config(workspace / "run/config.yaml", RunConfig(data=data, model=model, loss=LossConfig("pfml", {})))
        printed = said(capsys, "calibrate", "run", "--false-accept-rate=0.2")
        remark = f"{table} gives 1 image another label and leaves 1 out"
        assert (remark in printed) == (corrections is not None)
    given, corrected = used
    assert {name: given.count(name) for name in "pqrs"} == {"p": 6, "q": 6, "r": 6, "s": 6}
    assert {name: corrected.count(name) for name in "pqrs"} == {"p": 5, "q": 7, "r": 5, "s": 6}
    assert Threshold.load("run").measured_on == (23, 4)


def test_approximate_search_is_built_by_index_used_by_search_and_both_say_so(workspace, capsys, monkeypatch):
    pytest.importorskip("faiss", reason="needs the extra faiss")
    monkeypatch.setattr("pfml.search.ivf.IVF_FROM", 5)
    assert "approximate search: 1 of 1 lists in int8, recall@10 1.000" in said(
        capsys, "index", "run", "images", "--approximate=int8"
    )
    assert "approximate search" not in said(capsys, "index", "run", "images")  # it is up to date
    printed = said(capsys, "search", "run", "images/b/3.png", "--k=1")
    assert "approximate search of 5 images: 1 of 1 lists in int8" in printed
    assert "3.png" in printed
    said(capsys, "index", "run", "--compact", "--approximate=no")
    assert "exact search of 5 images, since " in said(capsys, "search", "run", "images/b/3.png")
    assert "was made of another index" in failure("search", "run", "images/b/3.png", "--backend=ivf")
    assert "1 of 1 lists in float16" in said(capsys, "index", "run", "--approximate=float16")
    assert "approximate search of 5" not in said(capsys, "search", "run", "images/b/3.png", "--backend=exact")


def test_index_says_what_approximate_search_needs(workspace, capsys, monkeypatch):
    monkeypatch.setattr("pfml.search.ivf.IVF_FROM", 5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    assert "needs faiss: pip install 'pfml[faiss]'" in said(capsys, "index", "run", "images")
    assert "pip install 'pfml[faiss]'" in said(capsys, "search", "run", "images/b/3.png")
    assert "needs the package faiss" in failure("index", "run", "--approximate=pq4")
