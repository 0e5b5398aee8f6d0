"""Fingerprints of traced programs: values, sources, versions and machine.

Equal fingerprints mean equal programs, so a program of an earlier process can be loaded without
tracing the function again. Values of unsupported types have no fingerprint.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

#: Packages that are described by their versions instead of their sources.
_RELEASED = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes", "transformers", "huggingface_hub")
#: Environment variables that change compilation by XLA.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
#: Settings of jax that do not change programs.
_IDLE_SETTINGS = re.compile("cache|log|dump|profil|traceback|explain")


class NoFingerprintError(TypeError):
    """A value has an unsupported type."""


def fingerprint(*values: object, packages: Iterable[str] = (), imported: float) -> str:
    """Return a hash of values, of the sources of their classes and functions, and of the machine.

    Args:
        values: Numbers, texts, collections, classes, functions, and objects that contain them.
        packages: Further packages whose sources are included.
        imported: Start of their import in seconds since the epoch; a file that was changed later
            does not match the running code.

    Raises:
        NoFingerprintError: A value or a source is not supported.
    """
    description = _Description()
    for value in values:
        description.add(value)
    roots = {name.partition(".")[0] for name in description.modules}
    roots = (roots | set(packages)) - set(sys.stdlib_module_names) - set(_RELEASED)
    parts = [
        *description.parts,
        *_surroundings(),
        *(source_hash(root, imported) for root in sorted(roots)),
    ]
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


class _Description:
    """Converts values to a list of texts, in traversal order.

    Attributes:
        parts: The texts.
        modules: The modules of the classes and functions.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.modules: set[str] = set()
        # id -> number and object; keeping the object prevents reuse of its id.
        self._met: dict[int, tuple[int, object]] = {}

    def add(self, value: Any) -> None:
        """Describe one value."""
        kind = type(value)
        if value is None or kind in (bool, int, float, complex, str, bytes):
            self.parts.append(repr(value))
        elif kind in (tuple, list):
            self._inside("[", value)
        elif isinstance(value, type | FunctionType | BuiltinFunctionType | ModuleType):
            self._add_definition(value)
        elif id(value) in self._met:
            self.parts.append(f"met before: {self._met[id(value)][0]}")
        else:
            self._met[id(value)] = (len(self._met), value)
            self._object(value, kind)

    def _object(self, value: object, kind: type) -> None:
        self._add_definition(kind)
        if isinstance(value, Enum):
            self.parts.append(value.name)
        elif isinstance(value, Mapping):
            self._inside("{", [part for pair in value.items() for part in pair])
        elif isinstance(value, set | frozenset):
            self._inside("{", sorted(value, key=repr))
        elif isinstance(value, functools.partial):
            self._inside("(", [value.func, value.args, value.keywords])
        elif isinstance(value, MethodType):
            self._inside("(", [value.__func__, value.__self__])
        elif isinstance(value, np.dtype):
            self.parts.append(repr(value))
        elif isinstance(value, np.ndarray | np.generic):
            array = np.asarray(value)
            if array.dtype.hasobject:
                raise NoFingerprintError(f"an array of objects: {array.dtype}")
            self.parts += [str(array.dtype), repr(array.shape), array.tobytes().hex()]
        elif isinstance(value, jax.ShapeDtypeStruct):
            self._inside("(", [value.shape, value.dtype, value.weak_type, value.sharding])
        elif isinstance(value, jax.sharding.Mesh):
            devices = [(d.id, d.process_index, d.device_kind) for d in value.devices.flat]
            self._inside("(", [value.axis_names, value.devices.shape, devices])
            self.parts.append(repr(value.axis_types))
        elif isinstance(value, jax.sharding.NamedSharding):
            self._inside("(", [value.mesh, tuple(value.spec), value.memory_kind])
        elif kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
            self._repr(value)
        else:
            self._inside("(", [part for pair in _fields(value) for part in pair])

    def _inside(self, mark: str, parts: Iterable[object]) -> None:
        self.parts.append(mark)
        for part in parts:
            self.add(part)
        self.parts.append("end")

    def _add_definition(self, value: object) -> None:
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__ or "builtins"
        if module == "__main__":
            raise NoFingerprintError(f"{value!r} is defined in the program itself")
        self.modules.add(module)
        self.parts += [module, getattr(value, "__qualname__", "")]
        if isinstance(value, FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            inside = [
                value.__code__.co_firstlineno,
                cells,
                value.__defaults__,
                value.__kwdefaults__,
            ]
            if id(value) not in self._met:  # a function may close over itself
                self._met[id(value)] = (len(self._met), value)
                self._inside("(", inside)

    def _repr(self, value: object) -> None:
        text = repr(value)
        if re.search(r" at 0x[0-9a-f]+", text):
            raise NoFingerprintError(f"{text} has no description")
        self.parts.append(text)


def _fields(value: object) -> list[tuple[str, object]]:
    """The attributes of an object."""
    slots = [base.__dict__.get("__slots__") for base in type(value).__mro__]
    if not hasattr(value, "__dict__") and not any(names is not None for names in slots):
        raise NoFingerprintError(f"{value!r} has no description")
    fields = dict(getattr(value, "__dict__", {}))
    for names in slots:
        for name in (names,) if isinstance(names, str) else names or ():
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                fields[name] = getattr(value, name)
    return list(fields.items())


def _surroundings() -> list[str]:
    """Versions, settings and the machine."""
    versions = [getattr(sys.modules.get(n), "__version__", "") for n in _RELEASED]
    settings = [
        f"{k}={v}" for k, v in sorted(jax.config.values.items()) if not _IDLE_SETTINGS.search(k)
    ]
    devices = [f"{d.id} {d.device_kind} {d.client.platform_version}" for d in jax.devices()]
    variables = [f"{name}={os.environ.get(name)}" for name in _VARIABLES]
    system = [sys.version, platform.platform(), *instructions()]
    return [*versions, *settings, *devices, *variables, *system]


def instructions() -> list[str]:
    """Return the features of the processor, from Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return [platform.processor()]
    return [line for line in lines if line.startswith(("flags", "Features", "model name"))]


@functools.cache
def source_hash(package: str, imported: float) -> str:
    """Return a hash of the Python files of an imported package."""
    module = sys.modules.get(package)
    places = [Path(place) for place in getattr(module, "__path__", [])]
    files = sorted(file for place in places for file in place.rglob("*.py"))
    if not files:
        file = getattr(module, "__file__", None)
        if file is None:
            raise NoFingerprintError(f"{package} has no source")
        files = [Path(file)]
    digest = hashlib.sha256()
    for file in files:
        if file.stat().st_mtime > imported:
            raise NoFingerprintError(f"{file} was written after this process began")
        digest.update(str(file).encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
