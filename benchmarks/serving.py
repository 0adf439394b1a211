"""How long searches by upload take when many come at a time, over a running `pfml serve`.

pfml serve RUN --port 8000 &
python benchmarks/serving.py http://127.0.0.1:8000 IMAGE
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import httpx


async def latencies(address: str, content: bytes, searches: int, concurrency: int) -> list[float]:
    """Seconds of each search, `concurrency` of them under way at any time."""
    slots = asyncio.Semaphore(concurrency)
    limits = httpx.Limits(max_connections=concurrency)

    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as client:

        async def search() -> float:
            async with slots:
                began = time.perf_counter()
                answer = await client.post("/api/search", files={"file": ("query", content)})
                answer.raise_for_status()
                return time.perf_counter() - began

        return await asyncio.gather(*(search() for _ in range(searches)))


def main() -> None:
    """Print the latencies of single searches and of many at a time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("address")
    parser.add_argument("image", type=Path)
    parser.add_argument("--searches", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=50)
    options = parser.parse_args()
    content = options.image.read_bytes()
    asyncio.run(latencies(options.address, content, 5, 1))  # warm
    single = statistics.median(asyncio.run(latencies(options.address, content, 20, 1)))
    began = time.perf_counter()
    many = sorted(asyncio.run(latencies(options.address, content, options.searches, options.concurrency)))
    seconds = time.perf_counter() - began
    p50, p99 = many[len(many) // 2], many[min(len(many) - 1, round(0.99 * len(many)))]
    print(f"single search: {1000 * single:.0f} ms (median of 20)")
    print(f"{options.searches} searches, {options.concurrency} at a time: {options.searches / seconds:.1f} a second")
    print(
        f"p50 {1000 * p50:.0f} ms = {p50 / single:.1f} x single, p99 {1000 * p99:.0f} ms = {p99 / single:.1f} x single"
    )


if __name__ == "__main__":
    main()
