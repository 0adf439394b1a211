"""A damaged, exchanged or hostile file of every kind: refused by name, nothing executed, nothing lost, in seconds."""

import json
import os
import pickle
import signal
import struct
import time
import warnings
from contextlib import contextmanager

import pytest
from file_kinds import FILE_KINDS, KINDS, comparable

from pfml.storage.manifest import digest_of

#: what may be raised: a ValueError (DamagedFileError, ImageError) or an OSError with a sentence
REFUSALS = (ValueError, OSError)
#: CPU time; a tenth is usual, and a file that makes a parser expand or backtrack takes minutes.
SECONDS = 10.0


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def flipped(where):
    def damage(content, marker):
        changed = bytearray(content)
        changed[int(where * (len(content) - 1))] ^= 0x10
        return bytes(changed)

    return damage


def cut(share):
    return lambda content, marker: content[: int(share * len(content))]


#: What happens to a file: content and a path that hostile code would write to -> the new content.
DAMAGES = {
    "empty": lambda content, marker: b"",
    "cut after a quarter": cut(0.25),
    "cut in the middle": cut(0.5),
    "cut before the end": cut(0.98),
    "first byte flipped": flipped(0.0),
    "byte flipped near the start": flipped(0.02),
    "byte flipped in the middle": flipped(0.5),
    "byte flipped near the end": flipped(0.97),
    "last byte flipped": flipped(1.0),
    "zeros": lambda content, marker: bytes(len(content)),
    "bytes that are no text": lambda content, marker: (
        content[: len(content) // 2] + b"\xff\xfe\x00\x80" + content[-40:]
    ),
    "text": lambda content, marker: b"nothing of the kind\n",
    "pickle": lambda content, marker: pickle.dumps(Payload(marker)),
    "deep nesting": lambda content, marker: b"[" * 100_000,
    "deep nesting of names": lambda content, marker: b'{"a":' * 100_000,
    "huge header": lambda content, marker: struct.pack("<Q", 2**62) + content[8:],
    "huge number": lambda content, marker: b'{"format_version": ' + b"9" * 5000 + b"}",
    "long line": lambda content, marker: content.split(b"\n")[0] + b"\n" + b"x" * 300_000 + b"\n",
    "YAML that makes an object": lambda content, marker: (
        f'data: !!python/object/apply:os.mkdir ["{marker}"]\n'.encode()
    ),
    "YAML bomb": lambda content, marker: _yaml_bomb(),
    "repeated": lambda content, marker: content + content,
}


def _yaml_bomb():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 9)}]" for k in range(1, 12)]
    return ("\n".join(lines) + "\ndata: {name: *a11}\nmodel: *a11\n").encode()


