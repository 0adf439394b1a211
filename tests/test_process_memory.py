"""Freed memory is kept for the next batch: embedding must not spend its time in page faults."""

import os
import platform
import subprocess
import sys

import pytest

from pfml import memory
from pfml.cli.commands import COMMANDS
from small_data import small_embedder
from small_index import write_images

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator can be told")

SETTINGS = (*memory.VARIABLES, "GLIBC_TUNABLES")

#: Embeds the same images in batches, as `pfml embed` does, and prints the page faults of an image once it is warm.
LIBRARY = """
import resource, sys, torch
from pfml import create_embedder, embed, ImageSet
from pfml.memory import keep_freed_memory

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    assert keep_freed_memory()
embedder = create_embedder("convnet", embedding_dim=8, image_size=160)
images = ImageSet.unlabeled(torch.zeros(96, 3, 160, 160, dtype=torch.uint8))
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
embed(embedder, images)
before = faults()
embed(embedder, images)
print((faults() - before) / len(images))
"""

#: A command, with the allocator as the command line leaves it or as it was; prints all page faults of the process.
COMMAND = """
import os, resource, sys, torch
import pfml.memory
from pfml.cli import main

torch.set_num_threads(1)
if sys.argv[1] == "as it was":
    pfml.memory.keep_freed_memory = lambda: False
os.chdir(sys.argv[2])
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
main(["embed", "run", "images", "--workers=1", "--batch-size=16", f"--out={sys.argv[1]}.npz"])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(program, choices, *arguments):
    """For each choice, the last line of what a program prints, as a number."""
    clean = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", program, choice, *map(str, arguments)],
            stdout=subprocess.PIPE,
            text=True,
            env=clean,
        )
        for choice in choices
    ]
    said = [process.communicate()[0] for process in begun]
    assert [process.returncode for process in begun] == [0] * len(begun)
    return [float(each.splitlines()[-1]) for each in said]


@needs_glibc
def test_an_image_costs_a_tenth_of_the_page_faults_where_freed_memory_is_kept():
    usual, kept = printed(LIBRARY, ("as it was", "kept"))
    assert usual > 100, "else there is nothing to gain, and this test shows nothing"
    assert kept < usual / 10


@needs_glibc
def test_a_command_keeps_freed_memory_by_itself(tmp_path):
    small_embedder(image_size=160).save(tmp_path / "run")
    write_images(tmp_path / "images", [f"{k}.png" for k in range(96)])
    usual, kept = printed(COMMAND, ("as it was", "kept"), tmp_path)
    assert kept < usual / 2


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
