"""Help at once, in words; options in either spelling; completion for shells."""

import json
import re
import subprocess
import sys

import pytest
import yaml

from pfml import __version__
from pfml.cli import main, parsed_values
from pfml.cli.commands import COMMANDS, GROUPS
from pfml.cli.parser import create_parser, with_declared_spelling

#: Words of a programmer, which say nothing to who types a command.
INTERNAL = (
    r"<class|Callable|\b(?:Literal|Union|[Tt]uple|dict|list)\[|\b(?:None|Preprocessing)\b|`METHODS`|`pfml\."
    r"|default: null|remarks`"
)
#: The options of these are the fields of `RunConfig`, whose checks need torch.
WITH_TORCH = [name for name, command in COMMANDS.items() if command.run_config]
#: Modules that `pfml --help` loads: Python's own, the commands, and the parser's.
MOST_MODULES = 330


#: What `pfml` prints on its own.
ALONE = ((), ("-h",), ("--help",), ("--version",))
HELP = tuple((name, "--help") for name in COMMANDS if name not in WITH_TORCH)
MISTAKES = (("trian",), ("--halp",), ("serve", "run", "--prot=80"))
#: Runs `pfml` with each of the given arguments; prints status, stdout, stderr and the modules loaded until then.
PROGRAM = """
import contextlib, io, json, sys
from pfml.cli import main
for arguments in json.loads(sys.argv[1]):
    status = 0
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    print(json.dumps([arguments, status, out.getvalue(), error.getvalue(), sorted(sys.modules)]))
"""


