"""Suspects for Label Studio and FiftyOne, and decisions back."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from test_audit import clusters

from pfml.audit import audit, corrections_of, read_exported, write_fiftyone, write_label_studio
from pfml.data import ImageSet


@pytest.fixture
def judged(tmp_path):
    points, images, true = clusters()
    names = ("a & b", *images.class_names[1:])
    paths = tuple(tmp_path / "photos" / names[k] / f"{n} 1.png" for n, k in enumerate(images.labels.tolist()))
    return audit(points, ImageSet(paths, images.labels, names), true_labels=true)


def annotated(tasks, choices):
    """The export of Label Studio after these choices, by number of the task."""
    for number, chosen in choices.items():
        results = [{"type": "choices", "value": {"choices": [name]}} for name in chosen]
        tasks[number]["annotations"] = [
            {"result": [result], "was_cancelled": False, "updated_at": f"2026-01-0{k}"}
            for k, result in enumerate(results)
        ]
    return tasks


def test_tasks_have_the_image_and_the_suggested_class(judged, tmp_path):
    suspects = judged.suspects(judged.ranked(5))
    path, folder = write_label_studio(tmp_path / "out", judged, suspects)
    tasks = json.loads(path.read_text())
    for task, one in zip(tasks, suspects, strict=True):
        place = parse_qs(urlparse(task["data"]["image"]).query)["d"][0]
        assert folder.parent / place == Path(one.image)
        assert (task["data"]["given"], task["data"]["suggested"]) == (one.given, one.suggested)
        (prediction,) = task["predictions"]
        assert prediction["score"] == one.confidence
        assert prediction["result"][0]["value"] == {"choices": [one.suggested]}
    assert folder == tmp_path / "photos", "a storage must lie inside the document root and hold all images"
    interface = ElementTree.parse(path.with_suffix(".xml"))
    assert [each.get("value") for each in interface.iter("Choice")] == [*judged.images.class_names, "(leave out)"]
    (choices,) = interface.iter("Choices")
    assert (choices.get("name"), choices.get("toName")) == ("label", "image")


def test_choices_are_decisions(judged, tmp_path):
    suspects = judged.suspects(judged.ranked(6))
    path, _ = write_label_studio(tmp_path / "out", judged, suspects)
    first, second, third, _, fifth, sixth = suspects
    other = next(name for name in judged.images.class_names if name not in (third.given, third.suggested))
    chosen = {0: [first.suggested], 1: [second.given], 2: [third.suggested, other], 4: ["(leave out)"]}
    tasks = annotated(json.loads(path.read_text()), chosen)
    tasks[5]["annotations"] = [{"result": [{"value": {"choices": [other]}}], "was_cancelled": True}]
    export = tmp_path / "export.json"
    export.write_text(json.dumps(tasks))
    assert read_exported(export) == [
        (first.image, "accept", first.suggested),
        (second.image, "reject", second.given),
        (third.image, "relabel", other),
        (fifth.image, "drop", ""),
    ]
    labels = corrections_of(judged, policy="keep", decisions=export).labels
    names = judged.images.class_names
    assert labels == {first.index: names.index(first.suggested), third.index: names.index(other), fifth.index: None}
    assert sixth.index not in labels


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "must be a JSON export of Label Studio"),
        ("{}", "or the samples.json of FiftyOne, got dict"),
        ('{"samples": [{"filepath": "a.png"}]}', "sample 1 must have path, given and ground_truth"),
        ('[{"image": "a.png"}]', "task 1 must have path, given and suggested in its data"),
    ],
)
def test_what_is_no_export_is_refused(tmp_path, content, message):
    (tmp_path / "export.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_exported(tmp_path / "export.json")


def test_samples_have_both_classes(judged, tmp_path):
    suspects = judged.suspects(judged.ranked(4))
    folder = write_fiftyone(tmp_path / "out", judged, suspects)
    samples = json.loads((folder / "samples.json").read_text())["samples"]
    assert [sample["filepath"] for sample in samples] == [one.image for one in suspects]
    assert samples[0]["ground_truth"] == {"_cls": "Classification", "label": suspects[0].given}
    assert samples[0]["suggested"]["label"] == suspects[0].suggested
    assert samples[0]["suggested"]["confidence"] == suspects[0].confidence
    metadata = json.loads((folder / "metadata.json").read_text())
    assert "version" not in metadata, "without one FiftyOne reads plain samples"
    assert metadata["media_type"] == "image"
    assert metadata["info"] == {"default_classes": [*judged.images.class_names]}


def test_tags_and_changed_classes_of_fiftyone_are_decisions(judged, tmp_path):
    suspects = judged.suspects(judged.ranked(6))
    folder = write_fiftyone(tmp_path / "out", judged, suspects)
    content = json.loads((folder / "samples.json").read_text())
    first, second, third, fourth, fifth, _ = suspects
    for sample, tag in zip(content["samples"], ("accept", "drop", "reject"), strict=False):
        sample["tags"].append(tag)
        sample["filepath"] = f"data/{Path(sample['filepath']).name}"  # as an export with its images has it
    other = next(name for name in judged.images.class_names if name not in (fourth.given, fourth.suggested))
    content["samples"][3]["ground_truth"] = {"_id": {"$oid": "6afc"}, "_cls": "Classification", "label": other}
    content["samples"][4]["ground_truth"] = None
    (tmp_path / "samples.json").write_text(json.dumps(content))
    assert read_exported(tmp_path / "samples.json") == [
        (first.image, "accept", first.suggested),
        (second.image, "drop", ""),
        (third.image, "reject", ""),
        (fourth.image, "relabel", other),
    ]
    names = judged.images.class_names
    labels = corrections_of(judged, policy="keep", decisions=tmp_path / "samples.json").labels
    assert labels == {first.index: names.index(first.suggested), second.index: None, fourth.index: names.index(other)}
    assert fifth.index not in labels, "it stays undecided"


def test_pixels_cannot_be_handed_over(tmp_path):
    points, images, _ = clusters()
    found = audit(points, images)
    for write in (write_label_studio, write_fiftyone):
        with pytest.raises(ValueError, match="needs images that are files"):
            write(tmp_path, found, [])
