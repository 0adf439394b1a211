"""What a release needs beside the package: metadata, the source archive, the workflow, forms, the citation."""

import re
import subprocess
import sys
import tarfile
import tomllib
from email import message_from_string
from pathlib import Path

import pytest
import yaml

from pfml.version import __version__

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CLASSIFIERS = PYPROJECT["project"]["classifiers"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
GITHUB = ROOT / ".github"
FORMS = sorted(path for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml")
#: The parts of an issue form, as the host knows them.
PARTS = {"checkboxes", "dropdown", "input", "markdown", "textarea"}
#: What a Citation File Format 1.2.0 file and a reference in it must have.
CITATION_NEEDS = {"authors", "cff-version", "message", "title"}
REFERENCE_NEEDS = {"authors", "title", "type"}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


WORKFLOW = read(GITHUB / "workflows" / "ci.yml")
JOBS = WORKFLOW["jobs"]
STEPS = [step for job in JOBS.values() for step in job["steps"]]


def targets():
    """The phony targets of the Makefile that have a rule."""
    [phony] = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    rules = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    return set(phony.split()) & rules


def supported():
    """The versions of Python of the classifiers, such as "3.11"."""
    return [one.rpartition(" ")[2] for one in CLASSIFIERS if re.search(r"Python :: 3\.\d+$", one)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The names and the metadata of the source archive that the declared backend builds here, offline."""
    out = tmp_path_factory.mktemp("dist")
    program = "import sys, hatchling.build; hatchling.build.build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(out / f"pfml-{__version__}.tar.gz") as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
        metadata = opened.extractfile(f"pfml-{__version__}/PKG-INFO").read().decode()
    return names, message_from_string(metadata)


def test_the_source_archive_holds_the_files_of_the_repository_and_no_others(archive):
    names, _ = archive
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    untracked = ["git", "ls-files", "--others", "--exclude-standard"]
    new = subprocess.run(untracked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    tracked = set(listed.stdout.splitlines()) - {".gitattributes"}
    assert sorted(tracked - names) == []
    assert sorted(names - tracked - set(new) - {"PKG-INFO"}) == []


def test_the_metadata_says_what_an_index_asks_for(archive):
    _, metadata = archive
    assert metadata["Metadata-Version"] == "2.4"
    assert metadata["Name"] == "pfml"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "MIT"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload().startswith("# pfml")
    assert metadata["Requires-Python"] == f">={supported()[0]}"


def test_classifiers_name_the_system_and_every_python_that_is_tested():
    assert "Operating System :: POSIX :: Linux" in CLASSIFIERS
    assert sorted(set(CLASSIFIERS)) == CLASSIFIERS
    assert not [one for one in CLASSIFIERS if one.startswith("License ::")], "the license expression replaces them"
    assert supported() == JOBS["test"]["strategy"]["matrix"]["python-version"]


def test_the_workflow_calls_only_make_targets_that_exist():
    called = [step["run"] for step in STEPS if "run" in step]
    assert all(re.fullmatch(r"make [\w-]+", one) for one in called), called
    asked = {one.split()[1] for one in called}
    assert asked - targets() == set()
    assert {"lint", "test", "test-floor"} <= asked


def test_the_workflow_uses_two_actions_by_version_and_may_only_read():
    used = {step["uses"] for step in STEPS if "uses" in step}
    assert {re.fullmatch(r"(actions/[\w-]+)@v\d+", one)[1] for one in used} == {
        "actions/checkout",
        "actions/setup-python",
    }
    assert len(used) == 2, "one version of each"
    assert WORKFLOW["permissions"] == {"contents": "read"}
    assert {"push", "pull_request"} == WORKFLOW[True].keys()  # YAML 1.1 reads the key "on" as true
    for name, job in JOBS.items():
        assert job.keys() >= {"runs-on", "timeout-minutes", "steps"}, name
        assert all(("run" in step) != ("uses" in step) for step in job["steps"]), name
        known = {f"matrix.{key}" for key in job.get("strategy", {}).get("matrix", {})}
        assert set(re.findall(r"\$\{\{ (.*?) \}\}", yaml.safe_dump(job))) <= known, name


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_is_one_that_the_host_accepts(form):
    content = read(form)
    assert content["name"]
    assert content["description"]
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in content["body"]} <= PARTS
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)
    assert any(part.get("validations", {}).get("required") for part in fields)


def test_there_is_a_form_for_bugs_questions_and_features():
    assert [form.stem for form in FORMS] == ["bug", "feature", "question"]
    assert read(GITHUB / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": False}


def test_the_pull_request_template_names_targets_and_files_that_exist():
    text = (GITHUB / "pull_request_template.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`make ([\w-]+)`", text)) <= targets()
    named = re.findall(r"\b(?:docs/)?[A-Z]+\.md\b", text)
    assert named
    assert all((ROOT / name).exists() for name in named)


def test_the_citation_is_of_this_version_and_prefers_the_paper():
    citation = read(ROOT / "CITATION.cff")
    assert citation.keys() >= CITATION_NEEDS
    assert citation["cff-version"] == "1.2.0"
    assert citation["type"] == "software"
    assert citation["version"] == __version__
    assert citation["license"] == PYPROJECT["project"]["license"]
    paper = citation["preferred-citation"]
    assert paper.keys() >= REFERENCE_NEEDS
    assert paper["type"] == "conference-paper"
    assert paper["title"] == "Potential Field Based Deep Metric Learning"
    assert [one["family-names"] for one in paper["authors"]] == ["Bhatnagar", "Ahuja"]
    assert paper["year"] == 2025
    assert "CVPR" in paper["conference"]["name"]


def test_the_changelog_has_a_section_of_this_version():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(__version__)}\b", text, re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/START.md"])
def test_the_wheel_is_named_with_this_version(page):
    assert re.findall(r"\bpfml-([\d.]+)-py3", (ROOT / page).read_text(encoding="utf-8")) == [__version__]
