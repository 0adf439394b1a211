"""No configuration can import a module: what would is refused by its key and file before the parser sees it."""

import contextlib
import hashlib
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from pfml.cli import main, parsed_values
from pfml.cli.commands import COMMANDS
from pfml.cli.parser import create_parser
from pfml.runs.config import DataConfig, RunConfig
from pfml.runs.config_files import plain, read_config, refuse_code_in_text, shipped_configs, write_config
from pfml.runs.data import prepare_data
from small_index import write_images

MARKED = "a module was imported"


@pytest.fixture
def marker(tmp_path, monkeypatch):
    """A file that appears when the module `evilmod`, or `settings`, is imported; both can be."""
    modules, path = tmp_path / "modules", tmp_path / "marker"
    modules.mkdir()
    for name in ("evilmod", "settings"):
        (modules / f"{name}.py").write_text(f"open({str(path)!r}, 'w').write({MARKED!r})\nclass Evil: ...\n")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.chdir(tmp_path)
    yield path
    for name in ("evilmod", "settings"):
        sys.modules.pop(name, None)


def test_the_marker_shows_an_import(marker):
    import_module("evilmod")
    assert marker.read_text() == MARKED


def refused(capsys, *arguments):
    """The sentence that a command ends with."""
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code not in (0, None)
    return capsys.readouterr().err if isinstance(caught.value.code, int) else str(caught.value.code)


#: Configuration -> the key that its refusal names.
HOSTILE = {
    "data: {class_path: evilmod.Evil}": "data.class_path",
    "data: evilmod.Evil": "data",
    "data: {noise: {class_path: evilmod.Evil, init_args: {}}}": "data.noise.class_path",
    "data: {noise: evilmod.Evil}": "data.noise",
    "model: {init_args: {backbone: convnet}, class_path: evilmod.Evil}": "model.init_args",
    "loss: {name: pfml, options: {delta: {class_path: evilmod.Evil}}}": "loss.options.delta.class_path",
    "loss: {name: pfml, options: {delta: [1, {class_path: evilmod.Evil}]}}": "loss.options.delta.1.class_path",
    'loss: {name: pfml, options: {delta: {"class\\x5fpath": evilmod.Evil}}}': "loss.options.delta.class_path",
    "class_path: evilmod.Evil": "class_path",
    "data: {dict_kwargs: {}, class_path: evilmod.Evil}": "data.dict_kwargs",
    "data.class_path: evilmod.Evil": "data.class_path",
    "data: {noise.class_path: evilmod.Evil}": "data.noise.class_path",
    "data: settings.yaml": "data",
}


@pytest.mark.parametrize(("content", "key"), HOSTILE.items())
def test_a_configuration_file_that_names_code_is_refused_by_key_and_file(content, key, marker, capsys):
    (marker.parent / "settings.yaml").write_text("name: glyphs\n")
    (marker.parent / "given.yaml").write_text(content)
    said = refused(capsys, "train", "--config", "given.yaml", "--print_config")
    assert "given.yaml" in said
    assert f"{key!r}" in said
    assert not marker.exists()


@pytest.mark.parametrize(("content", "key"), HOSTILE.items())
def test_the_configuration_of_a_run_that_names_code_is_refused(content, key, marker):
    path = marker.parent / "config.yaml"
    whole, changed = plain(RunConfig()), yaml.safe_load(content)
    path.write_text(yaml.safe_dump({**whole, **changed}, sort_keys=False))
    with pytest.raises(ValueError, match=r"config\.yaml") as caught:
        read_config(path)
    assert repr(key) in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("command", [["evaluate"], ["audit"], ["train", "--resume"]])
def test_no_command_that_reads_a_run_imports_what_its_configuration_names(command, marker, capsys):
    run = marker.parent / "run"
    run.mkdir()
    values = {**plain(RunConfig()), "data": {"class_path": "evilmod.Evil"}}
    (run / "config.yaml").write_text(yaml.safe_dump(values))
    assert "data.class_path" in refused(capsys, *command, str(run))
    assert not marker.exists()


def test_a_configuration_of_the_package_is_checked_like_any_other(marker, capsys, monkeypatch):
    evil = marker.parent / "evil.yaml"
    evil.write_text("data: {class_path: evilmod.Evil}")
    monkeypatch.setattr("pfml.runs.config_files.shipped_configs", lambda: {"evil": evil})
    said = refused(capsys, "train", "--config", "evil")
    assert "evil.yaml" in said
    assert "data.class_path" in said
    assert not marker.exists()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (["--data", '{"class_path": "evilmod.Evil"}'], "data.class_path"),
        (['--data={"class_path": "evilmod.Evil"}'], "data.class_path"),
        (["--data.class_path", "evilmod.Evil"], "data.class_path"),
        (["--data.class_path=evilmod.Evil"], "data.class_path"),
        (["--data.init_args.name=x"], "data.init_args.name"),
        (["--loss.options.x.class_path=evilmod.Evil"], "loss.options.x.class_path"),
        (["--loss.options", '{"x": {"class_path": "evilmod.Evil"}}'], "loss.options.x.class_path"),
        (["--loss.options.x", "{class_path: evilmod.Evil}"], "loss.options.x.class_path"),
        (["--loss.options.x", "class_path: evilmod.Evil"], "loss.options.x.class_path"),
        (["--loss.options.x", "{a: &y 1, class_path: evilmod.Evil, init_args: *y}"], "loss.options.x"),
        (["--loss.options", '{"x": {"class\\x5fpath": "evilmod.Evil"}}'], "loss.options.x.class_path"),
        (["--model", "evilmod.Evil"], "model"),
        (["--model=evilmod.Evil"], "model"),
        (["--data.noise", "evilmod.Evil"], "data.noise"),
        (["--data.class-path=evilmod.Evil"], "data.class_path"),
        (["--data.noise.class-path", "evilmod.Evil"], "data.noise.class_path"),
        (["--data.noise", '{"class_path": "evilmod.Evil"}'], "data.noise.class_path"),
        (["--data", "hostile.yaml"], "data.class_path"),
        (["--model", "hostile.yaml"], "model.class_path"),
        (["--model", "missing.yaml"], "model"),
    ],
)
def test_an_option_that_names_code_is_refused_by_its_key(arguments, key, marker, capsys):
    (marker.parent / "hostile.yaml").write_text("class_path: evilmod.Evil")
    said = refused(capsys, "train", *arguments, "--print_config")
    assert f"{key!r}" in said or f"unrecognized arguments: --{key}" in said
    if "hostile.yaml" in arguments:
        assert "hostile.yaml" in said
    assert not marker.exists()


