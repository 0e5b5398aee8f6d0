"""`GET /slots`: how many sequences of a model run."""

from __future__ import annotations

from pydantic import RootModel
from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.routing import READING, Endpoint


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
        "/slots",
        "Return the places for sequences in the format of llama.cpp's server.",
        slots,
        Slots,
        refusals=(*READING, 400, 404, 500, 503),
    ),
)
