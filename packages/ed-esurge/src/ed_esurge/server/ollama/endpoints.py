"""The endpoints of Ollama's API."""

from __future__ import annotations

from ed_esurge.server.ollama import (
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

ENDPOINTS = (
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
