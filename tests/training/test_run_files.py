"""What a run's files and images may come to while it trains, or before it is read again."""

import os
import random
import shutil
import warnings
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch
from PIL import Image

from pfml.cli import main
from pfml.data import read_folder
from pfml.models import EmbedderConfig
from pfml.runs.config_files import plain, read_config
from pfml.runs.folder import RESULTS, RunFolder
from pfml.storage.files import DamagedFileError
from pfml.storage.manifest import FormatVersionError, write_manifest
from pfml.training import BatchConfig, DataConfig, LossConfig, Monitor, RunConfig, StorageConfig, run
from pfml.training.shutdown import Interrupted
from small_data import InterruptAt, small_config


def draw(folder, classes=("a", "b", "c", "d"), images=3):
    generator = torch.Generator().manual_seed(0)
    for name in classes:
        place = os.path.join(os.fsencode(folder), name if isinstance(name, bytes) else name.encode())
        os.makedirs(place)
        for number in range(images):
            pixels = torch.randint(0, 256, (36, 40, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(os.fsdecode(os.path.join(place, b"%d.bmp" % number)))
    return folder


def config_of(data, **changes):
    values = {
        "epochs": 2,
        "batch": BatchConfig(4, 2),
        "data": DataConfig(str(data)),
        "model": EmbedderConfig("convnet", embedding_dim=8),
        "loss": LossConfig("pfml", {"proxies_per_class": 1}),
        "batch_norm": "freeze",
    }
    return RunConfig(**{**vars(small_config()), **values, **changes})


@pytest.fixture
def photos(tmp_path):
    return draw(tmp_path / "photos")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run that has ended."""
    folder = tmp_path_factory.mktemp("ended")
    run(config_of(draw(folder / "photos"), epochs=1), folder / "run")
    return folder / "run"


def flipped(content, random_numbers):
    place, bit = random_numbers.randrange(len(content)), random_numbers.randrange(8)
    return content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :]


def test_a_flipped_bit_in_a_run_s_configuration_is_found_or_harmless(ended, tmp_path):
    file, path = (ended / "config.yaml").read_bytes(), tmp_path / "config.yaml"
    expected, found, draws = plain(read_config(ended / "config.yaml")), 0, random.Random(0)
    for _ in range(150):
        path.write_bytes(flipped(file, draws))
        try:
            values = plain(read_config(path))
        except ValueError as error:
            assert "config.yaml" in str(error)
            found += 1
        else:
            assert values == expected
    assert found > 100
    path.write_bytes(file[: len(file) // 2])
    with pytest.raises(DamagedFileError, match=r"config\.yaml does not match its own checksum"):
        read_config(path)


def test_a_changed_configuration_is_refused_by_the_command_until_its_seal_is_removed(ended, tmp_path, capsys):
    text, path = (ended / "config.yaml").read_text(), tmp_path / "mine.yaml"
    path.write_text(text.replace("epochs: 1", "epochs: 7"))
    with pytest.raises(SystemExit) as error:
        main(["train", f"--config={path}", "--print_config"])
    assert error.value.code == 2
    assert "remove its first line" in capsys.readouterr().err
    path.write_text(path.read_text().partition("\n")[2])
    main(["train", f"--config={path}", "--print_config"])
    assert "epochs: 7" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"{}"], ids=repr)
def test_a_broken_results_json_is_named(ended, tmp_path, content):
    folder = RunFolder(shutil.copytree(ended, tmp_path / "run"))
    folder.results.write_bytes(content)
    with pytest.raises(DamagedFileError, match=r"results\.json"):
        folder.read_results()


def test_every_flipped_bit_of_results_is_found_or_harmless(ended, tmp_path):
    folder, draws = RunFolder(shutil.copytree(ended, tmp_path / "run")), random.Random(1)
    content, results = folder.results.read_bytes(), folder.read_results()
    for _ in range(150):
        folder.results.write_bytes(flipped(content, draws))
        try:
            got = folder.read_results()
        except DamagedFileError as error:
            assert "results.json" in str(error)
        else:
            assert {name: got[name] for name in results} == results


def test_every_flipped_bit_of_the_log_is_found_or_harmless(ended, tmp_path):
    folder, draws = RunFolder(shutil.copytree(ended, tmp_path / "run")), random.Random(2)
    content, [entry] = folder.log.read_bytes(), folder.entries("evaluation")
    for _ in range(150):
        folder.log.write_bytes(flipped(content, draws))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            got = folder.entries("evaluation")
        assert [{name: one[name] for name in entry} for one in got] == [entry] or (not got and heard)


def test_a_run_of_another_format_version_is_refused_and_the_version_named(ended, tmp_path):
    folder = RunFolder(shutil.copytree(ended, tmp_path / "run"))
    text = folder.config.read_text()
    folder.config.write_text(text.replace("format version 1,", "format version 7,", 1))
    with pytest.raises(
        FormatVersionError, match=r"config\.yaml must belong to a run of format version 1, got version 7"
    ):
        read_config(folder.config)
    later = {**folder.read_results(), "more": 1}
    write_manifest(folder.results, later, replace(RESULTS, version=8))
    with pytest.raises(FormatVersionError, match=r"results\.json .* format version 1, got version 8"):
        folder.read_results()


def interrupted(config, out):
    with pytest.raises(Interrupted):
        run(config, out, monitor=InterruptAt(1))


def test_a_run_is_not_resumed_with_other_pixels_under_the_same_names(photos, tmp_path):
    config = config_of(photos)
    interrupted(config, tmp_path / "run")
    changed = [photos / "a" / "1.bmp", photos / "d" / "0.bmp"]  # one that trains, and one that tests
    before = [path.stat() for path in changed]
    for path in changed:
        Image.new("RGB", (40, 36), "red").save(path)
    assert [path.stat().st_size for path in changed] == [each.st_size for each in before]
    with pytest.raises(ValueError, match=r"a/1\.bmp, d/0\.bmp") as error:
        run(config, tmp_path / "run", resume=True)
    assert "2 of 12 images" in str(error.value)


def test_a_run_is_resumed_with_a_copy_of_its_images(photos, tmp_path):
    interrupted(config_of(photos), tmp_path / "run")
    for path in photos.rglob("*.bmp"):
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))
    assert run(config_of(photos), tmp_path / "run", resume=True)["last"]["epoch"] == 2


class At(Monitor):
    """Does something after a step."""

    def __init__(self, step, action):
        self.left, self.action = step, action

    def step(self, *_):
        self.left -= 1
        if self.left == 0:
            self.action()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_vanishes_while_a_run_trains_is_named_in_one_sentence(photos, tmp_path, workers):
    gone = photos / "a" / "1.bmp"
    config = config_of(photos, epochs=30, storage=StorageConfig("files", workers=workers))
    with pytest.raises(ValueError, match=r"1\.bmp") as error:
        run(config, tmp_path / "run", monitor=At(1, gone.unlink))
    assert str(gone) in str(error.value)
    assert "does not exist" in str(error.value)
    assert "\n" not in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.parametrize("step", [1, 2], ids=["while it trains", "at its last step"])
def test_a_run_whose_folder_is_deleted_ends_with_an_error(photos, tmp_path, step):
    out = tmp_path / "run"
    config = config_of(photos, log_every=100)  # so that the log is not what notices
    with pytest.raises(OSError, match="was removed during the run"):
        run(config, out, monitor=At(step, lambda: shutil.rmtree(out)))


def test_a_full_disk_under_the_curves_is_one_sentence(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.append("step", 1, loss=1.0)
    with open("/dev/full", "wb", buffering=0) as full:
        folder._trackers._open["tensorboard"].records._writer = full
        with pytest.raises(OSError, match=r"tensorboard.* could not be written: No space left on device"):
            folder.append("step", 2, loss=1.0)


def test_a_full_disk_under_the_log_is_one_sentence(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start()
    folder.log.symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"log\.jsonl could not be written: No space left on device"):
        folder.append("step", 1, loss=1.0)


@pytest.fixture(scope="module")
def odd_names(tmp_path_factory):
    """A run on class folders of which two have names that are not UTF-8, and what the commands printed."""
    folder = tmp_path_factory.mktemp("odd")
    try:
        draw(folder / "photos", (b"a", b"caf\xe9", b"m", b"n", b"o", b"th\xe9", b"y", b"z"), images=2)
    except OSError:
        pytest.skip("this file system has no names but UTF-8")
    run(config_of(folder / "photos", epochs=1), folder / "run")
    return folder


def printed(*arguments):
    strict = StringIO()
    with redirect_stdout(strict):
        main([str(argument) for argument in arguments])
    strict.getvalue().encode()  # as a terminal would have it
    return strict.getvalue()


def test_class_folders_that_are_not_utf_8_are_read_with_escaped_names(odd_names):
    data = read_folder(odd_names / "photos")
    assert set(data.train.class_names + data.test.class_names) == {*"amnoyz", "caf\\xe9", "th\\xe9"}


@pytest.mark.slow  # eight commands
def test_every_command_works_with_class_folders_that_are_not_utf_8(odd_names, tmp_path):
    run_folder, photos = odd_names / "run", odd_names / "photos"
    printed("report", run_folder)
    assert "th\\xe9" in (run_folder / "report.html").read_text(encoding="utf-8")
    printed("evaluate", run_folder)
    printed("audit", run_folder, "--apply", f"--out={tmp_path / 'corrected.csv'}")
    printed("index", run_folder, photos)
    printed("calibrate", run_folder, "--false-accept-rate=0.25")
    query = shutil.copy(photos / os.fsdecode(b"th\xe9") / "0.bmp", tmp_path / "query.bmp")
    assert "th\\xe9" in printed("search", run_folder, query, "--k=2")
    printed("embed", run_folder, photos, f"--out={tmp_path / 'vectors'}")
    printed("export", run_folder, "--to=bundle", f"--out={tmp_path / 'bundle'}")