@pytest.mark.parametrize("value", ["evilmod.Evil", '{"class_path": "evilmod.Evil"}'])
def test_no_option_of_a_run_imports_its_value(value, marker, capsys):
    actions = create_parser("train", COMMANDS["train"])._actions
    options = [option for action in actions for option in action.option_strings if option.startswith("--")]
    assert len(options) > 60
    for option in set(options) - {"--help"}:
        with contextlib.suppress(SystemExit, ValueError, OSError):
            parsed_values("train", [f"{option}={value}"])
        assert not marker.exists(), option
    capsys.readouterr()


def test_commands_without_a_configuration_have_options_of_plain_types_only():
    for name in (name for name, command in COMMANDS.items() if not command.run_config):
        kinds = {action.type for action in create_parser(name, COMMANDS[name])._actions}
        assert kinds <= {None, int, float, Path}, name


def test_options_of_a_group_in_a_file_are_taken_and_no_module_of_its_name_is_imported(marker, capsys):
    (marker.parent / "settings.yaml").write_text("name: glyphs\nvalidation: half\nnoise: {rate: 0.25}\n")
    main(["train", "--data", "settings.yaml", "--model", '{"backbone": "convnet"}', "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["data"]["validation"], printed["data"]["noise"]["rate"]) == ("half", 0.25)
    assert printed["model"]["backbone"] == "convnet"
    assert not marker.exists()


def test_a_value_that_only_mentions_a_class_path_is_let_pass(marker, capsys):
    main(["train", "--data.name=glyphs", "--storage.cache", "my/class_path/cache", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["storage"]["cache"] == "my/class_path/cache"


def test_shipped_configurations_pass_and_the_same_ones_with_code_do_not():
    shipped = shipped_configs()
    assert "glyphs" in shipped
    for path in shipped.values():
        text = path.read_text()
        refuse_code_in_text(text, path.name)
        with pytest.raises(ValueError, match="class_path"):
            refuse_code_in_text(text + "\nstorage: {class_path: this.X}\n", path.name)


def test_the_working_folder_is_not_imported_from_by_python_m(tmp_path):
    (tmp_path / "evilmod.py").write_text("open('marker', 'w').write('x')\nclass Evil: ...\n")
    (tmp_path / "given.yaml").write_text("data: {class_path: evilmod.Evil}")
    done = subprocess.run(
        [sys.executable, "-m", "pfml", "train", "--config", "given.yaml"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2
    assert "data.class_path" in done.stderr
    assert not (tmp_path / "marker").exists()
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)


def older_run(folder, images):
    """The configuration of a run from before classes were divided by a seed."""
    values = plain(RunConfig(data=DataConfig(str(images))))
    del values["data"]["split"], values["data"]["split_seed"]
    content = yaml.safe_dump(values).encode()
    seal = f"# pfml run, format version 1, sha256 of the next lines: {hashlib.sha256(content).hexdigest()}\n"
    (folder / "config.yaml").write_bytes(seal.encode() + content)
    return folder / "config.yaml"


def test_the_configuration_of_an_older_run_divides_classes_in_their_order(tmp_path, capsys):
    images = write_images(tmp_path / "photos", [f"{name}/{k}.png" for name in "abcdef" for k in range(2)])
    older = older_run(tmp_path, images)
    data = prepare_data(read_config(older).data).data
    assert (data.train.class_names, data.test.class_names) == (tuple("abc"), tuple("def"))
    main(["train", f"--config={older}", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["split_seed"] is None, "as the run did"
    main(["train", f"--config={older}", "--data", str(images), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["data"]["split_seed"] == 0, "images that are named are divided anew"


def test_a_configuration_that_was_written_by_hand_divides_classes_by_a_seed(tmp_path):
    text = older_run(tmp_path, tmp_path).read_text()
    (tmp_path / "mine.yaml").write_text(text.split("\n", 1)[1])
    assert read_config(tmp_path / "mine.yaml").data.split_seed == 0


def test_a_run_keeps_its_division_in_its_configuration(tmp_path):
    for data in (DataConfig("photos", split="images", split_seed=7), DataConfig("photos", split_seed=None)):
        write_config(tmp_path / "config.yaml", RunConfig(data=data), sealed=True)
        assert read_config(tmp_path / "config.yaml").data == data


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"split": "image"}, "data.split must be one of classes, images, none, got 'image'; did you mean 'images'"),
        ({"split_seed": -1}, "split_seed must lie in"),
        ({"split_seed": 2**63}, "split_seed must lie in"),
        ({"split": "images", "validation": "half"}, "data.split images trains on all of them: leave data.validation"),
    ],
)
def test_a_division_without_a_meaning_is_refused_at_once(values, message):
    with pytest.raises(ValueError, match=message):
        DataConfig("photos", **values)
