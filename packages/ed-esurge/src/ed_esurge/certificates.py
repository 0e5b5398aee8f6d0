"""The certificate of a model directory, as the server shows it.

`elarge certify` writes certificate.json: checks that the model is the model that was trained. The
server reads the file as data. A damaged file is ignored, because a model serves without one.
"""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ed_infra.logging import get_logger

logger = get_logger(__name__)
NAME = "certificate.json"
#: Statuses of checks, and their names in the summary.
STATUSES = {"passed": "passed", "failed": "failed", "not applicable": "not_applicable"}
_MAX_BYTES = 2**20
_MAX_LISTED = 64
_MAX_NAME = 64
_MAX_CACHED = 256


def certificate_summary(folder: Path) -> dict[str, Any] | None:
    """Return the summary of the certificate of a model.

    Args:
        folder: directory of the model. For the folder `model` of a run, the certificate may be in
            the output folder of the run.

    Returns:
        The number of checks with each status, and the names of the failed checks. None without a
        readable certificate.
    """
    places = [folder, *([folder.parent] if folder.name == "model" else [])]
    path = next((place / NAME for place in places if (place / NAME).is_file()), None)
    if path is None:
        return None
    try:
        status = path.stat()
    except OSError:  # deleted in the meantime
        return None
    return copy.deepcopy(_summary(path.resolve(), status.st_mtime_ns, status.st_size))


@lru_cache(_MAX_CACHED)
def _summary(path: Path, modified: int, size: int) -> dict[str, Any] | None:
    """Return the summary of a file. A changed file has another time or size, and is read again."""
    try:
        if size > _MAX_BYTES:
            raise ValueError(f"the file has more than {_MAX_BYTES} bytes")
        checks = json.loads(path.read_text(encoding="utf-8"))["checks"]
        found = [(str(check["name"])[:_MAX_NAME], check["status"]) for check in checks]
        counts = {
            name: sum(status == known for _, status in found) for known, name in STATUSES.items()
        }
        if sum(counts.values()) != len(found):
            raise ValueError("a check has an unknown status")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        logger.warning("%s is ignored, because it is no certificate: %s", path, str(error)[:200])
        return None
    failed = [name for name, status in found if status == "failed"]
    return {**counts, "failed_checks": failed[:_MAX_LISTED]}
