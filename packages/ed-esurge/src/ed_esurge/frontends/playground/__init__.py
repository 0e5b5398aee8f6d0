"""The playground page at `/`: one HTML file, assembled from the parts in this directory.

The page is a regular client, with the permissions of its API key.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import HTMLResponse

from ed_esurge.frontends.playground.assembly import assemble_page
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.routing import Endpoint


@functools.cache
def page() -> str:
    """Return the page."""
    folder = files(__name__)
    return assemble_page(folder.joinpath("page.html").read_text("utf-8"), folder)


@functools.cache
def policy() -> str:
    """Return the content security policy: only the page's script, and requests to this server."""

    def source(tag: str) -> str:
        inner = page().split(f"<{tag}", 1)[1].split(">", 1)[1].split(f"</{tag}>", 1)[0]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        return f"'sha256-{digest}'"

    rules = {
        "default-src": "'none'",
        "script-src": source("script"),
        "style-src": source("style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


async def playground(server: ServedModels, request: Request) -> HTMLResponse:
    """Return the page, which contains no data of the server."""
    headers = {
        "Content-Security-Policy": policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(page(), headers=headers)


ENDPOINTS = (
    Endpoint(
        "/",
        "Return the playground page.",
        playground,
        "text/html",
        error_statuses=(421,),
        access="open",
    ),
)
