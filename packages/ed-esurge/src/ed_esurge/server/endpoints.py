"""All endpoints. A new endpoint is a module with `ENDPOINTS`, and an entry here."""

from __future__ import annotations

from dataclasses import replace

from ed_esurge.server import easylm
from ed_esurge.server.batches import endpoints as batches
from ed_esurge.server.llama_cpp import endpoints as llama_cpp
from ed_esurge.server.messages import endpoint as messages
from ed_esurge.server.ollama import endpoints as ollama
from ed_esurge.server.openai import (
    chat,
    classification,
    completions,
    embeddings,
    pooling,
    ranking,
    tokens,
    transcriptions,
)
from ed_esurge.server.operations import admin, health, weights
from ed_esurge.server.playground import ENDPOINTS as PLAYGROUND
from ed_esurge.server.responses import endpoint as responses

_ENDPOINTS = (
    *PLAYGROUND,
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *ollama.ENDPOINTS,
    *llama_cpp.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *pooling.ENDPOINTS,
    *ranking.ENDPOINTS,
    *classification.ENDPOINTS,
    *transcriptions.ENDPOINTS,
    *batches.ENDPOINTS,
    *tokens.ENDPOINTS,
    *easylm.ENDPOINTS,
    *admin.ENDPOINTS,
    *weights.ENDPOINTS,
    *health.ENDPOINTS,
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
_BY_PATH = {endpoint.path: endpoint for endpoint in _ENDPOINTS}
ENDPOINTS = (
    *_ENDPOINTS,
    *(replace(_BY_PATH[path], path=alias, batched=False) for alias, path in ALIASES.items()),
)

#: The endpoints that the lines of a batch may call, by path.
BATCHED = {endpoint.path: endpoint for endpoint in ENDPOINTS if endpoint.batched}
