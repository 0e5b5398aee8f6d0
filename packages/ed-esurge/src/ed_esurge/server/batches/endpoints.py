"""`/v1/files` and `/v1/batches`, with OpenAI's formats.

An uploaded file is written to disk while it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse

from ed_esurge.config import ServerLimits
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.fields import Metadata, RequestBody
from ed_esurge.server.http.forms import is_form, read_form
from ed_esurge.server.routing import LISTING, READING, REFUSALS, Endpoint
from ed_esurge.server.stores import OPEN, BatchStore, JsonFields, public, refused_when_full


class BatchRequest(RequestBody):
    """Body of `POST /v1/batches`."""

    input_file_id: str
    endpoint: Literal[
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/score",
        "/v1/rerank",
    ]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None


class StoredFile(AnswerBody):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str


class FileList(AnswerBody):
    """Answer of `GET /v1/files`, newest first."""

    object: Literal["list"]
    data: list[StoredFile]
    has_more: bool


class FileDeleted(AnswerBody):
    """Answer of `DELETE /v1/files/{file_id}`."""

    id: str
    object: Literal["file"]
    deleted: bool


class Counts(AnswerBody):
    """Numbers of lines of a batch."""

    total: int
    completed: int
    failed: int


class BatchObject(AnswerBody):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: Counts
    metadata: dict[str, str] | None


class BatchList(AnswerBody):
    """Answer of `GET /v1/batches`, newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _store(server: ServedModels) -> BatchStore:
    if server.batches is None:
        raise APIError(
            "this server does not store files: start the server with batch_directory to enable "
            "files and batches",
            status=404,
            code="batches_off",
        )
    return server.batches


async def upload(server: ServedModels, request: Request) -> JSONResponse:
    """Store a file.

    Raises:
        APIError: 400, the form is invalid; 413, the file is too large, or the files of the key are;
            429, the key has too many files; 503, the file cannot be written.
    """
    store, owner, limits = _store(server), get_owner(request.scope), server.state.limits
    check_upload_form(request)
    store.check_room(owner)
    with refused_when_full():
        path = store.part()
        try:
            form = await receive_upload(request, limits, path)
            if form.purpose != "batch":
                raise APIError(
                    f"the purpose {form.purpose!r:.50} is not supported: use batch", param="purpose"
                )
            store.check_room(owner, path.stat().st_size)
            fields = store.add_file(form.filename, form.purpose, path, owner)
            return JSONResponse(public(fields))
        finally:
            path.unlink(missing_ok=True)


async def files(server: ServedModels, request: Request) -> JSONResponse:
    """Return the files of the key, newest first."""
    owner_files = _store(server).files(get_owner(request.scope))
    purpose = request.query_params.get("purpose")
    matching_files = [one for one in owner_files if purpose in (None, one["purpose"])]
    page, more = _page(matching_files, request)
    return JSONResponse({"object": "list", "data": page, "has_more": more})


async def file(server: ServedModels, request: Request) -> JSONResponse:
    """Return the metadata of a file. Raises APIError: 404."""
    return JSONResponse(public(_file(server, request)))


async def content(server: ServedModels, request: Request) -> FileResponse:
    """Return the content of a file. Raises APIError: 404."""
    file_record = _file(server, request)
    path = _store(server).content(file_record["id"])
    headers = {"X-Content-Type-Options": "nosniff"}
    return FileResponse(path, media_type="application/octet-stream", headers=headers)


async def _delete_file(server: ServedModels, request: Request) -> JSONResponse:
    """Delete a file. Raises APIError: 404; 409, an unfinished batch reads the file."""
    name = request.path_params["file_id"]
    with refused_when_full():
        _store(server).delete_file(name, get_owner(request.scope))
    return JSONResponse({"id": name, "object": "file", "deleted": True})


def _file(server: ServedModels, request: Request) -> JsonFields:
    return _store(server).file(request.path_params["file_id"], get_owner(request.scope))


async def _create_batch(server: ServedModels, body: BatchRequest, request: Request) -> JSONResponse:
    """Queue a batch.

    Raises:
        APIError: 404, the file does not exist; 429, the key has too many unfinished batches; 503,
            the batch cannot be written.
    """
    with refused_when_full():
        batch = _store(server).add_batch(
            body.input_file_id, body.endpoint, body.metadata, get_owner(request.scope)
        )
    server.batch_added.set()
    return JSONResponse(public(batch))


