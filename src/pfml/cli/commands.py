"""The commands of `pfml`, by name: one visible table, its overview, and the script that completes them in a shell.

A command is a function, and its arguments are the options. What it needs is imported when it runs, so that help and
mistakes are printed before torch is loaded.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from importlib.util import find_spec
from pathlib import Path

from pfml.cli.audit import add_audit_arguments, audit
from pfml.cli.calibrate import add_calibrate_arguments, calibrate
from pfml.cli.embed import add_embed_arguments, embed
from pfml.cli.evaluate import add_evaluate_arguments, evaluate
from pfml.cli.experiments import (
    add_demo_arguments,
    add_experiment_arguments,
    add_theory_arguments,
    demo,
    experiment,
    theory,
)
from pfml.cli.export import add_export_arguments, export
from pfml.cli.index import add_index_arguments, index
from pfml.cli.methods import add_methods_arguments, methods
from pfml.cli.parser import Command, Parser
from pfml.cli.report import add_report_arguments, report
from pfml.cli.search import add_search_arguments, search
from pfml.cli.serve import add_serve_arguments, serve
from pfml.cli.train import add_train_arguments, add_tune_arguments, train, tune

__all__ = ["COMMANDS", "GROUPS", "overview"]

DESCRIPTION = "Potential field based deep metric learning (CVPR 2025)."
OPTIONS = {"-h, --help": "Show this help, or that of a COMMAND.", "--version": "Print the version."}
HINT = "In the names of options - and _ are the same. Completion for a shell: pfml completion --help"
#: Columns of the names, and of all, in a file and on a wide terminal.
NAMES, WIDEST = 14, 80


def completion(shell: str) -> None:
    """Print a script by which bash or zsh completes commands and options; docs/COMMANDS.md says where to put it."""
    if find_spec("shtab") is None:
        raise ImportError("pfml completion needs the package shtab: pip install shtab")
    import shtab

    parser = Parser(prog="pfml", description=DESCRIPTION)
    subcommands = parser.add_subparsers()
    for name, command in COMMANDS.items():
        subparser = subcommands.add_parser(name, help=command.summary, description=command.summary)
        command.add_arguments(subparser)
        for action in subparser._actions:
            if action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell))


def add_completion_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh"), help="Which shell.")


#: Title -> the commands under it.
GROUPS: dict[str, dict[str, Command]] = {
    "Models and images": {
        "train": Command(train, add_train_arguments, run_config=True, ranks=True),
        "evaluate": Command(evaluate, add_evaluate_arguments, ranks=True),
        "report": Command(report, add_report_arguments),
        "audit": Command(audit, add_audit_arguments),
        "embed": Command(embed, add_embed_arguments, ranks=True),
        "index": Command(index, add_index_arguments),
        "search": Command(search, add_search_arguments),
        "calibrate": Command(calibrate, add_calibrate_arguments),
        "serve": Command(serve, add_serve_arguments, keeps_memory=False),  # it runs for weeks: a peak must not stay
        "export": Command(export, add_export_arguments),
        "methods": Command(methods, add_methods_arguments),
        "completion": Command(completion, add_completion_arguments),
    },
    "The paper and research": {
        "demo": Command(demo, add_demo_arguments),
        "experiment": Command(experiment, add_experiment_arguments),
        "tune": Command(tune, add_tune_arguments, run_config=True),
        "theory": Command(theory, add_theory_arguments),
    },
}
#: All of them, by name.
COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}


def overview() -> str:
    """The help of `pfml`: all commands in their groups, a sentence each."""
    lines = ["usage: pfml COMMAND [options]", "", DESCRIPTION]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, command in commands.items():
            lines += _entry(name, command.summary)
    lines += ["", "options:"]
    for name, text in OPTIONS.items():
        lines += _entry(name, text)
    return "\n".join([*lines, "", *textwrap.wrap(HINT, _width())])


def _entry(name: str, text: str) -> list[str]:
    indent = " " * NAMES
    return textwrap.wrap(text, _width(), initial_indent=f"  {name}".ljust(NAMES), subsequent_indent=indent)


def _width() -> int:
    return min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
