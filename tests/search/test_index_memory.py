"""An index stays in its files: memory does not grow with its vectors."""

import subprocess
import sys
from pathlib import Path

import pytest

#: Prints how many MiB of memory that no file backs are added by writing and by opening an index of 160 MiB.
PROGRAM = """
import re, sys, torch
from pfml.search import ImageIndex, ModelIdentity

torch.set_num_threads(1)
model = ModelIdentity("0" * 64)
anonymous = lambda: int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
begin = anonymous()
if sys.argv[2] == "write":
    index = ImageIndex.create(sys.argv[1], model, 512)
    for part in range(40):
        index.add(torch.randn(2048, 512), [f"{part}/{k}" for k in range(2048)], model=model)
else:
    index = ImageIndex.open(sys.argv[1])
    index.search(torch.randn(3, 512), 5, model=model)
print(anonymous() - begin)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_writing_opening_and_searching_leave_the_vectors_on_disk(tmp_path):
    for what, most in (("write", 70), ("open", 40)):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "index"), what]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert float(said) < most, what
