"""The endpoints of Ollama's API."""

from __future__ import annotations

from dataclasses import replace

from ed_esurge.frontends.ollama import (
    chat,
    copies,
    create,
    delete,
    embed,
    generate,
    ps,
    show,
    tags,
    transfers,
    version,
)
from ed_esurge.frontends.ollama.replies import OLLAMA

_ENDPOINTS = (
    *chat.ENDPOINTS,
    *generate.ENDPOINTS,
    *embed.ENDPOINTS,
    *tags.ENDPOINTS,
    *show.ENDPOINTS,
    *ps.ENDPOINTS,
    *version.ENDPOINTS,
    *create.ENDPOINTS,
    *copies.ENDPOINTS,
    *delete.ENDPOINTS,
    *transfers.ENDPOINTS,
)
ENDPOINTS = tuple(replace(endpoint, api=OLLAMA) for endpoint in _ENDPOINTS)
