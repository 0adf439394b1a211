"""Suspects for other tools, and their decisions back: Label Studio and FiftyOne, by plain JSON files.

Label Studio reads label-studio.json (tasks with the suggested class as a prediction) and label-studio.xml (the labeling
interface). FiftyOne reads the folder fiftyone as a `LegacyFiftyOneDataset`. The JSON export of Label Studio, and the
samples.json that FiftyOne exports, have decisions for `pfml audit --decisions`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote
from xml.sax.saxutils import quoteattr

from pfml.audit.suspects import Audit, Suspect
from pfml.storage.files import named_errors, write_atomically

__all__ = ["read_exported", "write_fiftyone", "write_label_studio"]

#: The choice that leaves an image out.
LEAVE_OUT = "(leave out)"
#: The tags of a sample of FiftyOne that decide about it.
TAGS = ("accept", "reject", "drop")


def write_label_studio(folder: Path, audit: Audit, suspects: Sequence[Suspect]) -> tuple[Path, Path]:
    """Write label-studio.json and label-studio.xml to `folder`; returns the first and the folder of all images.

    Images are addressed as local files. The parent of their folder must be Label Studio's document root
    (LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT), and the folder a source storage of the project: Label Studio serves no
    other.
    """
    files, images = _files(audit, "Label Studio")
    tasks = []
    for one in suspects:
        place = files[one.index].relative_to(images.parent).as_posix()
        tasks.append(
            {
                "data": {
                    "image": f"/data/local-files/?d={quote(place)}",
                    "path": one.image,
                    "part": one.part,
                    "given": one.given,
                    "suggested": one.suggested,
                },
                "predictions": [
                    {
                        "model_version": "pfml audit",
                        "score": one.confidence,
                        "result": [
                            {
                                "id": f"suggested-{one.index}",
                                "from_name": "label",
                                "to_name": "image",
                                "type": "choices",
                                "value": {"choices": [one.suggested]},
                            }
                        ],
                    }
                ],
            }
        )
    choices = "".join(f"    <Choice value={quoteattr(name)}/>\n" for name in (*audit.images.class_names, LEAVE_OUT))
    interface = (
        '<View>\n  <Image name="image" value="$image"/>\n  <Text name="given" value="given: $given"/>\n'
        f'  <Choices name="label" toName="image" choice="single" required="true">\n{choices}  </Choices>\n</View>\n'
    )
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "label-studio.json", tasks)
    write_atomically(folder / "label-studio.xml", interface.encode(errors="replace"))
    return folder / "label-studio.json", images


def read_exported(path: Path) -> list[tuple[str, str, str]]:
    """Path, decision and label of each decision in an export of Label Studio (JSON) or of FiftyOne (samples.json)."""
    path = Path(path)
    what = "a JSON export of Label Studio, or the samples.json of FiftyOne"
    with named_errors(path, what, json.JSONDecodeError, UnicodeDecodeError):
        content = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(content, dict) and isinstance(content.get("samples"), list):
        return _of_fiftyone(path, content["samples"])
    if not isinstance(content, list):
        raise ValueError(f"{path} must be {what}, got {type(content).__name__}")
    return _of_label_studio(path, content)


def _of_fiftyone(path: Path, samples: Sequence[Any]) -> list[tuple[str, str, str]]:
    """By the last of the tags accept, reject, drop; without one, another class as ground_truth is relabel."""
    found = []
    for number, sample in enumerate(samples, 1):
        if not isinstance(sample, dict) or not {"path", "given", "ground_truth"} <= sample.keys():
            raise ValueError(
                f"{path}, sample {number} must have path, given and ground_truth, as pfml audit --to fiftyone writes "
                f"them: export the whole data set"
            )
        tags = [tag for tag in sample.get("tags") or () if tag in TAGS]
        label = str((sample["ground_truth"] or {}).get("label") or sample["given"])
        if tags:
            suggested = str((sample.get("suggested") or {}).get("label") or "")
            found.append((str(sample["path"]), tags[-1], suggested if tags[-1] == "accept" else ""))
        elif label != sample["given"]:
            found.append((str(sample["path"]), "relabel", label))
    return found


def _of_label_studio(path: Path, tasks: Sequence[Any]) -> list[tuple[str, str, str]]:
    """Of each annotated task; the latest annotation counts.

    A choice of the given class is reject, of the suggested one accept, of another one relabel, of "(leave out)" drop.
    """
    found = []
    for number, task in enumerate(tasks, 1):
        data = task.get("data") if isinstance(task, dict) else None
        if not isinstance(data, dict) or not {"path", "given", "suggested"} <= data.keys():
            raise ValueError(
                f"{path}, task {number} must have path, given and suggested in its data, as pfml audit writes them: "
                f"export as JSON, not as JSON-MIN"
            )
        choice = _choice(task.get("annotations") or ())
        if choice is None:
            continue
        decision = {LEAVE_OUT: "drop", data["given"]: "reject", data["suggested"]: "accept"}.get(choice, "relabel")
        found.append((str(data["path"]), decision, "" if decision == "drop" else choice))
    return found


def _choice(annotations: Sequence[dict[str, Any]]) -> str | None:
    """The class that the latest annotation chooses; None if there is none."""
    done = [each for each in annotations if not each.get("was_cancelled")]
    for each in sorted(done, key=lambda one: str(one.get("updated_at", "")), reverse=True):
        for result in each.get("result") or ():
            choices = (result.get("value") or {}).get("choices") or ()
            if choices:
                return str(choices[0])
    return None


def write_fiftyone(folder: Path, audit: Audit, suspects: Sequence[Suspect]) -> Path:
    """Write the suspects as a data set of FiftyOne, metadata.json and samples.json in `folder`/fiftyone; returns that.

    Each sample has its given class as ground_truth, which a person may change, and as given, the suggested one with its
    probability as suggested, its name as path, and its part as a tag:
    `fiftyone.Dataset.from_dir(folder, dataset_type=fiftyone.types.LegacyFiftyOneDataset)`.
    """
    files, _ = _files(audit, "FiftyOne")
    samples = [
        {
            "filepath": str(files[one.index]),
            "path": one.image,
            "tags": [one.part] if one.part else [],
            "given": one.given,
            "ground_truth": {"_cls": "Classification", "label": one.given},
            "suggested": {"_cls": "Classification", "label": one.suggested, "confidence": one.confidence},
            "score": one.score,
        }
        for one in suspects
    ]
    target = folder / "fiftyone"
    target.mkdir(parents=True, exist_ok=True)
    classes = {"default_classes": list(audit.images.class_names)}
    _write_json(target / "metadata.json", {"name": "pfml audit", "media_type": "image", "info": classes})
    _write_json(target / "samples.json", {"samples": samples})
    return target


def _files(audit: Audit, tool: str) -> tuple[list[Path], Path]:
    """The files of all images and the folder that all share."""
    if not isinstance(audit.images.images, tuple):
        raise ValueError(f"{tool} needs images that are files, and these are pixels in memory: leave out --to")
    files = [path.absolute() for path in audit.images.images]
    return files, Path(os.path.commonpath([path.parent for path in files]))


def _write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=True) + "\n").encode())
