"""Good requests to a server over glyphs, each answer compared with what is computed here."""

from __future__ import annotations

import asyncio
import io
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import torch
from PIL import Image

from pfml.data import ImageSet
from pfml.evaluation.model_evaluation import embed
from pfml.models import load_embedder
from pfml.search import ImageIndex

__all__ = ["Gallery", "good_requests"]

K = 10
#: How far distances may differ: those of uploads are embedded in other batches.
TOLERANCE = 2e-4

Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[str | None]]


class Gallery:
    """What a server over a run must answer; every request gives None, or what was wrong with the answer.

    Args:
        run: Folder of `write_gallery`.
    """

    def __init__(self, run: Path) -> None:
        entries = list(ImageIndex.open(run / "index").entries())
        self.ids = [entry.id for entry in entries]
        self.paths = [Path(entry.path) for entry in entries]
        points = embed(load_embedder(run), ImageSet.unlabeled(self.paths)).double()
        self.distances = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")

    async def visited(self, address: str) -> list[str]:
        """Ask for what is made once: the map, and a picture of every image."""
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            while (await client.get("/api/map")).json()["state"] != "ready":
                await asyncio.sleep(0.1)
            found = [await self._picture(client, row, "thumbnail") for row in range(len(self.ids))]
        return [one for one in found if one is not None]

    async def search_by_id(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        row = chosen.randrange(len(self.ids))
        answer = await client.get("/api/search", params={"id": self.ids[row], "k": K})
        return self._wrong_hits(answer, self.distances[row].sort().values[1 : K + 1], f"search by id {self.ids[row]}")

    async def search_by_upload(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        row = chosen.randrange(len(self.ids))
        files = {"file": ("query.png", self.paths[row].read_bytes())}
        answer = await client.post("/api/search", files=files, data={"k": K})
        return self._wrong_hits(answer, self.distances[row].sort().values[:K], f"search by {self.paths[row].name}")

    async def picture(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        return await self._picture(client, chosen.randrange(len(self.ids)), chosen.choice(SIZES))

    async def listing(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        offset = chosen.randrange(len(self.ids))
        answer = await client.get("/api/images", params={"offset": offset, "limit": 20})
        found = [image["id"] for image in answer.json()["images"]] if answer.status_code == 200 else None
        return None if found == self.ids[offset : offset + 20] else f"images from {offset}: {_shown(answer)}"

    async def page(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        path = chosen.choice(["/", "/page/style.css", "/page/api.js", "/api/status", "/api/classes", "/api/map"])
        answer = await client.get(path)
        return None if answer.status_code == 200 and answer.content else f"{path}: {_shown(answer)}"

    async def why(self, client: httpx.AsyncClient, chosen: random.Random) -> str | None:
        answer = await client.get("/api/why", params={"id": chosen.choice(self.ids)})
        if answer.status_code != 200:
            return f"why: {_shown(answer)}"
        said = answer.json()
        parts = [*said["attracting"], *said["repelling"], said["other_attracting"], said["other_repelling"]]
        total = sum(part["potential"] for part in parts)
        return None if abs(total - said["total"]) <= 1e-9 * max(1, abs(total)) else "why: terms do not add up"

    async def _picture(self, client: httpx.AsyncClient, row: int, size: str) -> str | None:
        answer = await client.get(f"/api/images/{self.ids[row]}/jpeg", params={"size": size})
        if answer.status_code != 200:
            return f"picture {self.ids[row]}: {_shown(answer)}"
        Image.open(io.BytesIO(answer.content)).verify()
        return None

    def _wrong_hits(self, answer: httpx.Response, expected: torch.Tensor, what: str) -> str | None:
        if answer.status_code != 200:
            return f"{what}: {_shown(answer)}"
        found = torch.tensor([hit["distance"] for hit in answer.json()["hits"]], dtype=torch.float64)
        is_right = found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=TOLERANCE)
        return None if is_right else f"{what}: distances {found.tolist()}, not {expected.tolist()}"


SIZES = ("thumbnail", "large")


def _shown(answer: httpx.Response) -> str:
    return f"{answer.status_code} {answer.text[:200]}"


async def good_requests(
    gallery: Gallery, address: str, seconds: float, clients: int, seed: int
) -> tuple[list[float], list[str]]:
    """Seconds of each good request, `clients` of them under way at any time, and what was wrong with the answers.

    Every kind is asked for at least once, however short the time.
    """
    times: list[float] = []
    wrong: list[str] = []
    kinds: list[Ask] = [gallery.search_by_id, gallery.search_by_upload, gallery.picture, gallery.listing, gallery.page]
    kinds.append(gallery.why)
    due = list(kinds)
    end = time.monotonic() + seconds

    async def ask(number: int) -> None:
        chosen = random.Random(1000 * seed + number)
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:
            while due or time.monotonic() < end:
                kind = due.pop() if due else chosen.choice(kinds)
                began = time.perf_counter()
                try:
                    found = await kind(client, chosen)
                except httpx.HTTPError as error:
                    found = f"{kind.__name__}: {type(error).__name__} {error}"
                times.append(time.perf_counter() - began)
                if found is not None:
                    wrong.append(found)

    await asyncio.gather(*(ask(number) for number in range(clients)))
    return times, wrong
