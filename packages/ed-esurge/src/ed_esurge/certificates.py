"""The certificate of a model directory, as the server shows it.

`elarge certify` writes certificate.json: checks that the model is the model that was trained. The
server reads the file as data. A damaged file is ignored, because a model serves without one. A file
whose hashes differ from the files of the model is ignored, too: it belongs to another model, or the
model was changed. Large files are hashed in a thread, and the certificate appears afterwards.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from functools import lru_cache
from pathlib import Path
from typing import Any

from ed_infra.logging import get_logger

logger = get_logger(__name__)
_NAME = "certificate.json"
#: Statuses of checks, and their names in the summary.
STATUSES = {"passed": "passed", "failed": "failed", "not applicable": "not_applicable"}
_MAX_BYTES = 2**20
_MAX_LISTED = 64
_MAX_NAME = 64
_MAX_CACHED = 256
#: Suffixes of the files of a model that a certificate contains with their hashes.
_SUFFIXES = (".json", ".jinja", ".safetensors", ".model", ".txt")
#: Bytes of a file that is hashed at once; larger files are hashed in a thread.
_SMALL = 2**24
_MAX_FILES = 4096
#: Hash by path, time, size and number of a file; None while a thread computes the hash.
_hashes: dict[tuple[str, int, int, int], str | None] = {}
_lock = threading.Lock()


def certificate_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the certificate of a model.

    Args:
        folder: directory of the model. For the folder `model` of a run, the certificate may be in
            the output folder of the run.

    Returns:
        The number of checks with each status, and the names of the failed checks. None without a
        readable certificate whose hashes are those of the files.
    """
    places = [folder, *([folder.parent] if folder.name == "model" else [])]
    path = next((place / _NAME for place in places if (place / _NAME).is_file()), None)
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:  # deleted in the meantime
        return None
    parsed_certificate = _summary(path.resolve(), status.st_mtime_ns, status.st_size)
    if parsed_certificate is None:
        return None
    summary, hashes = parsed_certificate
    model = next((p for p in (folder, folder / "model") if (p / "config.json").is_file()), folder)
    problem = _difference(model, hashes)
    if problem:
        logger.warning("%s is ignored, because %s", path, problem)
    return copy.deepcopy(summary) if problem is None else None


def _difference(folder: Path, hashes: dict[str, str]) -> str | None:
    """Return how the files of a model differ from a certificate; an empty text while a large file
    is hashed, None if they are equal."""
    pending = False
    try:
        files = [
            file
            for file in (sorted(folder.iterdir()) if folder.is_dir() else ())
            if file.suffix in _SUFFIXES and file.name != _NAME and file.is_file()
        ]
        names = {file.name for file in files}
        if missing := sorted(hashes.keys() - names):
            return f"the model has no file {missing[0][:_MAX_NAME]!r}"
        for file in files:
            if file.name not in hashes:
                return f"it has no hash of {file.name[:_MAX_NAME]!r}"
            digest = _get_hash(file)
            if digest is None:
                pending = True
            elif digest != hashes[file.name]:
                return f"{file.name[:_MAX_NAME]!r} has another hash"
    except OSError as error:
        return f"the files of the model cannot be read ({error.strerror})"
    return "" if pending else None


def _get_hash(file: Path) -> str | None:
    """Return the hash of a file; None while a thread computes the hash."""
    status = file.stat()
    key = (str(file), status.st_mtime_ns, status.st_size, status.st_ino)
    with _lock:
        if key in _hashes:
            return _hashes[key]
        if len(_hashes) >= _MAX_FILES:
            _hashes.clear()
        _hashes[key] = None

    def compute() -> None:
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError:
            digest = "unreadable"
        with _lock:
            _hashes[key] = digest

    if status.st_size > _SMALL:
        threading.Thread(target=compute, name="certificate", daemon=True).start()
        return None
    compute()
    with _lock:
        return _hashes[key]


@lru_cache(_MAX_CACHED)
def _summary(path: Path, modified: int, size: int) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Return the summary of a file, and the hashes of the files of the model.

    A changed file has another time or size, and is read again.
    """
    try:
        if size > _MAX_BYTES:
            raise ValueError(f"the file has more than {_MAX_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"))
        checks, hashes = content["checks"], dict(content.get("files", {}))
        if not all(isinstance(text, str) for pair in hashes.items() for text in pair):
            raise ValueError("a hash is no text")
        statuses = [(str(check["name"])[:_MAX_NAME], check["status"]) for check in checks]
        counts = {
            name: sum(status == status_key for _, status in statuses)
            for status_key, name in STATUSES.items()
        }
        if sum(counts.values()) != len(statuses):
            raise ValueError("a check has an unknown status")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("%s is ignored, because it is no certificate: %s", path, str(error)[:200])
        return None
    failed = [name for name, status in statuses if status == "failed"]
    return {**counts, "failed_checks": failed[:_MAX_LISTED]}, hashes
