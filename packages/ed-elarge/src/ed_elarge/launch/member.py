"""A member of an elastic run: the program on a host that starts the processes of the run.

The member imports all modules once and then forks, so that a process starts in a second instead of
ten. The launcher writes requests to standard input, one JSON value per line, and reads reports from
standard output. The output of the processes goes to standard error.

    {"begin": {variables}}   start a process; reported as {"ended": [code, newest copy, port]}
    {"stop": true}           let the process save and end
    {"kill": true}           kill the process
    {"end": true}            remove the copies of the state, and end

A member reports `{"joined": [host name, free port]}` when it is ready, and `{"alive": true}` every
second. When the launcher is gone, the process saves and ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ed_infra.compilation.private_files import make_private

from ed_elarge.launch.host_process import free_port

#: Seconds between two looks, between two signs of life, and without a sign of life after which a
#: process is killed.
_LOOK, _BEAT, SILENCE = 0.05, 1.0, 15.0
#: Seconds after which a request to stop is sent to a process that has not written a copy.
_PATIENCE = 60.0
#: Seconds in which a process must save after the launcher is gone.
_GRACE = 300.0
#: Age in seconds at which the copies of other launches are removed.
_OLD = 86400.0
_PARENT_DEATH = 1  # PR_SET_PDEATHSIG of Linux


def run_member(folder: str, words: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Serve the requests of the launcher, and return an exit code.

    The function also returns in every forked process, with the exit code of the run.

    Args:
        folder: `LAUNCH/MEMBER`, the folder of the copies of the state below the folder of the user.
        words: the run file, and words of the command line after it.
        run: executes the words.
    """
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    base = root / f"elarge-{os.getuid()}"
    make_private(base)
    copies = base / folder
    copies.mkdir(parents=True, exist_ok=True)
    # The descriptor stays open in this process and in its forks, and so does the lock.
    descriptor = lock_folder(copies)
    remove_abandoned_members(base)
    _prepare(words[0])
    try:
        return _Member(copies, words, run).serve()
    finally:
        os.close(descriptor)


