"""The endpoints of llama.cpp's server."""

from __future__ import annotations

from ed_esurge.server.llama_cpp import (
    apply_template,
    completion,
    infill,
    input_tokens,
    props,
    slots,
)

ENDPOINTS = (
    *props.ENDPOINTS,
    *slots.ENDPOINTS,
    *completion.ENDPOINTS,
    *infill.ENDPOINTS,
    *input_tokens.ENDPOINTS,
    *apply_template.ENDPOINTS,
)
