"""The command line `pfml`.

Each command is a function, and its arguments are the options. matplotlib and scipy are imported only by the commands
that need them, so that `pfml --help` adds nothing to the time that torch takes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from pfml.experiments.theory import TheoryConfig

__all__ = ["main"]


def theory(
    out: Path = Path("out"),
    seed: int = 0,
    dims: tuple[int, ...] = (2, 3, 4, 8, 32, 128, 512),
    points: int = 64,
    proxies: int = 4,
    alpha: float = 3.0,
    trials: int = 10,
) -> None:
    """Check Proposition 1 and Corollary 1 on random points: print a table, write theory.png.

    Args:
        out: Folder for the picture; made if it does not exist.
        seed: Of all random draws.
        dims: Dimensions to check, as in --dims=[2,512].
        points: Data of the class.
        proxies: Proxies of the class.
        alpha: Rate of decay of the PFML field.
        trials: Random point sets per dimension.
    """
    from pfml.experiments.figures import draw_theory
    from pfml.experiments.theory import TheoryConfig

    try:
        config = TheoryConfig(dims=dims, num_points=points, num_proxies=proxies, alpha=alpha, trials=trials, seed=seed)
    except ValueError as error:
        sys.exit(f"pfml theory: error: {error}")
    console = _console()
    out.mkdir(parents=True, exist_ok=True)
    _print_theory(config, console)
    draw_theory(out / "theory.png")
    _print_line(console, f"{out / 'theory.png'}: the same proxies in the field of PFML and of CPML")


def demo(out: Path = Path("out")) -> None:
    """Draw the paper's Figure 2 and check its theory for three D: write field.png and theory.png, print a table.

    Args:
        out: Folder for the pictures; made if it does not exist.
    """
    from pfml.experiments.figures import draw_field

    out.mkdir(parents=True, exist_ok=True)
    draw_field(out / "field.png")
    theory(out, dims=(2, 32, 512), trials=5)
    _print_line(_console(), f"{out / 'field.png'}: the class potentials and forces of the paper's Figure 2")


COMMANDS: dict[str, Any] = {"theory": theory, "demo": demo}
DESCRIPTION = "Potential field based deep metric learning (CVPR 2025)."


def _print_theory(config: TheoryConfig, console: Console) -> None:
    import torch
    from rich.progress import Progress

    from pfml.experiments.theory import LAWS, theory_outcomes, theory_table

    # The matrices are small: with several threads, most of the time goes into waking them.
    torch.set_num_threads(1)
    outcomes = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Checking the theory", total=len(config.dims) * len(LAWS))
        for group in theory_outcomes(config):
            outcomes += group
            progress.advance(bar)
    console.print(theory_table(outcomes))


def _console() -> Console:
    from rich.console import Console

    # Without a terminal rich assumes 80 columns, and would break the tables.
    console = Console()
    return console if console.is_terminal else Console(width=120)


def _print_line(console: Console, line: str) -> None:
    # A path may hold brackets, which rich would read as markup, and may not be broken.
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line with `arguments`, those of the process if None; unknown ones exit with status 2."""
    from jsonargparse import auto_cli

    auto_cli(COMMANDS, args=arguments, prog="pfml", version=__version__, description=DESCRIPTION)


if __name__ == "__main__":
    main()