def lock_folder(copies: Path) -> int:
    """Lock the folder of a member until the descriptor is closed in all its processes."""
    descriptor = os.open(_lock_file(copies), os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(OSError):  # another process of the same member still ends
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def remove_folder(copies: Path) -> None:
    """Delete the folder of a member and its lock; the last member deletes that of the launch."""
    shutil.rmtree(copies, ignore_errors=True)
    _lock_file(copies).unlink(missing_ok=True)
    with suppress(OSError):  # another member of this host has copies
        copies.parent.rmdir()


def _lock_file(copies: Path) -> Path:
    return copies.parent / f".{copies.name}.lock"


def remove_abandoned_members(base: Path) -> None:
    """Delete the copies of launches that ended a day ago.

    The locks decide whether a launch runs: a clock may jump, and writing a copy does not change the
    time of the launch's folder.
    """
    for launch in base.iterdir():
        with suppress(OSError):  # another member may delete the folder, too
            if time.time() - launch.stat().st_mtime > _OLD and not _is_locked(launch):
                shutil.rmtree(launch, ignore_errors=True)


def _is_locked(launch: Path) -> bool:
    for file in launch.glob(".*.lock"):
        descriptor = os.open(file, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


def _prepare(file: str) -> None:
    """Import the modules of the run, but use no device: then jax has no threads before a fork.

    Each process of the run would import a missing module again.
    """
    import ed_data.build  # noqa: F401
    import ed_models.auto
    import ed_models.checkpoints.tokenizers  # noqa: F401
    import ed_trainers.trainer  # noqa: F401
    import transformers.convert_slow_tokenizer  # noqa: F401
    from ed_infra import registry
    from ed_infra.compilation.cache import IMPORTED
    from ed_infra.compilation.fingerprint import NoFingerprintError, source_hash
    from ed_layers.attention.kernels import kernels
    from ed_trainers.methods import trainer_class
    from ed_trainers.step_program import TRAINING_PACKAGES

    import ed_elarge.actions.execution
    import ed_elarge.building.parts
    import ed_elarge.building.tokenizer_training
    import ed_elarge.engine.end_tokens
    import ed_elarge.evaluation.heldout_metrics  # noqa: F401
    from ed_elarge.config import nodes
    from ed_elarge.config.normalize import normalize

    with suppress(Exception):  # the process of the run reports what is wrong with its file
        kernels()
        run = normalize(nodes.read_yaml(file), require_actions=True)
        assert run.model is not None
        trainer_class(run.method)
        config = run.model.config
        if config is None:
            config = json.loads((Path(run.model.name_or_path or "") / "config.json").read_text())
        registry.get_config(config["model_type"])
    with suppress(NoFingerprintError):  # the processes find their compiled step by these hashes
        for package in (*TRAINING_PACKAGES, "optax"):
            source_hash(package, IMPORTED)


class _Member:
    """The loop over requests, signs of life and the end of the process."""

    def __init__(self, copies: Path, words: Sequence[str], run: Callable[[Sequence[str]], int]):
        self._copies, self._words, self._run = copies, words, run
        self._child: int | None = None
        self._beats = -1  # where the process writes its signs of life
        self._heard = self._told = 0.0
        self._begun = 0.0  # time of the clock, as of files
        self._asked: float | None = None  # when the process was asked to stop
        self._buffer = b""
        self._open = True  # whether the launcher is there
        self._ends = False

    def serve(self) -> int:
        self._report(joined=[socket.gethostname(), free_port()])
        limit = float("inf")
        previous_time = time.monotonic()
        while True:
            ready = [0] if self._open else []
            select.select(ready, [], [], _LOOK)
            now = time.monotonic()
            if now - previous_time > SILENCE / 3:  # this machine stood still, and the process too
                self._heard = now
            previous_time = now
            for request in self._requests():
                code = self._handle(request)
                if code is not None:
                    return code
            if self._child is not None:
                self._look(now)
            if not self._open and self._child is not None and limit == float("inf"):
                limit = now + _GRACE
                self._asked = now
            if now > limit:
                self._signal(signal.SIGKILL)
            if self._child is None and (self._ends or not self._open):
                remove_folder(self._copies)
                return 0
            if self._open and now - self._told > _BEAT:
                self._told = now
                self._report(alive=True)

    def _requests(self) -> list[dict[str, Any]]:
        if not self._open or not select.select([0], [], [], 0)[0]:
            return []
        data = os.read(0, 1 << 16)
        self._open = bool(data)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def _handle(self, request: dict[str, Any]) -> int | None:
        """Handle a request; return an exit code in a new process."""
        if "begin" in request and self._child is None:
            return self._begin(request["begin"])
        if "stop" in request:
            self._asked = time.monotonic()
        if "kill" in request:
            self._signal(signal.SIGKILL)
        if "end" in request:
            self._ends = True
            self._signal(signal.SIGKILL)
        return None

    def _begin(self, variables: dict[str, str]) -> int | None:
        beats, beating = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            # jax warns of its threads, which do not exist before it has a device.
            warnings.simplefilter("ignore", RuntimeWarning)
            child = os.fork()
        if child:
            os.close(beating)
            self._child, self._beats, self._heard = child, beats, time.monotonic()
            self._begun, self._asked = time.time(), None
            return None
        _end_with_parent()
        os.close(beats)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.environ.update(variables)
        threading.Thread(target=_beat, args=(beating,), daemon=True).start()
        return self._run([*self._words, "--set", f"trainer.memory_directory={self._copies}"])

    def _look(self, now: float) -> None:
        """Read the signs of life of the process, and report its end."""
        assert self._child is not None
        done, status = os.waitpid(self._child, os.WNOHANG)
        if done:
            os.close(self._beats)
            self._child = None
            steps = [int(p.stem) for p in self._copies.glob("*.copy") if p.stem.isdecimal()]
            code = os.waitstatus_to_exitcode(status)
            self._report(ended=[code, max(steps, default=-1), free_port()])
            return
        if self._asked is not None:
            # Before a run trains, jax ignores the signal. A new copy shows that the run trains.
            trains = False
            with suppress(FileNotFoundError):  # a newer copy has replaced the file
                trains = any(p.stat().st_mtime > self._begun for p in self._copies.glob("*.copy"))
            if trains or now - self._asked > _PATIENCE:
                self._asked = None if trains else now
                self._signal(signal.SIGTERM)
        if select.select([self._beats], [], [], 0)[0] and os.read(self._beats, 1 << 12):
            self._heard = now
        if now - self._heard > SILENCE:
            print(f"the process gave no sign of life for {SILENCE:g} s", file=sys.stderr)
            self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._child is not None:
            os.kill(self._child, number)

    def _report(self, **report: object) -> None:
        try:
            print(json.dumps(report), flush=True)
        except OSError:  # the launcher is gone
            self._open = False


def _beat(pipe: int) -> None:
    with suppress(OSError):
        while True:
            os.write(pipe, b".")
            time.sleep(_BEAT)


def _end_with_parent() -> None:
    """Let this process end when the member ends; Linux only."""
    with suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
