"""A page and an API over a run: search, the map of the embedding, why, and the audit queue.

`pfml serve RUN` is `serve(Service(Gallery.open(RUN)), Access(), 8000)`; see docs/SERVE.md. It needs the extra `serve`.
"""

from pfml.serving.app import create_app
from pfml.serving.gallery import Gallery
from pfml.serving.middleware import Access
from pfml.serving.processes import ServerSettings, serve_processes
from pfml.serving.server import serve
from pfml.serving.service import Limits, Service

__all__ = [
    "Access",
    "Gallery",
    "Limits",
    "ServerSettings",
    "Service",
    "create_app",
    "serve",
    "serve_processes",
]
