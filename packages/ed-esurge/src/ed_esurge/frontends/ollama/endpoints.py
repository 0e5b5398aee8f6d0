"""The endpoints of Ollama's API."""

from __future__ import annotations

from dataclasses import replace

from ed_esurge.frontends.ollama import (
    chat,
    create,
    embed,
    generate,
    listings,
    show,
)
from ed_esurge.frontends.ollama.replies import OLLAMA

_ENDPOINTS = (
    *chat.ENDPOINTS,
    *generate.ENDPOINTS,
    *embed.ENDPOINTS,
    *show.ENDPOINTS,
    *listings.ENDPOINTS,
    *create.ENDPOINTS,
)
ENDPOINTS = tuple(replace(endpoint, api=OLLAMA) for endpoint in _ENDPOINTS)
