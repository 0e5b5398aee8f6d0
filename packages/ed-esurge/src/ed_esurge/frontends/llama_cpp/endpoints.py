"""The endpoints of llama.cpp's server, and its further paths of other endpoints."""

from __future__ import annotations

from dataclasses import replace

from ed_esurge.frontends.llama_cpp import (
    completion,
    conversations,
    infill,
    props,
)
from ed_esurge.server.endpoints import ENDPOINTS as SERVER_ENDPOINTS

_ENDPOINTS = (
    *props.ENDPOINTS,
    *completion.ENDPOINTS,
    *infill.ENDPOINTS,
    *conversations.ENDPOINTS,
)
#: Further paths of llama.cpp's server -> the path of the same endpoint.
ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/audio/transcriptions": "/v1/audio/transcriptions",
    "/models": "/v1/models",
    "/reranking": "/v1/rerank",
    "/v1/reranking": "/v1/rerank",
    "/v1/health": "/health",
}
_BY_PATH = {endpoint.path: endpoint for endpoint in (*SERVER_ENDPOINTS, *_ENDPOINTS)}
ENDPOINTS = (
    *_ENDPOINTS,
    *(replace(_BY_PATH[path], path=alias, batched=False) for alias, path in ALIASES.items()),
)