@pytest.fixture(scope="module")
def answers():
    """Arguments -> status, stdout, stderr and loaded modules of one process that runs all of these commands."""
    asked = json.dumps([*ALONE, *HELP, *MISTAKES])
    result = subprocess.run([sys.executable, "-c", PROGRAM, asked], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return {tuple(asked): answer for asked, *answer in map(json.loads, result.stdout.splitlines())}


def help_of(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code in (None, 0)
    return capsys.readouterr().out


@pytest.mark.parametrize("arguments", ALONE, ids=str)
def test_help_and_version_load_neither_torch_nor_much_else(answers, arguments):
    status, printed, complaints, modules = answers[arguments]
    heavy = {"torch", "numpy", "PIL", "rich", "safetensors", "scipy", "sklearn"} & set(modules)
    ours = [name for name in modules if name.startswith("pfml") and not name.startswith("pfml.cli")]
    assert status in (None, 0)
    assert complaints == ""
    assert not heavy
    assert len(modules) <= MOST_MODULES, f"{len(modules)} modules, of ours below the command line: {ours}"
    assert printed.strip() == f"pfml {__version__}" if arguments == ("--version",) else "usage: pfml COMMAND" in printed


@pytest.mark.parametrize("arguments", HELP, ids=lambda arguments: arguments[0])
def test_the_help_of_a_command_does_not_load_torch(answers, arguments):
    status, printed, complaints, modules = answers[arguments]
    assert (status, complaints) == (0, "")
    assert printed.startswith(f"usage: pfml {arguments[0]} ")
    assert "torch" not in modules


def test_a_mistake_is_said_without_loading_torch(answers):
    for arguments in MISTAKES:
        status, _, complaints, modules = answers[arguments]
        assert status == 2
        assert "error:" in complaints
        assert "torch" not in modules, arguments


def test_help_shows_the_commands_in_two_groups_with_titles(capsys):
    text = help_of(capsys)
    titles = list(GROUPS)
    assert len(titles) == 2
    first, second = text.index(f"\n{titles[0]}:\n"), text.index(f"\n{titles[1]}:\n")
    for name in ("train", "evaluate", "embed", "index", "search", "calibrate", "audit", "serve", "export", "report"):
        assert first < re.search(rf"^  {name} ", text, re.MULTILINE).start() < second, name
    for name in ("experiment", "tune", "theory", "demo"):
        assert re.search(rf"^  {name} ", text, re.MULTILINE).start() > second, name
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_in_words_and_says_something_about_every_option(name, capsys):
    text = help_of(capsys, name)
    assert not (found := re.findall(f".*(?:{INTERNAL}).*", text)), found
    assert f"usage: pfml {name} " in text
    assert text.count("--json") != 1, "an option that the command does not have"
    parser = create_parser(name, COMMANDS[name])
    assert [action.dest for action in parser._actions if not action.help] == []


def test_help_names_the_kind_of_a_value_and_its_default(capsys):
    text = " ".join(help_of(capsys, "audit").split())
    assert "--top INT Suspects to print and to show on the page. (default: 20)" in text
    assert "--model PATH Judge with this embedder alone: folder of a run or of a saved one. --" in text
    assert "--apply Write corrected labels; the originals stay as they are. --" in text
    text = " ".join(help_of(capsys, "train").split())
    assert "--compile, --no-compile Whether" in text
    assert "--augmentation.random_crop, --no-augmentation.random_crop Without it" in text
    assert "(default: yes)" in text
    assert "--teachers TEACHERS [TEACHERS ...]" in text
    assert "--schedule.milestones [INT ...]" in text
    assert "--augmentation.scale FLOAT FLOAT" in text


#: Command -> the common options that it has.
COMMON = {
    **dict.fromkeys(
        ("train", "tune", "evaluate", "audit", "embed", "index", "search", "calibrate"), "device json quiet"
    ),
    **dict.fromkeys(("report", "demo", "experiment"), "device quiet"),
    **dict.fromkeys(("export", "theory"), "json quiet"),
    "serve": "device",
    "methods": "json",
    "completion": "",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_follow_the_conventions(name):
    actions = create_parser(name, COMMANDS[name])._actions
    options = {option for action in actions for option in action.option_strings}
    assert {option for option in ("--device", "--json", "--quiet") if option in options} == {
        f"--{option}" for option in COMMON[name].split()
    }
    for action in (action for action in actions if action.option_strings):
        is_list = action.nargs in ("+", "*")
        assert isinstance(action.default, bool) <= (action.nargs == 0), f"{action.dest}: a boolean is a flag"
        assert action.type is not bool
        assert "comma" not in action.help
        assert "[" not in str(action.metavar)
        if is_list and action.default is None:
            assert type(action).__name__ == "_ExtendAction", f"{action.dest}: repeated, a list goes on"


@pytest.mark.parametrize(
    "arguments",
    [["train", "--compile", "true"], ["train", "--deterministic=true"], ["evaluate", "run", "--nmi=true"]],
)
def test_a_flag_takes_no_value(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--data", "x"])
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (["--schedule.name=milestones", "--schedule.milestones", "3", "5"], (3, 5)),
        (["--schedule.name=milestones", "--schedule.milestones=3"], (3,)),
        (["--config=listed.yaml"], (2, 4)),
        (["--config=listed.yaml", "--schedule.name=constant", "--schedule.milestones"], ()),
    ],
)
def test_a_list_is_its_values_one_after_the_other_or_a_list_in_a_file(typed, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "listed.yaml").write_text("schedule: {name: milestones, milestones: [2, 4]}")
    assert parsed_values("train", typed)["config"].schedule.milestones == value


def test_flags_turn_fields_on_and_off_also_those_of_a_file(tmp_path):
    (tmp_path / "on.yaml").write_text(
        "deterministic: true\naugmentation: {random_crop: false}\noptimizer: {lr: 1e-3}\n"
    )
    file = f"--config={tmp_path / 'on.yaml'}"
    config = parsed_values("train", [file])["config"]
    assert (config.deterministic, config.augmentation.random_crop, config.optimizer.lr) == (True, False, 1e-3)
    config = parsed_values("train", [file, "--no-deterministic", "--augmentation.random-crop", "--compile"])["config"]
    assert (config.deterministic, config.augmentation.random_crop, config.compile) == (False, True, True)


def test_a_mistake_in_a_file_is_one_sentence_with_status_2(tmp_path, capsys):
    for content in ("epohcs: 3", "epochs: many", "optimizer: {l: 3}", "[1, 2]"):
        (tmp_path / "wrong.yaml").write_text(content)
        with pytest.raises(SystemExit) as end:
            main(["train", f"--config={tmp_path / 'wrong.yaml'}"])
        assert end.value.code == 2
        assert "pfml train: error: " in capsys.readouterr().err


def test_a_command_that_is_none_is_refused_with_the_nearest_one(capsys):
    with pytest.raises(SystemExit) as end:
        main(["serach", "run"])
    assert end.value.code == 2
    assert "there is no command 'serach'; did you mean 'search'?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--evaluate-every", "--evaluate_every"])
