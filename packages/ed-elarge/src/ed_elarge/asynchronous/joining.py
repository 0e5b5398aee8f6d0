"""Join a run as an engine or as a process of environments, on any host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ed_esurge.engine.connection import Connection, ConnectionLost, shared_secret

from ed_elarge.asynchronous.environment_worker import EnvironmentWorker
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.model import eLargeModel

ENGINE, ENVIRONMENT = "engine", "environment"


def join_run(address: str, role: str) -> int:
    """Serve a trainer until it ends, and return an exit code.

    The trainer sends the run file, so this process needs only the files that the run file names.

    Args:
        address: `HOST:PORT` of the trainer.
        role: `engine` or `environment`.

    Raises:
        ConnectionLost: there is no trainer at the address.
        ForgedMessageError: the trainer has another secret.
    """
    connection = Connection.open(address, shared_secret())
    connection.send({"do": "hello", "role": role})
    try:
        run: dict[str, Any] = connection.receive()
    except ConnectionLost:
        return 0
    if Path(run["directory"]).is_dir():
        os.chdir(run["directory"])
    elm = eLargeModel.from_run(normalize(Document(run["file"], value=run["sections"])))
    if role == ENGINE:
        from ed_infra.compilation.cache import keep_compiled_programs

        from ed_elarge.asynchronous.engine_worker import EngineWorker

        keep_compiled_programs()
        worker: EngineWorker | EnvironmentWorker = EngineWorker(connection, elm)
    else:
        worker = EnvironmentWorker(connection, elm)
    connection.send({"do": "ready"})
    worker.serve()
    return 0
