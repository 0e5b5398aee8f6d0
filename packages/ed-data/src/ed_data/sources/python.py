"""Importable objects: resolved by name, and read as a source of text."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from zlib import crc32

from ed_data.config.source import Inform
from ed_data.errors import DataError, did_you_mean
from ed_data.schema import Row
from ed_data.sources.lines import START, LineRecord, Spot

#: Rows that a program gives, by name.
GIVEN = SimpleNamespace()
_NUMBERS = itertools.count()


def list_frame_rows(value: object) -> object:
    """Return the rows of a pandas or polars frame or of an arrow table, and other values unchanged.

    A missing value of a frame is None.
    """
    if hasattr(value, "iloc"):  # pandas
        is_given = getattr(value, "notna")()  # noqa: B009 - the type is not known
        return getattr(value, "astype")(object).where(is_given, None).to_dict("records")  # noqa: B009
    for method in ("to_dicts", "to_pylist"):  # polars, arrow
        if hasattr(value, method):
            return getattr(value, method)()
    return value


class GivenRows:
    """Rows of this process, which are released with this object.

    Attributes:
        address: the address from which `PythonSource` reads them.
    """

    def __init__(self, rows: object) -> None:
        name = f"rows_{next(_NUMBERS)}"
        self.address = f"{__name__}:GIVEN.{name}"
        setattr(GIVEN, name, rows)
        weakref.finalize(self, vars(GIVEN).pop, name, None)


def keep_while(owner: object, rows: Iterable[GivenRows]) -> None:
    """Keep given rows as long as an object is used."""
    weakref.finalize(owner, len, tuple(rows))


class PythonSource:
    """A string, a list of strings or rows, or a dictionary of strings (its keys become `name`).

    For example, every Python has `data_files: "pydoc_data.topics:topics"`. The object may also be a
    `datasets.Dataset`, or for a mixture with `streaming` an iterable without a length, which can
    be read several times.
    """

    def __init__(self, inform: Inform, file_cache: object = None) -> None:
        self._address = str(inform.data_files)
        value = resolve_address(self._address, inform.label)
        self._rows: Iterable[Row]
        if isinstance(value, Iterable) and not hasattr(value, "__len__"):
            if isinstance(value, Iterator):
                raise _wrong(inform, self._address, "it can be read only once")
            self._rows, self.shards = _Stream(value, inform, self._address), [0]
            self.fingerprint = f"python:{getattr(value, '_fingerprint', inform.label)}"
            return
        self._rows = list(_as_rows(value, inform, self._address))
        digest, size = hashlib.blake2b(digest_size=16), 0
        for row in self._rows:
            text = json.dumps(row, sort_keys=True, default=_identity).encode()
            digest.update(text)
            size += len(text)
        self.fingerprint = f"python:{digest.hexdigest()}"
        self.shards = [size]

    def rows(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, Row]]:
        """Yield the rows in the order of the object."""
        for record in self.records(0, columns):
            assert not isinstance(record.row, DataError)
            yield record.place, record.row

    def media_folders(self, shard: int) -> tuple[str, ...]:
        """Return the working folder: the rows belong to the program that runs there."""
        return (os.getcwd(),)

    def records(
        self, shard: int, columns: Sequence[str] | None = None, start: Spot = START
    ) -> Iterator[LineRecord]:
        """Yield the records starting at `start`; the source is one shard."""
        for index, row in enumerate(itertools.islice(self._rows, start.row, None), start.row):
            place = f"{self._address}, item {index}"
            yield LineRecord(place, row, Spot(index), Spot(index + 1))


class _Stream:
    """The rows of an iterable, which each pass reads again."""

    def __init__(self, items: Iterable[object], inform: Inform, address: str) -> None:
        self._items, self._inform, self._address = items, inform, address

    def __iter__(self) -> Iterator[Row]:
        return _item_rows(self._items, self._inform, self._address)


def resolve_address(address: str, label: str) -> object:
    """Return the object at `"module:attribute"` or `"path/file.py:attribute"`.

    Args:
        address: the address; a relative path starts in the working directory.
        label: name of the inform, for messages.

    Raises:
        DataError: the module or the attribute does not exist, or the import fails.
    """
    name, _, attribute = address.rpartition(":")
    try:
        is_file = name.endswith(".py")
        value: object = _import_file(Path(name)) if is_file else pkgutil.resolve_name(f"{name}:")
    except Exception as error:  # the imported module may raise any error
        raise DataError(
            f"inform {label!r}: cannot import {address!r}: {_reason(name, error)}"
        ) from error
    seen = f"the module {name!r}"
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise DataError(
                f"inform {label!r}: cannot import {address!r}: {seen} exists and has no {part!r}"
                f"{did_you_mean(part, dir(value))}"
            )
        value, seen = getattr(value, part), f"{part!r}"
    return value


def _import_file(path: Path) -> ModuleType:
    """Import a file under a private name, once."""
    path = path.expanduser().absolute()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    main = sys.modules.get("__main__")
    script = getattr(main, "__file__", None)
    if main is not None and script is not None and Path(script).absolute() == path:
        return main
    name = f"{path.stem}_{crc32(str(path).encode()):08x}"
    if name not in sys.modules:
        spec = spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[name] = module
        sys.path.append(str(path.parent))  # modules beside the file
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[name]


def find_address(function: Callable[..., object]) -> str | None:
    """Return the address from which `resolve_address` imports a function in another process.

    Returns:
        `module:name`, `file.py:name` for functions of a script, or None: a lambda, a function
        within another one, and an object that no module contains have no address.
    """
    name = getattr(function, "__qualname__", None)
    module = sys.modules.get(str(getattr(function, "__module__", None)))
    if module is None or name is None or getattr(function, "__self__", None) is not None:
        return None
    value: object = module
    for part in name.split("."):
        value = getattr(value, part, None)
    if value is not function:
        return None
    file = getattr(module, "__file__", None)
    parts = module.__name__.split(".")
    is_installed = parts[0] in sys.stdlib_module_names or PathFinder.find_spec(parts[0])
    if is_installed and all(map(str.isidentifier, parts)) and parts != ["__main__"]:
        return f"{module.__name__}:{name}"
    if file is None or not str(file).endswith(".py"):
        return None
    path, working_folder = Path(file).absolute(), Path.cwd()
    if path.is_relative_to(working_folder):
        path = path.relative_to(working_folder)
    return f"{path}:{name}"


def _reason(name: str, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return str(error)
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if missing is None or not f"{name}.".startswith(f"{missing}."):
        return f"importing {name!r} fails with {type(error).__name__}: {error}"
    parent = missing.rpartition(".")[0]
    try:
        path = pkgutil.resolve_name(f"{parent}:").__path__ if parent else None
    except (ImportError, AttributeError):
        return f"{parent!r} is a module, not a package: it has no module {missing!r}"
    hint = did_you_mean(
        missing, [f"{parent}.{m.name}".strip(".") for m in pkgutil.iter_modules(path)]
    )
    return (
        f"there is no module {missing!r}{hint} (Python looks in the installed packages and in the "
        "folders of PYTHONPATH)"
    )


def _identity(value: object) -> str:
    """Return a text that changes with a value which is no JSON value: samples, pixels or bytes."""
    import numpy as np  # not needed to check a run file

    if isinstance(value, np.ndarray):
        value = f"{value.dtype}{value.shape}".encode() + value.tobytes()
    return hashlib.blake2b(value).hexdigest() if isinstance(value, bytes) else repr(value)


def _as_rows(value: object, inform: Inform, address: str) -> Iterator[Row]:
    field = inform.content_field
    if isinstance(value, str):
        yield {field: value}
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(item, str):
                raise _wrong(inform, address, f"its value at {key!r} is a {type(item).__name__}")
            yield {"name": str(key), field: item}
    elif isinstance(value, Iterable):
        yield from _item_rows(value, inform, address)
    else:
        raise _wrong(inform, address, f"it is a {type(value).__name__}")


def _item_rows(value: Iterable[object], inform: Inform, address: str) -> Iterator[Row]:
    for index, item in enumerate(value):
        if isinstance(item, str):
            yield {inform.content_field: item}
        elif isinstance(item, Mapping):
            yield dict(item)
        else:
            raise _wrong(inform, address, f"its item {index} is a {type(item).__name__}")


def _wrong(inform: Inform, address: str, reason: str) -> DataError:
    return DataError(
        f"inform {inform.label!r}: {address!r} must be a string, a list of strings (or rows), or "
        f"a dictionary of strings, but {reason}"
    )
