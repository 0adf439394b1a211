"""Approximate search by usearch and faiss against the exact one: recall, time, memory, time to build.

python benchmarks/approximate_search.py --entries 1000000 --work /tmp/approximate --out results/approximate.jsonl
python benchmarks/approximate_search.py --table results/approximate.jsonl

Vectors are those of `embedding_mixture.py`; queries are further draws of the same classes. Every method is built in a
process of its own, with two threads, from a file that is read in chunks. Memory is the peak of anonymous memory, which
has the index and its training sample, but not the vectors. The candidates of a method (4 k, of pq4 10 k) are scored
again with the float32 vectors, as `pfml.search` does. One query is asked at a time, in turns with exact search (torch,
vectors in memory); the speedup compares medians of these turns. CPU seconds tell the cost of building also on a shared
machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from embedding_mixture import Mixture

DIMENSION = 512
K = 10
#: Candidates that are scored again, in multiples of k.
CANDIDATES = {"pq4": 10, "int8": 4, "float16": 4, "float32": 4}
QUERIES = 500
THREADS = 2
CHUNK = 16_384
#: Training vectors per list of an inverted file.
PER_LIST = 40

#: Settings of a search (probed lists, or the size of HNSW's candidate list) that are measured.
EFFORTS = {"ivf": (32, 64, 128, 256, 512, 1024), "hnsw": (32, 64, 128, 256), "usearch": (32, 64, 128, 256)}
METHODS = (
    "ivf-pq4", "ivf-float32", "ivf-float16", "ivf-int8",
    "usearch-float32", "usearch-float16", "usearch-int8",
    "hnsw-float32", "hnsw-float16", "hnsw-int8",
)  # fmt: skip

Search = Callable[[numpy.ndarray, int], numpy.ndarray]


def vector_file(entries: int, work: Path) -> Path:
    """The vectors in a file of raw float32, written once."""
    path = work / f"mixture-{entries}.f32"
    if not path.exists():
        partial = path.with_suffix(".partial")
        with open(partial, "wb") as file:
            for batch in Mixture(DIMENSION).batches(entries, seed=1):
                file.write(batch.numpy().tobytes())
        partial.rename(path)
    return path


def chunks(path: Path) -> Iterator[numpy.ndarray]:
    """The vectors of a file, some at a time."""
    with open(path, "rb") as file:
        while len(some := numpy.fromfile(file, numpy.float32, CHUNK * DIMENSION)):
            yield some.reshape(-1, DIMENSION)


def num_lists(entries: int) -> int:
    """Lists of an inverted file: 4 sqrt(n), as a power of two."""
    return 2 ** max(round(numpy.log2(4 * entries**0.5)), 0)


class PeakMemory:
    """The most anonymous memory of this process since its construction, looked at 20 times a second."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._now()
        self._thread.start()

    def stop(self) -> int:
        """Bytes above what there was before."""
        self._done.set()
        self._thread.join()
        return self.bytes - self._before

    def _watch(self) -> None:
        while not self._done.wait(0.05):
            self.bytes = max(self.bytes, self._now())

    @staticmethod
    def _now() -> int:
        status = Path("/proc/self/status").read_text()
        return 1024 * int(status.split("RssAnon:")[1].split()[0])


