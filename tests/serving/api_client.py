"""Requests to an application without a network, and uploads of every kind."""

import asyncio
import io

import httpx
from PIL import Image

from pfml.serving import Access, Gallery, Limits, Service, create_app

BASE = "http://127.0.0.1:8000"


def service_of(run, **options):
    return Service(Gallery.open(run, device="cpu"), map_method="pca", **options)


def application(run, access=None, **limits):
    return create_app(service_of(run, limits=Limits(**limits)), access or Access())


def ask(app, method, path, base=BASE, **options):
    """One request; the answer."""

    async def asked():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url=base) as client:
            return await client.request(method, path, **options)

    return asyncio.run(asked())


def got(app, path, **parameters):
    """The JSON of a GET that must succeed."""
    answer = ask(app, "GET", path, params=parameters)
    assert answer.status_code == 200, answer.text
    return answer.json()


def image_bytes(color=(20, 40, 220), size=(24, 24), format="PNG", **options):  # noqa: A002
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, format, **options)
    return out.getvalue()


def upload(app, content, **form):
    return ask(app, "POST", "/api/search", files={"file": ("x.png", content)}, data=form)
