"""Sampling fields that the requests of several APIs share."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from ed_esurge.sampling import MAX_STOPS, Word
from ed_esurge.server.http.errors import InvalidField
from ed_esurge.server.http.fields import RequestBody, few


class LlamaSamplers(RequestBody):
    """Samplers of llama.cpp, with its names; the meanings are those of `SamplingParams`."""

    typical_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_n_sigma: Annotated[float | None, Field(ge=-1, le=1e6)] = None
    xtc_probability: Annotated[float | None, Field(ge=0, le=1)] = None
    xtc_threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    dry_multiplier: Annotated[float | None, Field(ge=0, le=1e6)] = None
    dry_base: Annotated[float | None, Field(ge=1, le=1e6)] = None
    dry_allowed_length: Annotated[int | None, Field(ge=1, lt=2**31)] = None
    dry_penalty_last_n: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    dry_sequence_breakers: Annotated[list[Word] | None, few(MAX_STOPS)] = None
    mirostat: Annotated[int | None, Field(ge=0, le=2)] = None
    mirostat_tau: Annotated[float | None, Field(ge=0, le=100)] = None
    mirostat_eta: Annotated[float | None, Field(ge=0, le=1)] = None


#: Names of these fields.
LLAMA_SAMPLERS = tuple(LlamaSamplers.model_fields)


def _stops(value: object) -> object:
    if value is None:
        return []
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and any(stop == "" for stop in stops):
        raise InvalidField("an empty stop string would end every answer immediately")
    return stops


Stops = Annotated[list[Word], BeforeValidator(_stops), few(MAX_STOPS)]
