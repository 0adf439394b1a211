"""Freed memory is kept for the next batch: embedding must not spend its time in page faults."""

import os
import platform
import resource

import pytest
import torch

from pfml import memory
from pfml.cli import main
from pfml.cli.commands import COMMANDS
from pfml.data import ImageSet
from pfml.evaluation import embed
from processes import CONTEXT
from small_data import small_embedder
from small_index import write_images

SETTINGS = (*memory.VARIABLES, "GLIBC_TUNABLES")


def page_faults_of_an_image(embedder, images):
    """The page faults that embedding takes once it is warm."""
    for _ in range(2):
        embed(embedder, images, batch_size=16)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    embed(embedder, images, batch_size=16)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / len(images)


def before_and_after_a_command(folder, answers):
    """Embed in a process with glibc's own settings, run a command in it, and embed again."""
    for name in SETTINGS:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    embedder = small_embedder(image_size=160)
    images = ImageSet.unlabeled(torch.zeros(64, 3, 160, 160, dtype=torch.uint8))
    usual = page_faults_of_an_image(embedder, images)
    embedder.save(folder / "run")
    write_images(folder / "images", ["0.png"])
    main(["embed", str(folder / "run"), str(folder / "images"), f"--out={folder / 'one.npz'}"])
    answers.put((usual, page_faults_of_an_image(embedder, images)))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")
@pytest.mark.skipif(any(name in os.environ for name in SETTINGS), reason="glibc read these settings at its start")
def test_a_command_keeps_freed_memory_and_an_image_costs_a_tenth_of_the_page_faults(tmp_path):
    answers = CONTEXT.SimpleQueue()
    process = CONTEXT.Process(target=before_and_after_a_command, args=(tmp_path, answers))
    process.start()
    process.join()
    assert process.exitcode == 0
    usual, kept = answers.get()
    assert usual > 100, "else there is nothing to gain, and this test shows nothing"
    assert kept < usual / 10


class Recorder:
    """A mallopt that notes what it is told, and refuses some of it."""

    def __init__(self, refused=()):
        self.refused, self.told = refused, {}

    def __call__(self, parameter, value):
        if parameter in self.refused:
            return 0
        self.told[parameter] = value
        return 1


@pytest.fixture
def clean(monkeypatch):
    """No settings in the environment."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_an_older_glibc_is_told_to_map_nothing_at_all(clean):
    old = Recorder(refused={memory.M_MMAP_THRESHOLD})
    clean.setattr(memory, "_mallopt", lambda: old)
    assert memory.keep_freed_memory()
    assert old.told[memory.M_MMAP_MAX] == 0
    assert old.told[memory.M_TRIM_THRESHOLD] == -1


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_environment_stay(clean, name):
    clean.setenv(name, "glibc.malloc.top_pad=1" if name == "GLIBC_TUNABLES" else "131072")
    told = Recorder()
    clean.setattr(memory, "_mallopt", lambda: told)
    assert not memory.keep_freed_memory()
    assert not told.told


def test_another_c_library_is_left_alone(clean):
    clean.setattr(memory, "_mallopt", lambda: None)
    assert not memory.keep_freed_memory()


def test_a_server_gives_a_peak_back():
    assert [name for name, command in COMMANDS.items() if not command.keeps_memory] == ["serve"]
