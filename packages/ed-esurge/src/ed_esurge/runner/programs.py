"""Compiled functions in files: a start reads them, and neither traces nor compiles.

A folder belongs to one fingerprint, so its files fit by their names. Files are read as a whole
before the engine is ready. Making code of them takes longer and goes on in threads.

jax's format is a pickle, and a pickle can run code. Only files of this user are read, from folders
that others cannot change, and each file begins with a code of its contents under the user's key.
"""

from __future__ import annotations

import atexit
import hmac
import os
import pickle
import re
import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Generic, TypeVar

from ed_infra.compile_cache import IMPORTED, engines_folder
from ed_infra.fingerprint import NoFingerprintError, fingerprint
from ed_infra.logging import get_logger, once
from ed_infra.mesh import Device
from ed_infra.private_files import (
    UntrustedFileError,
    check_private,
    make_private,
    read_private,
    user_key,
    write_private,
)
from ed_layers import native
from ed_layers.attention.registry import kernels
from ed_models.protocol import LanguageModel
from jax.experimental import serialize_executable

logger = get_logger(__name__)

NameT = TypeVar("NameT")
#: Seconds after which a folder that no engine has used is deleted.
KEPT = 60 * 24 * 3600
_PACKAGES = ("ed_infra", "ed_layers", "ed_models", "ed_esurge")
_CODE = 32  # bytes of the code in front of a file
_UNUSABLE = "unusable"  # a file of this name: programs of this kind cannot be kept


class Programs(Generic[NameT]):
    """The functions of one folder, each in the file of its name.

    Args:
        folder: need not exist.
        devices: what the functions run on, in the order of their mesh.
        key: of the user; see `user_key`.
    """

    def __init__(self, folder: Path, devices: list[Device], key: bytes) -> None:
        self.folder, self._devices, self._key = folder, devices, key

    @classmethod
    def of(cls, model: LanguageModel, *parts: object) -> Programs[NameT] | None:
        """The functions of a model; None where compiled programs are not kept.

        Args:
            model: its mesh says where they run.
            parts: everything that they follow from.
        """
        home = engines_folder()
        if home is None:
            return None
        with native.allowed(model.config.native_kernels):
            kernels_in_use = native.describe()  # XLA must know them when a program is loaded
        try:
            name = fingerprint(
                *parts, kernels_in_use, kernels(), packages=_PACKAGES, imported=IMPORTED
            )
        except NoFingerprintError as error:
            once(logger, f"compiled programs are kept by jax alone: {error}")
            return None
        try:
            key = user_key(home.parent)
        except (OSError, UntrustedFileError) as error:
            once(logger, f"compiled programs are kept by jax alone: {error}")
            return None
        found = cls(home / name, list(model.config.mesh.devices.flat), key)
        return found if found.usable else None

    @property
    def usable(self) -> bool:
        """Whether functions can be kept here."""
        return not (self.folder / _UNUSABLE).exists()

    def loading(self, names: Sequence[NameT]) -> Loading[NameT] | None:
        """Load all functions, those in front first; None where a file is missing, damaged, or may
        have been written by another user."""
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
        return Loading(contents, self._load)

    def _load(self, content: bytes) -> Callable[..., Any]:
        """Make a function of its file."""
        executable, in_tree, out_tree = pickle.loads(memoryview(content)[_CODE:])
        return serialize_executable.deserialize_and_load(
            executable,
            in_tree,
            out_tree,
            backend=self._devices[0].client,
            execution_devices=self._devices,
        )

    def write(self, functions: Mapping[NameT, Any]) -> None:
        """Keep functions that were compiled afresh; what cannot be kept is not kept."""
        try:
            make_private(self.folder)
            for name, function in functions.items():
                content = pickle.dumps(serialize_executable.serialize(function))
                file = self._file(name)
                write_private(file, self._code(file, content) + content)
            self._forget_old()
        except (OSError, UntrustedFileError) as error:
            once(logger, f"compiled programs are not kept in {self.folder}: {error}")
        except Exception as error:  # a backend says in its own way that it cannot
            self.give_up(error)

    def give_up(self, error: Exception) -> None:
        """Keep nothing here from now on, so that jax's own cache is used again."""
        once(logger, f"compiled programs of this kind cannot be kept: {error}")
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / _UNUSABLE).touch()
            for file in self.folder.iterdir():
                if file.name != _UNUSABLE:
                    file.unlink()

    def _code(self, file: Path, content: bytes) -> bytes:
        """Return the code of a file: others cannot make one, and it fits no other name."""
        code = hmac.new(self._key, f"{file.parent.name}/{file.name}\0".encode(), "sha256")
        code.update(content)
        return code.digest()

    def _file(self, name: NameT) -> Path:
        return self.folder / re.sub(r"\W+", "-", str(name)).strip("-")

    def _forget_old(self) -> None:
        edge = time.time() - KEPT
        for folder in self.folder.parent.iterdir():
            if folder.stat().st_mtime < edge:
                shutil.rmtree(folder, ignore_errors=True)


class Loading(Generic[NameT]):
    """Functions that are loaded in the background, the first ones first.

    Args:
        contents: name -> file.
        load: makes a function of a file.
    """

    def __init__(
        self, contents: Mapping[NameT, bytes], load: Callable[[bytes], Callable[..., Any]]
    ) -> None:
        self._contents, self._load = dict(contents), load
        self._results = {name: Future[Callable[..., Any]]() for name in contents}
        self._names = deque(contents)
        # One processor is left to the steps. A thread ends between two functions where the process
        # does, instead of loading what nobody will call.
        count = max(1, min(4, (os.cpu_count() or 1) - 1))
        self._threads = [Thread(target=self._work, daemon=True) for _ in range(count)]
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def __contains__(self, name: NameT) -> bool:
        return name in self._results

    def take(self, name: NameT) -> Callable[..., Any]:
        """A function, which the caller loads where no thread has begun to.

        Raises:
            Exception: it cannot be loaded.
        """
        self._make(name)
        return self._results.pop(name).result()

    def close(self) -> None:
        """Load no more."""
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
        if result is None or content is None:  # another thread has it
            return
        try:
            result.set_result(self._load(content))
        except Exception as error:
            result.set_exception(error)