def test_options_of_a_run_may_have_either_spelling(option, capsys):
    main(["train", "--config=glyphs", f"{option}=7", "--print-config"])
    assert yaml.safe_load(capsys.readouterr().out)["evaluate_every"] == 7


def test_names_inside_of_groups_may_have_either_spelling(capsys):
    given = ["--batch.samples-per-class", "2", "--loss.options.proxies-per-class=3", "--data.noise.rate=0.5"]
    main(["train", "--config=glyphs", *given, "--print_config"])
    config = yaml.safe_load(capsys.readouterr().out)
    assert config["batch"]["samples_per_class"] == 2
    assert config["loss"]["options"]["proxies_per_class"] == 3


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_every_command_may_have_either_spelling(name):
    parser = create_parser(name, COMMANDS[name])
    for action in parser._actions:
        for option in (one for one in action.option_strings if one.startswith("--")):
            for typed in (option.replace("_", "-"), f"--{option[2:].replace('-', '_')}"):
                [found] = with_declared_spelling([f"{typed}=a-b_c"], parser._option_string_actions)
                declared, _, value = found.partition("=")
                assert parser._option_string_actions[declared] is action
                assert value == "a-b_c"


def test_what_is_no_option_is_left_as_it_is():
    typed = ["run_1", "--no_such-thing=a_b", "-0.5", "--out", "some-folder_2", "--", "--dry_run"]
    assert with_declared_spelling(typed, {"--out", "--dry-run"}) == typed


def test_options_are_offered_once(capsys):
    text = help_of(capsys, "calibrate")
    assert "--false-accept-rate FLOAT" in text
    assert "--false_accept_rate" not in text


def test_a_misspelled_option_with_a_dash_is_suggested_too(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--evaluate-evry=3"])
    assert "did you mean 'evaluate_every'?" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_prints_a_script_that_knows_commands_and_options(shell, capsys):
    pytest.importorskip("shtab", reason="completions of shells are printed by shtab")
    main(["completion", shell])
    script = capsys.readouterr().out
    for word in ("train", "calibrate", "--false-accept-rate", "--optimizer.proxy_lr", "one-cycle"):
        assert word in script, word


def test_the_script_for_bash_completes(tmp_path, capsys):
    pytest.importorskip("shtab", reason="completions of shells are printed by shtab")
    main(["completion", "bash"])
    (tmp_path / "pfml.sh").write_text(capsys.readouterr().out)
    program = (
        'source "$1"; COMP_WORDS=(pfml calibrate --fal); COMP_CWORD=2; '
        "complete -p pfml | grep -o -- '-F [^ ]*' | { read _ f; $f; echo \"${COMPREPLY[@]}\"; }"
    )
    result = subprocess.run(
        ["bash", "-c", program, "bash", str(tmp_path / "pfml.sh")], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["--false-accept-rate"]


def test_completion_without_the_package_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("pfml.cli.commands.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        main(["completion", "bash"])
    assert "pip install shtab" in str(end.value)
