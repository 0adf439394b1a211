"""The commands of `pfml`, by name: one visible table.

A command is a function, and its arguments are the options. What it needs is imported when it runs, so that help and
mistakes are said before torch is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pfml.cli.audit import add_audit_arguments, audit
from pfml.cli.calibrate import add_calibrate_arguments, calibrate
from pfml.cli.completion import add_completion_arguments, completion
from pfml.cli.embed import add_embed_arguments, embed
from pfml.cli.evaluate import add_evaluate_arguments, evaluate
from pfml.cli.experiments import (
    add_demo_arguments,
    add_experiment_arguments,
    add_methods_arguments,
    add_theory_arguments,
    demo,
    experiment,
    methods,
    theory,
)
from pfml.cli.export import add_export_arguments, export
from pfml.cli.report import add_report_arguments, report
from pfml.cli.search import (
    add_index_arguments,
    add_search_arguments,
    index,
    search,
)
from pfml.cli.serve import add_serve_arguments, serve
from pfml.cli.train import add_train_arguments, add_tune_arguments, train, tune

if TYPE_CHECKING:
    from collections.abc import Callable

    from pfml.cli.parser import Parser

__all__ = ["COMMANDS", "GROUPS", "Command"]


@dataclass(frozen=True)
class Command:
    """A command of `pfml`.

    Args:
        function: What it does; the first line of its docstring is its help.
        add_arguments: Adds its arguments to the parser.
        run_config: Whether the fields of `RunConfig` are options too, and --config reads them from a file; `function`
            gets them as `config`.
        ranks: Whether several processes that torchrun starts share its work.
        keeps_memory: Whether it keeps the memory that it frees until it ends, which is faster on a CPU.
    """

    function: Callable[..., None]
    add_arguments: Callable[[Parser], None]
    run_config: bool = False
    ranks: bool = False
    keeps_memory: bool = True

    @property
    def summary(self) -> str:
        """One line that says what the command does."""
        return (self.function.__doc__ or "").split("\n")[0]


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
