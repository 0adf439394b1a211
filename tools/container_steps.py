"""Runs the steps of deploy/Containerfile in an empty folder, without a container engine.

python tools/container_steps.py FOLDER WHEEL [--system-packages]

FOLDER is the root of the image. COPY takes the wheel, RUN runs in WORKDIR below the root, ENV and ARG are variables.
FROM, USER, VOLUME, EXPOSE and what needs root (useradd) are left out. Then the server is started by ENTRYPOINT and CMD,
with a run, a token and a port of its own, and HEALTHCHECK must succeed; SIGTERM must end the server.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["Image", "instructions"]

ROOT = Path(__file__).parents[1]
KNOWN = {
    *("FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"),
    *("ENTRYPOINT", "CMD"),
}
#: Commands that change the machine, and not the folder.
NEEDS_ROOT = ("useradd",)


def instructions(text: str) -> Iterator[tuple[str, str]]:
    """Name and arguments of each instruction, continued lines joined; ValueError for an unknown one."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, _, rest = line.partition(" ")
        if name not in KNOWN:
            raise ValueError(f"the Containerfile must have known instructions alone, got {line!r}")
        yield name, rest.strip()


class Image:
    """The image as a folder.

    Args:
        root: An empty folder.
        wheel: What COPY takes.
        arguments: Values of ARG.
    """

    def __init__(self, root: Path, wheel: Path, arguments: dict[str, str]) -> None:
        self.root = root
        self.wheel = wheel
        self.arguments = arguments
        self.workdir = root
        self.variables: dict[str, str] = {}
        self.commands: dict[str, list[str]] = {}
        self.left_out: list[str] = []

    def build(self, text: str) -> None:
        """Run all steps."""
        for name, rest in instructions(text):
            step = getattr(self, f"_{name.lower()}", None)
            if step is None:
                self.left_out.append(f"{name} {rest}")
            else:
                print(f"{name} {rest}", flush=True)
                step(rest)

    def command(self, *names: str) -> list[str]:
        """The words of ENTRYPOINT, CMD or HEALTHCHECK, one after the other."""
        return [word for name in names for word in self.commands[name]]

    def environment(self) -> dict[str, str]:
        """Variables of a step."""
        return {**os.environ, **self.variables, "PWD": str(self.workdir), "TMPDIR": str(self.root / "tmp")}

    def _arg(self, rest: str) -> None:
        name, _, value = rest.partition("=")
        self.variables[name] = self.arguments.get(name, value.strip('"'))

    def _env(self, rest: str) -> None:
        self.variables.update(part.split("=", 1) for part in shlex.split(rest))

    def _workdir(self, rest: str) -> None:
        self.workdir = self.root / rest.lstrip("/")
        self.workdir.mkdir(parents=True)
        (self.root / "tmp").mkdir(exist_ok=True)

    def _copy(self, rest: str) -> None:
        source, target = rest.split()
        if source != "dist/*.whl":
            raise ValueError(f"COPY must take the wheel, got {rest!r}")
        (self.workdir / target).mkdir(parents=True)
        shutil.copy(self.wheel, self.workdir / target)

    def _run(self, rest: str) -> None:
        if rest.split()[0] in NEEDS_ROOT:
            self.left_out.append(f"RUN {rest}")
            return
        done = subprocess.run(
            ["sh", "-euc", rest], cwd=self.workdir, env=self.environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"RUN {rest} must succeed, got status {done.returncode}: {done.stdout}{done.stderr}")

    def _healthcheck(self, rest: str) -> None:
        self.commands["HEALTHCHECK"] = json.loads(rest.partition("CMD ")[2])

    def _entrypoint(self, rest: str) -> None:
        self.commands["ENTRYPOINT"] = json.loads(rest)

    def _cmd(self, rest: str) -> None:
        self.commands["CMD"] = json.loads(rest)


def check_server(image: Image, run: Path, patience: float = 120.0) -> None:
    """Start the server over a run, wait until HEALTHCHECK succeeds, and end it; RuntimeError if it does not."""
    shutil.copytree(run, image.workdir / "runs" / "current")
    token = image.root / "token"
    token.write_text("a token of enough letters\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    replaced = {"8000": port, "/run/secrets/token": str(token), "0.0.0.0": "127.0.0.1"}
    command = [replaced.get(word, word) for word in image.command("ENTRYPOINT", "CMD")]
    check = [word.replace(":8000/", f":{port}/") for word in image.command("HEALTHCHECK")]
    with subprocess.Popen([*command, "--map", "pca"], cwd=image.workdir, env=image.environment()) as server:
        try:
            until = time.monotonic() + patience
            while subprocess.run(check, cwd=image.workdir, env=image.environment(), capture_output=True).returncode:
                if server.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server must become ready within {patience:.0f} s: {shlex.join(command)}")
                time.sleep(0.3)
            server.send_signal(signal.SIGTERM)
            if (status := server.wait(60)) not in (0, -signal.SIGTERM):
                raise RuntimeError(f"the server must end at SIGTERM, got status {status}")
        finally:
            if server.poll() is None:
                server.kill()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="an empty folder, made if it does not exist")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--run", type=Path, help="a run with an index, over which the server is started")
    parser.add_argument(
        "--system-packages", action="store_true", help="use installed dependencies, so that nothing is downloaded"
    )
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    if any(options.folder.iterdir()):
        raise SystemExit(f"{options.folder} must be empty, and is not")
    values = {}
    if options.system_packages:
        values = {"VENV_OPTIONS": "--system-site-packages", "PIP_OPTIONS": "--no-deps --no-index"}
        # those of a virtual environment are not system packages of another one
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.endswith("site-packages"))
    image = Image(options.folder.resolve(), options.wheel.resolve(), values)
    image.build((ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8"))
    if options.run is not None:
        check_server(image, options.run)
    print("left out:", *image.left_out, sep="\n  ")


if __name__ == "__main__":
    main()
