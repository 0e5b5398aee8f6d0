"""A directory of models that are loaded when a request needs them, within a limit of memory."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ed_infra.errors import ConfigError

from ed_esurge.frontends.library.checkpoint_files import CheckpointCache, CheckpointFiles
from ed_esurge.server.activity import Activity

logger = logging.getLogger(__name__)

#: Maximum number of models of a directory.
MAX_MODELS = 1024
#: Seconds after which the names of the models are read again.
NAMES_SECONDS = 1.0
#: Maximum number of bytes of a folder's name, as in the file systems of Linux.
MAX_NAME_BYTES = 255


class LoadableModel(Protocol):
    """A loaded model of the directory."""

    activity: Activity | None


ServedT = TypeVar("ServedT", bound=LoadableModel)


@dataclass
class LoadedModel(Generic[ServedT]):
    """A model in memory.

    Attributes:
        size: bytes of weights and pages.
        load_seconds: duration of loading.
    """

    model: ServedT
    size: int
    load_seconds: float

    @property
    def activity(self) -> Activity:
        """The running requests of the model."""
        assert self.model.activity is not None, "`load` has set it"
        return self.model.activity


def _is_folder_name(part: str) -> bool:
    """Return whether a part of a name of a client can be the name of a folder here."""
    return (
        part != ""
        and not part.startswith(".")
        and len(part.encode(errors="replace")) <= MAX_NAME_BYTES
    )


def _folders(folder: Path) -> list[Path]:
    """Return the folders with usual names in a folder, sorted; none if it cannot be read."""
    try:
        return [path for path in sorted(folder.iterdir()) if _is_usual(path)]
    except OSError:
        return []


def _is_usual(path: Path) -> bool:
    """Return whether a path is a folder with a name that answers can contain."""
    try:
        path.name.encode()  # names of Linux can be other bytes
        return path.is_dir() and not path.name.startswith(".") and path.name.isprintable()
    except (OSError, UnicodeEncodeError):
        return False


class ModelDirectory(Generic[ServedT]):
    """The models of a directory.

    A model is loaded by its first request. A model is unloaded after a time without requests, or
    when another model needs the memory: the least recently used model without running requests
    first. If all loaded models have running requests, the request waits.

    Args:
        folder: each subfolder with a checkpoint is a model; `a/b` is a model of a subfolder.
        load: loads a model in a thread: `(name, files)` -> the model and its size in bytes.
        unload: frees the memory of a model.
        estimate: returns the bytes that a model will need.
        memory: limit of the bytes of the loaded models; None = no limit.
        keep_alive: seconds without requests after which a model is unloaded.
        max_model_len: limit of the length of a sequence of every model; None = that of the model.
    """

    def __init__(
        self,
        folder: Path,
        *,
        load: Callable[[str, CheckpointFiles], Awaitable[tuple[ServedT, int]]],
        unload: Callable[[ServedT], Awaitable[None]],
        estimate: Callable[[CheckpointFiles], int],
        memory: int | None = None,
        keep_alive: float = 300.0,
        max_model_len: int | None = None,
    ) -> None:
        if not folder.is_dir():
            raise ConfigError(f"the directory of models {folder} does not exist")
        self.folder, self.memory, self.keep_alive = folder, memory, keep_alive
        self.max_model_len = max_model_len
        self._load, self._unload, self._estimate = load, unload, estimate
        self.loaded: dict[str, LoadedModel[ServedT]] = {}
        self._lock = asyncio.Lock()
        self._changed = asyncio.Event()
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()  # requests that wait for a model
        self._sizes: dict[str, int] = {}  # measured by earlier loads
        self._checkpoints = CheckpointCache(MAX_MODELS)
        self._names: tuple[int, float, list[str]] | None = None

    def files(self, name: str) -> CheckpointFiles | None:
        """Return the files of a model; None = the directory has no such model.

        The folder of a model can be a link of the operator to another place.
        """
        parts = name.split("/")
        if len(parts) > 2 or "\\" in name or not all(map(_is_folder_name, parts)):
            return None
        path = self.folder.joinpath(*parts)
        return self._checkpoints.get(path)

    def length(self, files: CheckpointFiles) -> int | None:
        """Return the maximum length of a sequence of a model; None if its files do not name it."""
        longest = files.read_size("max_position_embeddings", "n_positions")
        if longest is None or self.max_model_len is None:
            return longest
        return min(longest, self.max_model_len)

    def names(self) -> list[str]:
        """Return the names of the models, sorted; read again after `NAMES_SECONDS`, or after a
        folder was added or removed."""
        try:
            changed = self.folder.stat().st_mtime_ns
        except OSError:
            return []
        cache_entry = self._names
        if cache_entry is None or cache_entry[0] != changed or time.monotonic() > cache_entry[1]:
            cache_entry = self._names = (
                changed,
                time.monotonic() + NAMES_SECONDS,
                self._find_names(),
            )
        return [*cache_entry[2]]

    def _find_names(self) -> list[str]:
        paths = _folders(self.folder)
        deeper = [
            inner
            for path in paths
            if not CheckpointFiles.is_checkpoint(path)
            for inner in _folders(path)
        ]
        names = [
            path.relative_to(self.folder).as_posix()
            for path in (*paths, *deeper)
            if CheckpointFiles.is_checkpoint(path)
        ]
        return names[:MAX_MODELS]

    @asynccontextmanager
    async def lease(self, name: str) -> AsyncGenerator[tuple[ServedT, float]]:
        """Yield a loaded model, and the seconds of its loading. The model stays during the block.

        Raises:
            ConfigError: the model needs more memory than the limit.
            EasyDeLError: the model cannot be loaded.
        """
        start = time.monotonic()
        waited = name not in self.loaded
        self._waiting[name] += 1  # a model that a request waits for is not unloaded
        try:
            while name not in self.loaded:
                # The load continues if the request is cancelled.
                await asyncio.shield(self._get_load_task(name))
        finally:
            self._waiting[name] -= 1
            self._changed.set()
        loaded_model = self.loaded[name]
        with loaded_model.activity.using():
            yield loaded_model.model, time.monotonic() - start if waited else 0.0

    def _get_load_task(self, name: str) -> asyncio.Task[None]:
        if name not in self._loads:
            task = asyncio.create_task(self._load_in_turn(name))
            self._loads[name] = task
            task.add_done_callback(lambda _: self._loads.pop(name))
        return self._loads[name]

    async def _load_in_turn(self, name: str) -> None:
        """Load a model after unloading others. One model is loaded at a time."""
        async with self._lock:
            if name not in self.loaded:
                await self._load_now(name)

    async def _load_now(self, name: str) -> None:
        files = self.files(name)
        assert files is not None, "the caller has found the model"
        needed = self._sizes.get(name) or self._estimate(files)
        await self._make_room(name, needed)
        start = time.monotonic()
        model, size = await self._load(name, files)
        self._sizes[name] = size
        seconds = time.monotonic() - start
        self.loaded[name] = LoadedModel(model, size, seconds)
        logger.info("loaded %s: %.2f GiB in %.1f s", name, size / 2**30, seconds)
        try:
            await self._make_room(name, 0)  # the estimate may have been too low
        except ConfigError:
            await self._drop(name)
            raise

    async def _make_room(self, name: str, needed: int) -> None:
        if self.memory is None:
            return
        loaded_size = self.loaded[name].size if name in self.loaded else 0
        if needed + loaded_size > self.memory:
            raise ConfigError(
                f"the model {name!r} needs {(needed + loaded_size) / 2**30:.2f} GiB, and the limit "
                "of the "
                f"server's models (--model-memory) is {self.memory / 2**30:.2f} GiB: raise the "
                "limit, or lower cpu_cache_gib, max_num_seqs or max_model_len"
            )
        while self.used + needed > self.memory:
            idle = [one for one in self.loaded if one != name and self._idle(one)]
            if idle:
                await self._drop(min(idle, key=lambda one: self._last_used(one)))
                continue
            self._changed.clear()
            await self._changed.wait()

    def _idle(self, name: str) -> bool:
        return not self.loaded[name].activity.running and not self._waiting[name]

    def _last_used(self, name: str) -> float:
        return self.loaded[name].activity.last_used

    @property
    def used(self) -> int:
        """Bytes of the loaded models."""
        return sum(loaded.size for loaded in self.loaded.values())

    def activity(self) -> Activity:
        """Return the activity of a new model."""
        return Activity(self.keep_alive, self._changed.set)

    async def _drop(self, name: str) -> None:
        loaded = self.loaded.pop(name)
        logger.info("unloading %s", name)
        await self._unload(loaded.model)

    async def sweep(self) -> None:
        """Unload models whose time without requests is over, until the task is cancelled."""
        while True:
            idle = [name for name in self.loaded if self._idle(name)]
            times = {name: self.loaded[name].activity.expires_in for name in idle}
            wait = min(times.values(), default=math.inf)
            if wait > 0:
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if math.isinf(wait) else wait):
                        await self._changed.wait()
                continue
            async with self._lock:
                for name, it in list(self.loaded.items()):
                    if self._idle(name) and it.activity.expires_in <= 0:
                        await self._drop(name)

    async def close(self) -> None:
        """Unload all models."""
        for name in list(self.loaded):
            await self._drop(name)
