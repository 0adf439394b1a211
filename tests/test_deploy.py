"""The recipes of deploy/: a Containerfile and a systemd unit that say what they should, and steps that run."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest

from pfml.cli.commands import COMMANDS
from pfml.cli.parser import create_parser

ROOT = Path(__file__).parents[1]
CONTAINERFILE = (ROOT / "deploy" / "Containerfile").read_text()
UNIT = (ROOT / "deploy" / "pfml-serve.service").read_text()
STEPS = run_path(str(ROOT / "tools" / "container_steps.py"))


def of(name):
    """The arguments of all instructions of a name."""
    return [rest for found, rest in STEPS["instructions"](CONTAINERFILE) if found == name]


def serve_options(words):
    """The options of `pfml serve` in a command; the parser refuses what does not exist."""
    assert words[1] == "serve"
    return vars(create_parser("serve", COMMANDS["serve"]).parse_args(words[2:]))


def test_the_container_runs_as_an_ordinary_user_over_a_volume():
    users = of("USER")
    assert users
    assert users[-1] not in ("root", "0")
    names = [name for name, _ in STEPS["instructions"](CONTAINERFILE)]
    assert max(k for k, name in enumerate(names) if name == "RUN") < names.index("USER"), "what it runs is root's"
    assert of("VOLUME") == ["/srv/pfml/runs"]
    assert "--read-only" in CONTAINERFILE
    assert of("COPY") == ["dist/*.whl wheels/"], "from a wheel"


def test_the_command_of_the_container_is_one_that_pfml_serve_takes():
    [entry], [command] = map(json.loads, of("ENTRYPOINT")), map(json.loads, of("CMD"))
    assert entry == ["venv/bin/pfml"]
    options = serve_options([*entry, *command])
    assert options["host"] == "0.0.0.0"
    assert options["token_file"] == Path("/run/secrets/token")
    assert options["port"] == int(of("EXPOSE")[0])


def test_the_health_check_needs_no_further_program():
    [check] = of("HEALTHCHECK")
    words = json.loads(check.partition("CMD ")[2])
    assert words[0] == "venv/bin/python"
    assert "/ready" in words[-1]
    compile(words[-1], "healthcheck", "exec")
    assert "curl" not in CONTAINERFILE
    assert "wget" not in CONTAINERFILE


@pytest.mark.parametrize("text", [CONTAINERFILE, UNIT], ids=["Containerfile", "unit"])
def test_no_address_of_a_package_host_and_no_secret_is_in_it(text):
    assert re.findall(r"https?://(?!127\.0\.0\.1)\S+|--index-url|pypi|PFML_TOKEN=|--token ", text) == []


def test_an_unknown_instruction_is_refused():
    with pytest.raises(ValueError, match="known instructions"):
        list(STEPS["instructions"]("FROM x\nADD y z\n"))


class Unit(configparser.RawConfigParser):
    optionxform = staticmethod(str)


@pytest.fixture(scope="module")
def service():
    unit = Unit()
    unit.read_string(re.sub(r"\\\n\s*", "", UNIT))
    assert unit.sections() == ["Unit", "Service", "Install"]
    return unit["Service"]


def test_the_unit_starts_a_command_that_pfml_serve_takes(service):
    options = serve_options(service["ExecStart"].split())
    assert options["processes"] == 2
    assert options["trusted_proxy"] == ["127.0.0.1"]
    assert str(options["token_file"]) == "%d/token"
    assert service["LoadCredentialEncrypted"].startswith("token:")
    assert str(options["access_log"]).startswith(f"/var/log/{service['LogsDirectory']}/")
    assert service["WorkingDirectory"] == f"/var/lib/{service['StateDirectory']}"


def test_the_unit_ends_after_the_server_and_reloads_by_sighup(service):
    from pfml.serving.processes import KILL_SECONDS

    assert service["KillSignal"] == "SIGTERM"
    assert service["KillMode"] == "mixed", "the supervisor tells its processes"
    assert int(service["TimeoutStopSec"]) > KILL_SECONDS
    assert "-HUP" in service["ExecReload"]


def test_the_unit_is_hardened(service):
    expected = {
        "User": "pfml",
        "NoNewPrivileges": "yes",
        "CapabilityBoundingSet": "",
        "ProtectSystem": "strict",
        "ProtectHome": "yes",
        "PrivateTmp": "yes",
        "PrivateDevices": "yes",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "SystemCallFilter": "@system-service",
        "UMask": "0077",
    }
    assert {name: service[name] for name in expected} == expected
    assert "MemoryDenyWriteExecute" not in service, "torch compiles"


@pytest.mark.slow
def test_the_steps_of_the_container_run_in_an_empty_folder(tmp_path):
    project, out = tmp_path / "project", tmp_path / "dist"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, project)
    shutil.copytree(ROOT / "src", project / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    program = "import sys, hatchling.build; hatchling.build.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(out)], cwd=project, check=True, capture_output=True)
    [wheel] = out.iterdir()
    made = "import sys, pathlib, server_process; server_process.write_gallery(pathlib.Path(sys.argv[1]))"
    (tmp_path / "gallery").mkdir()
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", made, str(tmp_path / "gallery")], env=environment, check=True)
    script = [sys.executable, str(ROOT / "tools" / "container_steps.py"), str(tmp_path / "image"), str(wheel)]
    options = ["--system-packages", "--run", str(tmp_path / "gallery" / "run")]
    done = subprocess.run(
        [*script, *options],
        env={"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    installed = tmp_path / "image" / "srv" / "pfml" / "venv"
    assert list(installed.glob("lib/python*/site-packages/pfml/serving/page/index.html"))
