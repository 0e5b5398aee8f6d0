"""`GET /props` and `/slots`: the properties of a model, its defaults, and its running sequences."""

from __future__ import annotations

from typing import Any

from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.frontends.llama_cpp.generated import default_settings
from ed_esurge.server.generation.abilities import SPEECH_TASKS
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.models import ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.operations.health import server_version
from ed_esurge.server.routing import READING, Endpoint


class ServerProps(AnswerBody):
    """Answer of `GET /props`. Paths of files are omitted."""

    default_generation_settings: dict[str, Any]
    """`n_ctx`, and under `params` the defaults of sampling options."""
    total_slots: int
    """Maximum number of running sequences."""
    model_alias: str
    chat_template: str
    modalities: dict[str, bool]
    bos_token: str
    eos_token: str
    build_info: str
    is_sleeping: bool


async def props(server: ServedModels, request: Request) -> JSONResponse:
    """Return the properties of a model; query parameter: `model`.

    Raises:
        APIError: 404, the model does not exist.
    """
    name = request.query_params.get("model")
    async with server.using(name, get_owner(request.scope)) as model:
        return JSONResponse(_properties(model))


def _properties(model: ServedModel) -> dict[str, Any]:
    tokenizer = model.prompts.tokenizer
    settings = default_settings(model)
    return {
        "default_generation_settings": {"n_ctx": model.prompts.max_model_len, "params": settings},
        "total_slots": model.engine.config.max_num_seqs,
        "model_alias": model.name,
        "chat_template": model.prompts.template_text,
        "modalities": {
            "vision": "pixel_values" in getattr(model.engine, "input_names", ()),
            "audio": model.task in SPEECH_TASKS
            or getattr(model.engine, "recording_form", None) is not None,
        },
        "bos_token": str(getattr(tokenizer, "bos_token", None) or ""),
        "eos_token": str(getattr(tokenizer, "eos_token", None) or ""),
        "build_info": f"ed-esurge {server_version()}",
        "is_sleeping": model.engine.is_sleeping,
    }


class Slot(AnswerBody):
    """A place for a running sequence. Prompts and outputs of clients are omitted."""

    id: int
    n_ctx: int
    is_processing: bool


class Slots(RootModel[list[Slot]]):
    """Answer of `GET /slots`."""


async def slots(server: ServedModels, request: Request) -> JSONResponse:
    """Return one entry for each sequence that can run; query parameter: `model`.

    The number of entries with `is_processing` is the number of running sequences. Sequences have no
    fixed entries.

    Raises:
        APIError: 404, the model does not exist.
    """
    name = request.query_params.get("model")
    async with server.using(name, get_owner(request.scope)) as model:
        stats = model.engine.replica_stats()
        running = int(sum(one["num_requests_running"] for one in stats))
        count = model.engine.config.max_num_seqs * len(stats)
        length = model.prompts.max_model_len
    return JSONResponse(
        [
            {"id": place, "n_ctx": length, "is_processing": place < running}
            for place in range(max(count, running))
        ]
    )


ENDPOINTS = (
    Endpoint(
        "/props",
        "Return the properties of a model in the format of llama.cpp's server.",
        props,
        ServerProps,
        error_statuses=(*READING, 400, 404, 500, 503),
    ),
    Endpoint(
        "/slots",
        "Return the places for sequences in the format of llama.cpp's server.",
        slots,
        Slots,
        error_statuses=(*READING, 400, 404, 500, 503),
    ),
)
