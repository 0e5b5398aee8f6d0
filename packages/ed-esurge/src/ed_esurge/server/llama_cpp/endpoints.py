"""The endpoints of llama.cpp's server."""

from __future__ import annotations

from ed_esurge.server.llama_cpp import apply_template, infill, props, slots

ENDPOINTS = (
    *props.ENDPOINTS,
    *slots.ENDPOINTS,
    *infill.ENDPOINTS,
    *apply_template.ENDPOINTS,
)
