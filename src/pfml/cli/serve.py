"""`pfml serve`: a page over a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pfml.cli.console import create_console, preferred_run, print_model
from pfml.cli.parser import add_backend_option, add_device_option
from pfml.packages import require_packages
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ["add_serve_arguments", "serve"]

#: Environment variable of the token.
TOKEN = "PFML_TOKEN"


def serve(
    run: Path,
    index: Path | None = None,
    backend: str = "auto",
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    token_file: Path | None = None,
    name: list[str] | None = None,
    map_: Literal["auto", "tsne", "umap", "pca"] = "auto",
    map_points: int | None = None,
    upload_megabytes: float = 10.0,
    upload_megapixels: float = 40.0,
    decoded_megapixels: float = 16.0,
    processes: int = 1,
    add_to: Path | None = None,
    access_log: str | None = None,
    rate_limit: str | None = None,
    trusted_proxy: list[str] | None = None,
    device: str = "auto",
) -> None:
    """Serve a page over a run: search by image, the map of the embedding, why an image is there, the audit queue."""
    needed = ("fastapi", "uvicorn", "python_multipart", "prometheus_client")
    require_packages(*needed, purpose="pfml serve", install="pfml[serve]")
    from pfml.serving import Access, Limits, ServerSettings, serve_processes
    from pfml.serving import serve as answer_requests
    from pfml.serving.rate_limit import RateLimit

    if map_points is not None and map_points < 1:
        raise ValueError(f"--map-points must be at least 1, got {map_points}")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must lie in [0, 65535], got {port}")
    if processes < 1:
        raise ValueError(f"--processes must be at least 1, got {processes}")
    # before the model is loaded: refused at once
    access = Access(
        host,
        given_token(token, token_file),
        tuple(name or ()),
        rate_limit=None if rate_limit is None else RateLimit.parse(rate_limit),
        trusted_proxies=tuple(trusted_proxy or ()),
    )
    limits = Limits(
        upload_bytes=round(upload_megabytes * 2**20),
        upload_pixels=round(upload_megapixels * 1e6),
        decoded_pixels=round(decoded_megapixels * 1e6),
    )
    console = create_console(stderr=True)  # scripts read the address from the first line that is printed
    run = preferred_run(console, run)
    settings = ServerSettings(
        run,
        access,
        index=index,
        device=device,
        backend=backend,
        limits=limits,
        map_method=map_,
        map_points=map_points,
        add_to=add_to,
        access_log=access_log,
        processes=processes,
    )
    if processes > 1:
        print_model(console, run)
        serve_processes(settings, port)
        return
    service = settings.service()
    print_model(console, run)
    if service.gallery.index.backend_remark:
        print_line(console, service.gallery.index.backend_remark)
    answer_requests(service, access, port, log=settings.log())


def given_token(token: str | None, file: Path | None) -> str | None:
    """The token of --token, of --token-file or of the environment variable PFML_TOKEN; None if none is given.

    The variable is removed, so that processes which decode uploads do not inherit it.
    """
    variable = os.environ.pop(TOKEN, None)
    if token is not None and file is not None:
        raise ValueError("the server has one token: give --token or --token-file, not both")
    if file is None:
        return variable if token is None else token
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise ValueError(f"--token-file must be text in UTF-8, got {file}") from None
    if len(lines) > 1:
        raise ValueError(f"--token-file must hold the token alone, in one line, got {len(lines)} lines in {file}")
    return "".join(lines).strip()


def add_serve_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `serve`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder, with an index in it.")
    add("--index", type=Path, help="Folder of the index; by default `index` in the run.")
    add_backend_option(parser)
    add_device_option(parser)
    add("--processes", type=int, default=1, help="Processes that answer requests, each with its own model.")
    add(
        "--add-to",
        metavar="FOLDER",
        type=Path,
        help="Folder of images that requests add to the index, and delete from it. Without this option none can.",
    )
    add("--host", default="127.0.0.1", help="Address to bind to; any but this machine's own needs a token.")
    add("--port", type=int, default=8000, help="0 for any free one.")
    add(
        "--token-file",
        type=Path,
        help="File with what requests must carry, at least 16 characters; the page asks for it once. Without this "
        "option, the environment variable PFML_TOKEN.",
    )
    add("--token", help="The token itself, which other users of this machine can see (ps).")
    add("--name", nargs="+", action="extend", help="Further names of this server that a browser may use.")
    add("--rate-limit", metavar="N/s", help="Requests of a client: 10/s, 600/m or 1000/h; more get 429.")
    add(
        "--trusted-proxy",
        metavar="ADDRESS",
        nargs="+",
        action="extend",
        help="Addresses or networks of reverse proxies, which name the client in X-Forwarded-For.",
    )
    add(
        "--access-log",
        metavar="FILE",
        help="File to which each answer is written as a line of JSON; - for stderr.",
    )
    add(
        "--map",
        dest="map_",
        choices=("auto", "tsne", "umap", "pca"),
        default="auto",
        help="How the map is made; auto takes UMAP for more than 5,000 images, if it is installed, else t-SNE.",
    )
    add(
        "--map-points", type=int, help="Images on the map; of more, a sample. By default 5,000 for t-SNE, else 100,000."
    )
    add("--upload-megabytes", type=float, default=10.0, help="Limit of an uploaded file, in MiB.")
    add("--upload-megapixels", type=float, default=40.0, help="Limit of an uploaded image.")
    add(
        "--decoded-megapixels",
        type=float,
        default=16.0,
        help="Pixels that are decoded of an upload: a larger JPEG is decoded at a fraction, any other is refused.",
    )
