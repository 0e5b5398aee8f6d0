"""Cache of compiled functions in files, so that a later start does not trace or compile.

Each fingerprint has a folder, in which files are identified by name. `ed_layers.programs` finds the
folder of a model. An engine reads all files before it is ready; loading the programs is slower and
continues in background threads. A trainer loads its step at the first call.

jax's format is a pickle, and a pickle can run code. Only files of this user are read, from folders
that other users cannot change. Each file begins with an authentication code under the user's key.
"""

from __future__ import annotations

import atexit
import hmac
import os
import pickle
import re
import shutil
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Generic, TypeVar

from jax.experimental import serialize_executable

from ed_infra.compilation.private_files import (
    UntrustedFileError,
    check_private,
    make_private,
    read_private,
    write_private,
)
from ed_infra.logging import get_logger, once
from ed_infra.sharding.mesh import Device

logger = get_logger(__name__)

NameT = TypeVar("NameT")
#: Age in seconds at which an unused folder is deleted.
_MAX_AGE = 60 * 24 * 3600
_CODE = 32  # bytes of the authentication code at the beginning of a file
_UNUSABLE = "unusable"  # marker file: programs of this kind cannot be cached
#: Functions that were loaded or written last, by the authentication codes of their files. The next
#: engine of this process with the same functions, such as one of another model of the same shape,
#: uses them.
_loaded_last: OrderedDict[bytes, Callable[..., Any]] = OrderedDict()
_MOST_LOADED = 128
_lock = Lock()


class Programs(Generic[NameT]):
    """The functions of one folder, one file per function name.

    Args:
        folder: path of the folder; need not exist.
        devices: devices of the functions, in the order of their mesh.
        key: key of the user; see `user_key`.
    """

    def __init__(self, folder: Path, devices: list[Device], key: bytes) -> None:
        self.folder, self._devices, self._key = folder, devices, key

    @property
    def usable(self) -> bool:
        """Whether functions can be cached in this folder."""
        return not (self.folder / _UNUSABLE).exists()

    @property
    def quickly_compiled(self) -> Programs[NameT]:
        """The functions that serve until those of this folder are compiled."""
        return Programs(
            self.folder.with_name(f"{self.folder.name}-quick"), self._devices, self._key
        )

    def filter_stored(self, names: Sequence[NameT]) -> list[NameT]:
        """Return the names of the functions that have a file, in the given order."""
        return [name for name in names if self._file(name).exists()]

    def loading(self, names: Sequence[NameT]) -> Loading[NameT] | None:
        """Load all functions in the given order. Return None if a file is missing, damaged or not
        authentic."""
        contents = self._contents(names)
        return None if contents is None else Loading(contents, self._load)

    def load(self, name: NameT) -> Callable[..., Any] | None:
        """Load one function. Return None if its file is missing, damaged or not authentic, or if
        the backend cannot read the program."""
        contents = self._contents([name])
        if contents is None:
            return None
        try:
            return self._load(contents[name])
        except Exception as error:  # the backend reads less than it writes
            self.give_up(error)
            return None

    def _contents(self, names: Sequence[NameT]) -> dict[NameT, bytes] | None:
        contents = {}
        try:
            check_private(self.folder)
            for name in names:
                file = self._file(name)
                content = read_private(file)
                if not hmac.compare_digest(content[:_CODE], self._code(file, content[_CODE:])):
                    return None
                contents[name] = content
            os.utime(self.folder)
        except UntrustedFileError as error:
            once(logger, f"compiled programs are not read: {error}")
            return None
        except OSError:
            return None
        return contents

    def _load(self, content: bytes) -> Callable[..., Any]:
        """Return the function of a file."""
        code = content[:_CODE]
        with _lock:
            loaded_function = _loaded_last.get(code)
            if loaded_function is not None:
                _loaded_last.move_to_end(code)
                return loaded_function
        executable, in_tree, out_tree = pickle.loads(memoryview(content)[_CODE:])
        function = serialize_executable.deserialize_and_load(
            executable,
            in_tree,
            out_tree,
            backend=self._devices[0].client,
            execution_devices=self._devices,
        )
        _remember(code, function)
        return function

    def write(self, functions: Mapping[NameT, Any]) -> None:
        """Write newly compiled functions to files. Functions that cannot be serialized are
        skipped."""
        try:
            make_private(self.folder)
            for name, function in functions.items():
                content = pickle.dumps(serialize_executable.serialize(function))
                file = self._file(name)
                code = self._code(file, content)
                write_private(file, code + content)
                _remember(code, function)
            self._forget_old()
        except (OSError, UntrustedFileError) as error:
            once(logger, f"compiled programs are not kept in {self.folder}: {error}")
        except Exception as error:  # backends raise different errors
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Disable this folder, so that jax's cache is used instead."""
        once(logger, f"compiled programs of this kind cannot be kept: {error}")
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _UNUSABLE).touch()
            for file in self.folder.iterdir():
                if file.name != _UNUSABLE:
                    file.unlink()

    def _code(self, file: Path, content: bytes) -> bytes:
        """Return the authentication code of a file. Other users cannot create the code, and it is
        valid only for this name."""
        code = hmac.new(self._key, f"{file.parent.name}/{file.name}\0".encode(), "sha256")
        code.update(content)
        return code.digest()

    def _file(self, name: NameT) -> Path:
        return self.folder / re.sub(r"\W+", "-", str(name)).strip("-")

    def _forget_old(self) -> None:
        edge = time.time() - _MAX_AGE
        for folder in self.folder.parent.iterdir():
            if folder.stat().st_mtime < edge:
                shutil.rmtree(folder, ignore_errors=True)


def _remember(code: bytes, function: Callable[..., Any]) -> None:
    with _lock:
        _loaded_last[code] = function
        while len(_loaded_last) > _MOST_LOADED:
            _loaded_last.popitem(last=False)


class Loading(Generic[NameT]):
    """Functions that are loaded in the background, in order.

    Args:
        contents: name -> contents of the file.
        load: function that loads a program from the contents.
    """

    def __init__(
        self, contents: Mapping[NameT, bytes], load: Callable[[bytes], Callable[..., Any]]
    ) -> None:
        self._contents, self._load = dict(contents), load
        self._results = {name: Future[Callable[..., Any]]() for name in contents}
        self._names = deque(contents)
        # One processor remains free for the steps. At exit, a thread ends after its current
        # function.
        count = max(1, min(4, (os.cpu_count() or 1) - 1))
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(count)]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: NameT) -> bool:
        return name in self._results

    def take(self, name: NameT) -> Callable[..., Any]:
        """Return a function. The caller loads it if no thread has started to.

        Raises:
            Exception: the function cannot be loaded.
        """
        self._make(name)
        return self._results.pop(name).result()

    def close(self) -> None:
        """Stop loading."""
        self._names.clear()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            try:
                name = self._names.popleft()
            except IndexError:
                break
            self._make(name)
        atexit.unregister(self.close)

    def _make(self, name: NameT) -> None:
        result, content = self._results.get(name), self._contents.pop(name, None)
        if result is None or content is None:  # another thread loads it
            return
        try:
            result.set_result(self._load(content))
        except Exception as error:
            result.set_exception(error)
