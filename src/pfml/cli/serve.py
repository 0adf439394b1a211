"""`pfml serve`: a page over a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pfml.cli.console import create_console, preferred_run, print_model
from pfml.cli.parser import add_device_option
from pfml.packages import require_packages

if TYPE_CHECKING:
    from argparse import ArgumentParser

__all__ = ["add_serve_arguments", "serve"]

#: Environment variable of the token.
TOKEN = "PFML_TOKEN"


def serve(
    run: Path,
    index: Path | None = None,
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
    device: str = "auto",
) -> None:
    """Serve a page over a run: search by image, the map of the embedding, why an image is there, the audit queue."""
    require_packages("fastapi", "uvicorn", "python_multipart", purpose="pfml serve", install="pfml[serve]")
    from pfml.serving import Access, Gallery, Limits, Service
    from pfml.serving import serve as answer_requests

    if map_points is not None and map_points < 1:
        raise ValueError(f"--map-points must be at least 1, got {map_points}")
    if not 0 <= port <= 65535:
        raise ValueError(f"--port must lie in [0, 65535], got {port}")
    # before the model is loaded: refused at once
    access = Access(host, given_token(token, token_file), tuple(name or ()))
    limits = Limits(
        upload_bytes=round(upload_megabytes * 2**20),
        upload_pixels=round(upload_megapixels * 1e6),
        decoded_pixels=round(decoded_megapixels * 1e6),
    )
    console = create_console(stderr=True)  # scripts read the address from the first line that is printed
    run = preferred_run(console, run)
    gallery = Gallery.open(run, index=index, device=device)
    print_model(console, run)
    answer_requests(Service(gallery, limits=limits, map_method=map_, map_points=map_points), access, port)


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
    add_device_option(parser)
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