async def batches(server: ServedModels, request: Request) -> JSONResponse:
    """Return the batches of the key, newest first."""
    page, more = _page(_store(server).batches(get_owner(request.scope)), request)
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return JSONResponse(
        {"object": "list", "data": page, "first_id": ends[0], "last_id": ends[1], "has_more": more}
    )


async def batch(server: ServedModels, request: Request) -> JSONResponse:
    """Return the state of a batch. Raises APIError: 404."""
    return JSONResponse(public(_batch(server, request)))


async def _cancel_batch(server: ServedModels, request: Request) -> JSONResponse:
    """Cancel a batch. Lines in progress are answered, and the answers remain available.

    Raises:
        APIError: 404; 409, the batch has ended.
    """
    batch_record = _batch(server, request)
    if batch_record["status"] not in OPEN:
        raise APIError(f"the batch is {batch_record['status']} and cannot be cancelled", status=409)
    if batch_record["status"] != "cancelling":
        with refused_when_full():
            _store(server).change(batch_record, "cancelling")
    return JSONResponse(public(batch_record))


def _batch(server: ServedModels, request: Request) -> JsonFields:
    return _store(server).batch(request.path_params["batch_id"], get_owner(request.scope))


def _page(all_of_them: list[JsonFields], request: Request) -> tuple[list[JsonFields], bool]:
    """Return the page of a list for `after_id` and `limit`, and whether more pages follow."""
    limit, after_id = request.query_params.get("limit", "20"), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:6]) <= 10_000):
        raise APIError("limit must be 1 to 10000", param="limit", code="invalid_value")
    ids = [one["id"] for one in all_of_them]
    start = ids.index(after_id) + 1 if after_id in ids else 0
    end = start + int(limit[:6])
    return [public(one) for one in all_of_them[start:end]], end < len(ids)


ENDPOINTS = (
    Endpoint(
        "/v1/files",
        "Upload a file of requests as a form with the fields purpose and file.",
        upload,
        StoredFile,
        error_statuses=(*READING, 400, 404, 408, 413, 429),
        method="POST",
    ),
    Endpoint("/v1/files", "List the files.", files, FileList, error_statuses=LISTING),
    Endpoint(
        "/v1/files/{file_id}", "Describe a file.", file, StoredFile, error_statuses=(*READING, 404)
    ),
    Endpoint(
        "/v1/files/{file_id}/content",
        "Return the content of a file.",
        content,
        "application/octet-stream",
        error_statuses=(*READING, 404),
    ),
    Endpoint(
        "/v1/files/{file_id}",
        "Delete a file.",
        _delete_file,
        FileDeleted,
        error_statuses=(*READING, 404, 409),
        method="DELETE",
    ),
    Endpoint(
        "/v1/batches",
        "Answer the requests of a file, line by line.",
        _create_batch,
        BatchObject,
        BatchRequest,
        error_statuses=tuple(REFUSALS),
        method="POST",
        whole_server=True,
    ),
    Endpoint("/v1/batches", "List the batches.", batches, BatchList, error_statuses=LISTING),
    Endpoint(
        "/v1/batches/{batch_id}",
        "Return the progress of a batch.",
        batch,
        BatchObject,
        error_statuses=(*READING, 404),
    ),
    Endpoint(
        "/v1/batches/{batch_id}/cancel",
        "Stop a batch. Lines in progress are answered.",
        _cancel_batch,
        BatchObject,
        error_statuses=(*READING, 404, 409),
        method="POST",
    ),
)


@dataclass(frozen=True)
class Upload:
    """The fields of a form: the name of the file, and its purpose."""

    filename: str
    purpose: str


async def receive_upload(request: Request, limits: ServerLimits, path: Path) -> Upload:
    """Write the file of a form to a path, and return the other fields.

    Raises:
        APIError: 400, the form is invalid; 408, the body is too slow; 413, too long; 503, the
            server has too many bodies in memory.
        OSError: the file cannot be written.
    """
    with path.open("wb") as file:
        form = await read_form(request, file, limits.max_file_bytes, limits.body_timeout)
    if form.filename is None or "purpose" not in form.fields:
        raise APIError("the form requires the fields purpose and file", param="file")
    return Upload(form.filename or "file", form.fields["purpose"][-1])


def check_upload_form(request: Request) -> None:
    """Raise APIError if the body is no form."""
    if not is_form(request):
        raise APIError("send a file as multipart/form-data with the fields purpose and file")
