"""A server under load and under attack: memory, files and threads, right answers, and how long these take.

python benchmarks/server_soak.py --seconds 120

`pfml serve` over an index of glyphs, as a user starts it. Good clients search by id and by upload, look at pictures,
lists and the page, and compare every answer with what this process computes itself. First they are alone, then those
of `server_trouble.py` are beside them, from a process of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from machine import environment
from server_good import Gallery, good_requests
from server_process import Held, ServerProcess, write_gallery
from server_trouble import OPTIONS

__all__ = ["SoakResult", "server_soak"]

#: Seconds that connections have to end when their clients are gone; idle ones are closed after five.
SETTLING = 15.0


@dataclass
class SoakResult:
    """What a soak gave.

    Args:
        alone: Seconds of each good request to an idle server.
        beside: Seconds of each good request beside the troubles.
        wrong: Answers that were not right, in words; of good requests and of troubles.
        answers: Trouble -> answer -> how often.
        samples: What the server held: when all that is made once was made, each second beside the troubles, and at the
            end, when all clients were gone.
        said: What the server wrote to its terminal.
        status: With which it ended.
    """

    alone: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    answers: dict[str, dict[str, int]] = field(default_factory=dict)
    samples: list[Held] = field(default_factory=list)
    said: str = ""
    status: int = -1

    @property
    def server_errors(self) -> list[str]:
        """Answers of 500 and above, and tracebacks."""
        found = [f"{name}: {code}" for name, codes in self.answers.items() for code in codes if code.startswith("5")]
        return found + [line for line in self.said.splitlines() if "Traceback" in line or line.startswith("ERROR")]


def server_soak(
    folder: Path,
    *,
    seconds: float,
    warm_up: float,
    clients: int = 8,
    good_clients: int = 3,
    copies: int = 2,
    seed: int = 0,
) -> SoakResult:
    """Load a server for `seconds` with troubles beside good requests; both alone before, for `warm_up` each.

    Args:
        folder: An empty folder.
        seconds: How long.
        warm_up: Seconds of troubles before anything is measured, and of good requests alone.
        clients: Troubles at a time, besides the slow ones.
        good_clients: Good requests at a time.
        copies: Of each of 12 glyphs in each of 16 faces: how many images are indexed.
        seed: Of what the clients choose.
    """
    result = SoakResult()
    run = write_gallery(folder, copies=copies)
    gallery = Gallery(run)
    with ServerProcess(run, folder / "server", *OPTIONS) as server:
        address = f"http://127.0.0.1:{server.port}"
        result.wrong += asyncio.run(gallery.visited(address))
        _, wrong = _under_load(server, gallery, result, warm_up, clients, good_clients, seed)
        result.wrong += wrong
        result.alone, wrong = asyncio.run(good_requests(gallery, address, warm_up, good_clients, seed + 1))
        result.wrong += wrong
        result.samples = [_settled(server, None)]
        result.beside, wrong = _under_load(server, gallery, result, seconds, clients, good_clients, seed + 2)
        result.wrong += wrong
        result.samples.append(_settled(server, result.samples[0]))
        result.status = server.end()
        result.said = server.said.read_text(errors="replace")
    return result


def _under_load(
    server: ServerProcess, gallery: Gallery, result: SoakResult, seconds: float, clients: int, good: int, seed: int
) -> tuple[list[float], list[str]]:
    """Seconds of good requests beside troubles, and what was wrong with either."""
    script = Path(__file__).with_name("server_trouble.py")
    options = {"--port": server.port, "--seconds": seconds, "--clients": clients, "--seed": seed}
    command = [sys.executable, str(script), *(str(part) for pair in options.items() for part in pair)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as troubles:

        async def beside() -> tuple[list[float], list[str]]:
            sampling = asyncio.ensure_future(_sample(server, result.samples))
            try:
                return await good_requests(gallery, f"http://127.0.0.1:{server.port}", seconds, good, seed)
            finally:
                sampling.cancel()

        times, wrong = asyncio.run(beside())
        said = json.loads(troubles.communicate()[0])
    for name, codes in said["answers"].items():
        counts = result.answers.setdefault(name, {})
        for code, count in codes.items():
            counts[code] = counts.get(code, 0) + count
    return times, wrong + said["wrong"]


async def _sample(server: ServerProcess, samples: list[Held]) -> None:
    while True:
        await asyncio.sleep(1.0)
        samples.append(server.held())


def _settled(server: ServerProcess, before: Held | None) -> Held:
    """What the server holds once the connections of clients that are gone are closed, or after a while."""
    end = time.monotonic() + SETTLING
    time.sleep(1.0)
    held = server.held()
    while time.monotonic() < end and (before is None or held.files > before.files):
        time.sleep(0.5)
        previous, held = held, server.held()
        if before is None and previous.files == held.files:
            break
    return held


def quantile(values: list[float], share: float) -> float:
    """The value below which a share of all lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def main() -> None:
    """Run it and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--warm-up", type=float, default=20.0)
    parser.add_argument("--clients", type=int, default=8, help="troubles at a time, besides 16 slow ones")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = server_soak(Path(folder), seconds=chosen.seconds, warm_up=chosen.warm_up, clients=chosen.clients)
    print(", ".join(f"{name} {value}" for name, value in environment().items()))
    print(_tables(result))


def _tables(result: SoakResult) -> str:
    first, last, during = result.samples[0], result.samples[-1], result.samples[1:-1]
    lines = ["| | resident MiB | open files | threads | temporary files |", "|---|---|---|---|---|"]
    names = ("resident", "files", "threads", "temporary")
    rows = {"before": first}
    for quarter in (1, 2, 3, 4):
        part = during[len(during) * (quarter - 1) // 4 : len(during) * quarter // 4]
        rows[f"quarter {quarter}, least"] = Held(0.0, *(min(getattr(one, name) for one in part) for name in names))
    rows["most"] = Held(0.0, *(max(getattr(one, name) for one in during) for name in names))
    for name, one in {**rows, "after": last}.items():
        lines.append(f"| {name} | {one.resident / 2**20:,.1f} | {one.files} | {one.threads} | {one.temporary} |")
    lines += ["", "| good requests | number | p50 | p99 |", "|---|---|---|---|"]
    unit = quantile(result.alone, 0.5)
    for name, times in {"alone": result.alone, "beside the troubles": result.beside}.items():
        lines.append(
            f"| {name} | {len(times):,} | {quantile(times, 0.5) / unit:.1f} | {quantile(times, 0.99) / unit:.1f} |"
        )
    lines += ["", f"(a p50 alone: {1000 * unit:.1f} ms)", "", "| trouble | answers |", "|---|---|"]
    for name, codes in result.answers.items():
        lines.append(f"| {name} | {', '.join(f'{count:,} x {code}' for code, count in sorted(codes.items()))} |")
    lines += ["", f"wrong: {result.wrong[:20] or 'none'}; errors of the server: {result.server_errors[:20] or 'none'}"]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
