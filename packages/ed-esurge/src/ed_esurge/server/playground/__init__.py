"""The page at `/`: one file that needs nothing else, put together from the parts in this directory.

It is a client like any other and may do nothing that a request with the same key may not.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

from fastapi import Request
from fastapi.responses import HTMLResponse

from ed_esurge.server.generation.models import ModelServer
from ed_esurge.server.routing import Endpoint


@functools.cache
def page() -> str:
    """The whole page."""
    parts = {part.name: part.read_text("utf-8") for part in files(__name__).iterdir() if _is(part)}
    script = "\n".join(parts[name] for name in sorted(parts) if name.endswith(".js"))
    text = parts["page.html"].replace("{{STYLE}}", parts["style.css"])
    return text.replace("{{SCRIPT}}", script)


def _is(part: object) -> bool:
    return str(part).endswith((".html", ".css", ".js"))


@functools.cache
def policy() -> str:
    """What a browser lets the page do: run its own script, and talk with this server alone."""

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


async def playground(server: ModelServer, request: Request) -> HTMLResponse:
    """The page. It holds nothing of the server: what it shows, it asks for."""
    headers = {
        "Content-Security-Policy": policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return HTMLResponse(page(), headers=headers)


ENDPOINTS = (
    Endpoint(
        "/", "Return the playground page.", playground, "text/html", refusals=(421,), access="open"
    ),
)