def build_ivf(path: Path, entries: int, precision: str) -> tuple[Search, Path]:
    """faiss: inverted lists around the centers of k-means, mapped from its file."""
    faiss: Any = importlib.import_module("faiss")
    faiss.omp_set_num_threads(THREADS)
    lists = num_lists(entries)
    quantizer = faiss.IndexFlatIP(DIMENSION)
    types = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    if precision == "float32":
        index = faiss.IndexIVFFlat(quantizer, DIMENSION, lists, faiss.METRIC_INNER_PRODUCT)
    elif precision == "pq4":
        index = faiss.IndexIVFPQFastScan(quantizer, DIMENSION, lists, DIMENSION // 2, 4, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexIVFScalarQuantizer(
            quantizer, DIMENSION, lists, types[precision], faiss.METRIC_INNER_PRODUCT, False
        )
    index.cp.niter = 10
    index.cp.max_points_per_centroid = PER_LIST
    step = max(entries // (PER_LIST * lists), 1)
    index.train(numpy.concatenate([some[::step].copy() for some in chunks(path)]))
    for some in chunks(path):
        index.add(some)
    file = path.with_suffix(f".ivf-{precision}")
    faiss.write_index(index, str(file))
    del index
    mapped = faiss.read_index(str(file), faiss.IO_FLAG_MMAP)

    def search(queries: numpy.ndarray, effort: int) -> numpy.ndarray:
        return mapped.search(queries, CANDIDATES[precision] * K, params=faiss.SearchParametersIVF(nprobe=effort))[1]

    return search, file


def build_hnsw(path: Path, entries: int, precision: str) -> tuple[Search, Path]:
    """faiss: HNSW, mapped from its file."""
    faiss: Any = importlib.import_module("faiss")
    faiss.omp_set_num_threads(THREADS)
    types = {"float16": faiss.ScalarQuantizer.QT_fp16, "int8": faiss.ScalarQuantizer.QT_8bit}
    if precision == "float32":
        index = faiss.IndexHNSWFlat(DIMENSION, 16, faiss.METRIC_INNER_PRODUCT)
    else:
        index = faiss.IndexHNSWSQ(DIMENSION, types[precision], 16, faiss.METRIC_INNER_PRODUCT)
        index.train(next(chunks(path)))
    index.hnsw.efConstruction = 128
    for some in chunks(path):
        index.add(some)
    file = path.with_suffix(f".hnsw-{precision}")
    faiss.write_index(index, str(file))
    del index
    mapped = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC)

    def search(queries: numpy.ndarray, effort: int) -> numpy.ndarray:
        return mapped.search(queries, CANDIDATES[precision] * K, params=faiss.SearchParametersHNSW(efSearch=effort))[1]

    return search, file


def build_usearch(path: Path, entries: int, precision: str) -> tuple[Search, Path]:
    """usearch: HNSW, mapped from its file."""
    index_class: Any = importlib.import_module("usearch.index").Index
    dtype = {"float32": "f32", "float16": "f16", "int8": "i8"}[precision]
    index = index_class(
        ndim=DIMENSION, metric="cos" if precision == "int8" else "ip", dtype=dtype, connectivity=16, expansion_add=128
    )
    first = 0
    for some in chunks(path):
        index.add(numpy.arange(first, first + len(some)), some, threads=THREADS)
        first += len(some)
    file = path.with_suffix(f".usearch-{precision}")
    index.save(str(file))
    del index
    mapped = index_class.restore(str(file), view=True)

    def search(queries: numpy.ndarray, effort: int) -> numpy.ndarray:
        mapped.expansion_search = effort
        keys = mapped.search(queries, CANDIDATES[precision] * K, threads=THREADS).keys
        return keys.reshape(len(queries), -1).astype(numpy.int64)

    return search, file


BUILD = {"ivf": build_ivf, "hnsw": build_hnsw, "usearch": build_usearch}


def rescored(vectors: numpy.ndarray, queries: numpy.ndarray, candidates: numpy.ndarray) -> Tensor:
    """The best k of the candidates by the float32 vectors."""
    best = []
    for query, rows in zip(queries, candidates, strict=True):
        rows = rows[rows >= 0]
        best.append(rows[numpy.argsort(-(vectors[rows] @ query))[:K]])
    return torch.from_numpy(numpy.stack(best))


def recall(found: Tensor, expected: Tensor) -> float:
    """Share of the true k that were found."""
    return (found[:, :, None] == expected[:, None, :]).any(dim=1).float().mean().item()


def expected_rows(path: Path, queries: Tensor) -> Tensor:
    """The true k of each query, by comparing all."""
    vectors = torch.from_numpy(numpy.memmap(path, numpy.float32, "c").reshape(-1, DIMENSION))
    first, values, rows = 0, torch.empty(len(queries), 0), torch.empty(len(queries), 0, dtype=torch.int64)
    for tile in vectors.split(CHUNK):
        best = (queries @ tile.T).topk(min(K, len(tile)), dim=1)
        values, rows = torch.cat([values, best.values], 1), torch.cat([rows, best.indices + first], 1)
        values, chosen = values.topk(K, dim=1)
        rows, first = rows.gather(1, chosen), first + len(tile)
    return rows


