"""The parsers of files that we define, fed with what hypothesis makes of whole files; bounded in time.

For each kind of `file_kinds`: bytes are flipped, cut, inserted and exchanged. For manifests, values are exchanged too
and the checksum is made right again, as somebody would do who means it: what is read then is a value, or it is refused.
"""

import copy
import json
import os
import warnings

import pytest
from file_kinds import FILE_KINDS, KINDS, comparable
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import digest_of

#: Examples per kind: few in the usual run, more with PFML_FUZZ_EXAMPLES=1000.
EXAMPLES = int(os.environ.get("PFML_FUZZ_EXAMPLES", "20"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
#: Files whose format is ours, or a person's by our rules; other formats are the business of their libraries.
OURS = [
    kind for kind in FILE_KINDS if kind.name not in ("PNG image", "JPEG image", "Cars list", "weight file, PyTorch")
]

edits = st.lists(
    st.tuples(st.sampled_from(["flip", "cut", "insert", "remove", "copy"]), st.floats(0, 1), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)


def edited(content, changes):
    for what, where, extra in changes:
        at = int(where * max(len(content) - 1, 0))
        match what:
            case "flip":
                content = (
                    content[:at] + bytes([content[at] ^ (extra[0] if extra else 1)]) + content[at + 1 :]
                    if content
                    else b""
                )
            case "cut":
                content = content[:at]
            case "insert":
                content = content[:at] + extra + content[at:]
            case "remove":
                content = content[:at] + content[at + len(extra) :]
            case "copy":
                content = content[:at] + content[at // 2 : at] + content[at:]
    return content


def outcome(kind, path):
    """What is read, or None if the file is refused by name; anything else is a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return comparable(kind.read(path))
        except (ValueError, OSError) as error:
            assert path.name in str(error) or path.parent.name in str(error), f"{type(error).__name__}: {error}"
            return None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Kind -> path, content and meaning of a whole file, made once."""
    made = {}

    def get(kind):
        if kind.name not in made:
            path = kind.make(tmp_path_factory.mktemp("fuzz"))
            made[kind.name] = path, path.read_bytes(), comparable(kind.read(path))
        return made[kind.name]

    return get


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.name)
def test_edited_bytes_are_refused_by_name_or_read_as_a_value(kind, whole):
    path, content, expected = whole(kind)

    @FUZZ
    @given(changes=edits)
    def check(changes):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(edited(content, changes))
        found = outcome(kind, path)
        if kind.sealed:
            assert found in (None, expected)

    try:
        check()
    finally:
        path.write_bytes(content)


SEALED_JSON = [
    KINDS[f"{name}"]
    for name in ("checkpoint manifest", "model manifest", "loss manifest", "index manifest", "threshold")
]

#: All of Unicode would cost hypothesis a second at its first use.
some_text = st.text(st.sampled_from("aZ09 ._-/\\\"'{}[]:,\n\t\0\x1b\u00e9\u4e2d\u2028\ufeff\U0001f600"), max_size=12)
strange = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    some_text,
    st.sampled_from(["../../etc/passwd", "/etc/passwd", "", "\0", "-1"]),
    st.lists(st.integers(-3, 3), max_size=3),
    st.dictionaries(some_text, st.integers(-3, 3), max_size=2),
)


def paths_into(value, path=()):
    """All paths into nested dicts and lists."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from paths_into(one, (*path, key))


def changed(manifest, path, value):
    manifest = copy.deepcopy(manifest)
    parent = manifest
    for key in path[:-1]:
        parent = parent[key]
    if value == "remove" and isinstance(parent, dict):
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return manifest


@pytest.mark.parametrize("kind", SEALED_JSON, ids=lambda kind: kind.name)
def test_a_tampered_manifest_with_a_right_checksum_is_refused_in_words_or_read(kind, whole):
    path, content, _ = whole(kind)
    manifest = json.loads(content)
    del manifest["manifest_sha256"]
    choices = [path for path in paths_into(manifest) if path]

    @FUZZ
    @given(where=st.sampled_from(choices), value=st.one_of(strange, st.just("remove")))
    def check(where, value):
        tampered = changed(manifest, where, value)
        path.write_text(json.dumps({**tampered, "manifest_sha256": digest_of(tampered)}))
        try:
            kind.read(path)
        except DamagedFileError as error:
            assert path.parent.name in str(error) or path.name in str(error)
        except (ValueError, OSError, ImportError):
            pass  # a value that another part of pfml refuses in words: an unknown backbone, a method, a size

    try:
        check()
    finally:
        path.write_bytes(content)
