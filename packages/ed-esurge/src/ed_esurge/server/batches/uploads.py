"""Uploads of `/v1/files`, which are written to disk while they arrive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from ed_esurge.config import ServerLimits
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.http.forms import is_form, read_form


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
