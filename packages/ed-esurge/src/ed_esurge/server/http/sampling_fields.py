"""Sampling fields that the requests of several APIs share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator

from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import few

#: Fields of requests and sampling options with llama.cpp's names.
LLAMA_SAMPLERS = (
    *("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "mirostat", "mirostat_tau", "mirostat_eta"),
)


def _stops(value: object) -> object:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and any(stop == "" for stop in stops):
        raise InvalidField("an empty stop string would end every answer immediately")
    return stops


Stops = Annotated[list[Word], BeforeValidator(_stops), few(MAX_STOPS)]
