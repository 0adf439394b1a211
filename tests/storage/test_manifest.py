"""A manifest is read back as it was written; another kind, version or value is an error that says which."""

import json

import pytest

from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import Format, FormatVersionError, read_manifest, sealed

FORM = Format("a basket", 3, "weave it again")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "basket.json"
    path.write_text(json.dumps(sealed({"apples": 4, "sizes": (1, 2)}, FORM)))
    return path


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_was_written_is_read(path):
    assert read_manifest(path, FORM) == {"apples": 4, "sizes": [1, 2]}


@pytest.mark.parametrize("changes", [{"apples": 5}, {"pears": 1}, {"manifest_sha256": "0" * 64}])
def test_a_value_that_was_changed_is_damage(path, changes):
    edit(path, **changes)
    with pytest.raises(DamagedFileError, match=r"basket\.json does not match its own checksum"):
        read_manifest(path, FORM)


def test_another_version_is_named_with_the_remedy(path):
    newer = Format(FORM.kind, 4, FORM.remedy)
    with pytest.raises(FormatVersionError, match="format version 4, got version 3: .*or weave it again"):
        read_manifest(path, newer)


def test_another_kind_is_named(path):
    with pytest.raises(DamagedFileError, match="got the kind 'a basket'"):
        read_manifest(path, Format("a bag", 3, "sew it again"))