def measure(method: str, entries: int, work: Path, turns: int) -> list[dict[str, Any]]:
    """Build a method and search it: one line for each effort."""
    torch.set_num_threads(THREADS)
    kind, precision = method.split("-")
    path = vector_file(entries, work)
    queries = Mixture(DIMENSION).points(QUERIES, seed=2)
    expected = expected_rows(path, queries)
    peak, start, cpu = PeakMemory(), time.perf_counter(), sum(os.times()[:2])
    search, file = BUILD[kind](path, entries, precision)
    seconds, cpu = time.perf_counter() - start, sum(os.times()[:2]) - cpu
    line: dict[str, Any] = {
        "method": method,
        "entries": entries,
        "build_s": round(seconds, 1),
        "build_cpu_s": round(cpu, 1),
        "build_MiB": round(peak.stop() / 2**20),
        "file_MiB": round(file.stat().st_size / 2**20),
    }
    rows = numpy.fromfile(path, numpy.float32).reshape(-1, DIMENSION)
    vectors = torch.from_numpy(rows)
    lines = []
    for effort in EFFORTS[kind]:
        if kind == "ivf" and effort > num_lists(entries):
            break
        candidates = search(queries.numpy(), effort)
        found: dict[str, Any] = {
            "recall": recall(rescored(rows, queries.numpy(), candidates), expected),
            "recall_unscored": recall(torch.from_numpy(candidates[:, :K].copy()), expected),
        }
        exact, approximate = [], []
        for turn in range(turns):
            query = queries[turn : turn + 1]
            start = time.perf_counter()
            (query @ vectors.T).topk(K)
            between = time.perf_counter()
            rescored(rows, query.numpy(), search(query.numpy(), effort))
            approximate.append(time.perf_counter() - between)
            exact.append(between - start)
        ratio = statistics.median(exact) / statistics.median(approximate)
        times = {"exact_ms": 1e3 * statistics.median(exact), "ms": 1e3 * statistics.median(approximate)}
        lines.append({**line, "effort": effort, **found, "speedup": ratio, **times})
    file.unlink()
    return lines


def table(path: Path) -> str:
    """The lines of a file as Markdown: for each method the least effort with a recall of 0.98, or the greatest."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = ["| method | entries | build, CPU s | build, MiB | file, MiB | effort | recall@10 | unscored | speedup |"]
    rows.append("|" + "---|" * 9)
    for entries in sorted({line["entries"] for line in lines}):
        for method in METHODS:
            mine = [line for line in lines if (line["method"], line["entries"]) == (method, entries)]
            if mine:
                one = next((line for line in mine if line["recall"] >= 0.98), mine[-1])
                sizes = f"{one['build_cpu_s']:,.0f} | {one.get('build_MiB', '')} | {one['file_MiB']:,}"
                recalls = f"{one['recall']:.4f} | {one['recall_unscored']:.4f}"
                speedup = f"{one['speedup']:.0f}" if "speedup" in one else ""
                speed = f"{one['effort']} | {recalls} | {speedup}"
                rows.append(f"| {method} | {entries:,} | {sizes} | {speed} |")
    return "\n".join(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS)
    parser.add_argument("--turns", type=int, default=50)
    parser.add_argument("--work", type=Path, default=Path("."), help="Folder for vectors and indexes.")
    parser.add_argument("--out", type=Path, help="File that gets a line for each method and effort.")
    parser.add_argument("--table", type=Path, help="Print such a file as a table, and measure nothing.")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table is not None:
        print(table(options.table))
    elif options.alone:
        for measured in measure(options.methods[0], options.entries, options.work, options.turns):
            print(json.dumps(measured), flush=True)
    else:
        options.work.mkdir(parents=True, exist_ok=True)
        vector_file(options.entries, options.work)
        for name in options.methods:
            command = [sys.executable, __file__, "--alone", "--methods", name, "--entries", str(options.entries)]
            command += ["--work", str(options.work), "--turns", str(options.turns)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            if options.out is not None:
                with open(options.out, "a") as out:
                    out.write(done.stdout)