def files_of(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def made(tmp_path):
    """A function that makes the files of a kind: the file, and what a whole one reads as."""

    def make(kind):
        path = kind.make(tmp_path)
        expected = comparable(kind.read(path))
        return path, expected

    return make


class TooSlowError(Exception):
    """Reading did not come to an end."""


@contextmanager
def at_most(seconds):
    """TooSlowError after so many seconds, so that a file which takes all memory does not get it."""

    def stop(*_):
        raise TooSlowError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(kind, path):
    """("refused", message), ("read", value) and all warnings; anything else is raised."""
    with at_most(5), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            result = "read", comparable(kind.read(path))
        except REFUSALS as error:
            result = "refused", str(error)
    said = [str(one.message) for one in caught if not issubclass(one.category, ResourceWarning)]
    return (*result, " ".join(said))


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_a_whole_file_is_read_twice_alike(kind, made):
    path, expected = made(kind)
    assert outcome_of(kind, path) == ("read", expected, "")


@pytest.mark.parametrize("kind", FILE_KINDS, ids=lambda kind: kind.name)
def test_a_damaged_file_is_refused_by_name_and_nothing_is_run_or_lost(kind, made, tmp_path):
    path, expected = made(kind)
    content, marker = path.read_bytes(), tmp_path / "marker of hostile code"
    failures = []
    for damage, changed in DAMAGES.items():
        path.write_bytes(changed(content, marker))
        before = files_of(tmp_path)
        start = time.process_time()
        try:
            answer, value, warned = outcome_of(kind, path)
        except Exception as error:
            failures.append(f"{damage}: {type(error).__name__}: {str(error)[:150]}")
            continue
        seconds = time.process_time() - start
        if seconds > SECONDS:
            failures.append(f"{damage}: took {seconds:.1f} s")
        if marker.exists():
            failures.append(f"{damage}: code was run")
            marker.rmdir()
        failures += [f"{damage}: {fault}" for fault in faults_of(kind, path, answer, value, warned, expected)]
        if kind.remedy != "rebuilt" and files_of(tmp_path) != before:
            failures.append(f"{damage}: reading changed files")
    assert not failures, "\n".join(failures)


def faults_of(kind, path, answer, value, warned, expected):
    """What is wrong about how a damaged file was answered."""
    if answer == "refused":
        if kind.remedy != "refused":
            yield f"must be {kind.remedy}, was refused: {value[:150]}"
        elif path.name not in value and path.parent.name not in value:
            yield f"must be refused by the name {path.name}, got: {value[:150]}"
    elif kind.remedy == "rebuilt":
        if value != expected:
            yield "what was read is not what was written"
    elif kind.sealed and value != expected:
        yield "what was read is not what was written"
    elif kind.remedy == "ignored":
        yield from lost_lines(path, value, warned, expected)


def lost_lines(path, value, warned, expected):
    """Lines that are still whole but were not read, and others that were passed over in silence."""
    lines = path.read_bytes().split(b"\n")
    whole = [one for one in expected if any(parsed(line) == one for line in lines[:-1])]
    if any(one not in value for one in whole):
        yield "whole lines were not read"
    strange = [line for line in lines[:-1] if line.strip() and parsed(line) not in value]
    if strange and path.name not in warned:
        yield f"lines were passed over without a warning that names {path.name}"


def parsed(line):
    try:
        entry = json.loads(line)
        rest = {name: value for name, value in entry.items() if name != "sha256"} if isinstance(entry, dict) else {}
        is_sealed = isinstance(entry, dict) and entry.get("sha256") == digest_of(rest)[:16]
        return rest if is_sealed else entry
    except (ValueError, RecursionError):
        return None


def test_the_table_has_every_kind_that_the_project_promises():
    promised = (
        "checkpoint manifest, checkpoint tensors, model manifest, model weights, model bundle archive, index manifest, "
        "index shard, configuration, data table, noise list, corrections list, decisions list, threshold, "
        "results store, pixel cache manifest, pixel cache pixels, PNG image"
    )
    assert set(promised.split(", ")) <= set(KINDS)


#: a run may have no threshold, so that a missing one is none; images of a missing shard count as not yet embedded
MAY_BE_MISSING = ("threshold", "embedded shard")
NEEDED = [kind for kind in FILE_KINDS if kind.sealed and kind.name not in MAY_BE_MISSING]


@pytest.mark.parametrize("kind", NEEDED, ids=lambda kind: kind.name)
def test_a_file_that_is_missing_is_named(kind, made):
    path, expected = made(kind)
    path.unlink()
    answer, value, _warned = outcome_of(kind, path)
    if kind.remedy == "rebuilt":
        assert (answer, value) == ("read", expected)
    else:
        assert answer == "refused"
        assert path.name in value or path.parent.name in value


def test_json_is_written_as_others_can_read_it(tmp_path):
    """No NaN and no Infinity in what we write: JSON has neither."""
    foreign = []
    for name in ("checkpoint manifest", "model manifest", "index manifest", "threshold"):
        folder = tmp_path / name
        folder.mkdir()
        json.loads(KINDS[name].make(folder).read_text(), parse_constant=foreign.append)
    assert foreign == []
