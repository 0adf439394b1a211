"""`pfml report`: a page about one run, or the paper's tables beside the results of many."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pfml.cli.console import create_console
from pfml.cli.parser import add_device_option, add_quiet_option
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser


def report(
    run: Path | None = None,
    store: Path | None = None,
    experiment: str | None = None,
    format: str | None = None,  # noqa: A002 - the option is called --format
    out: Path | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> None:
    """Write a page about a run, RUN/report.html; without RUN, print the paper's tables beside our results."""
    if run is None:
        _report_tables(store, experiment, format, out, quiet)
        return
    from pfml.pages.run import contents_of, write_run_page
    from pfml.runs.final import preferred_folder
    from pfml.training.progress import ProgressMonitor

    for option, value in (("store", store), ("experiment", experiment), ("format", format)):
        if value is not None:
            raise ValueError(f"--{option} belongs to the tables of many runs: give it without the run {run}")
    if run.is_file():
        raise ValueError(f"RUN must be the folder of a run, got the file {run}: results of experiments go to --store")
    if not (run / "config.yaml").is_file():
        raise FileNotFoundError(
            f"RUN must be a folder with config.yaml in it, as pfml train writes it, but {run} has none"
        )
    console = create_console(quiet=quiet)
    path = write_run_page(run, out, device=device, track=ProgressMonitor(console).track)
    print_line(console, f"{path}: {contents_of(run)}")
    if preferred_folder(run) != run:
        print_line(console, f"{preferred_folder(run)}: the final model, which index, search, serve and export use")


def add_report_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `report`, of which RUN may be left out."""
    add = parser.add_argument
    add("run", type=Path, nargs="?", help="Folder of a run, for a page about it.")
    add("--store", type=Path, help="The results of experiments, as in results.jsonl; without it, the tables alone.")
    add("--experiment", help="Only the tables of this experiment.")
    add("--format", help="Of the tables: md, latex or html; by default what the ending of --out says, else md.")
    add("--out", type=Path, help="A file to write: the page, RUN/report.html by default, or the tables.")
    add_device_option(parser)
    add_quiet_option(parser)


def _report_tables(
    store: Path | None, experiment: str | None, format_: str | None, out: Path | None, quiet: bool
) -> None:
    """Print or write the paper's tables beside our results: mean and standard deviation over seeds."""
    from pfml.experiments.store import ResultsStore
    from pfml.paper.write import format_of, report_of, write_report

    form = format_of(format_, out)
    if store is not None and not store.is_file():
        raise FileNotFoundError(f"{store} must be a file of results, but there is no such file")
    records = ResultsStore(store).records() if store is not None else []
    written = write_report(report_of(records, experiment=experiment), form, out)
    if out is None:
        print(written, end="")
    else:
        print_line(create_console(quiet=quiet), f"{out}: the paper's tables beside {len(records):,} runs of ours")
