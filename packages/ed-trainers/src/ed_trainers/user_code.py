"""Functions in the user's own code: `path/file.py:function` and `module:function`.

Paths and modules are searched in the given folders (that of the run file), then in the working
directory. Modules may also be those of installed packages, which come first.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from zlib import crc32

from ed_infra.errors import ConfigError, unknown_name
from pydantic import TypeAdapter, ValidationError

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def list_search_folders(folders: Iterable[str | Path] = ()) -> tuple[Path, ...]:
    """Return the folders, then the working directory; absolute, each once."""
    places = [Path(folder).expanduser().absolute() for folder in folders]
    return tuple(dict.fromkeys([*places, Path.cwd()]))


def is_file_address(address: str) -> bool:
    """Return whether an address is `path/file.py:function`."""
    return address.rpartition(":")[0].endswith(".py")


def find_reward_module(address: str, folders: Sequence[str | Path] = ()) -> ModuleSpec | None:
    """Return the file of an address, without imports; None if it does not exist."""
    name = address.rpartition(":")[0]
    places = list_search_folders(folders)
    if is_file_address(address):
        paths = (place / Path(name).expanduser() for place in places)
        path = next((path for path in paths if path.is_file()), None)
        # The name is the same in each process, and unlikely to be the name of another module.
        private = None if path is None else f"{path.stem}_{crc32(str(path).encode()):08x}"
        return None if private is None else spec_from_file_location(private, path)
    top, *submodules = name.split(".")
    importlib.invalidate_caches()
    try:
        spec = find_spec(top) or PathFinder.find_spec(top, list(map(str, places)))
    except ValueError:  # a module without a file, such as a notebook
        return ModuleSpec(top, None) if not submodules else None
    for part in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return None
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, list(spec.submodule_search_locations))
    return spec


def why_not_found(address: str, folders: Sequence[str | Path] = ()) -> str:
    """Return the message for an address whose file or module does not exist."""
    name = address.rpartition(":")[0]
    places = ", ".join(map(str, list_search_folders(folders)))
    if is_file_address(address):
        return (
            f"there is no file {name!r}; searched: {places}. Write path/file.py:function with a "
            "path relative to one of these folders, or an absolute path"
        )
    return (
        f"there is no module {name!r}; searched: {places}, and the installed packages. Write "
        "path/file.py:function, or module:function of a module in one of these folders"
    )


def load_function(address: str, folders: Sequence[str | Path] = ()) -> Callable[..., Any]:
    """Import the function of an address.

    Raises:
        ConfigError: there is no such file, module or function, or importing the code failed.
    """
    refused = f"reward function {address!r} cannot be imported"
    spec = find_reward_module(address, folders)
    if spec is None:
        raise ConfigError(f"{refused}: {why_not_found(address, folders)}")
    source, attribute = spec.origin or spec.name, address.rpartition(":")[2]
    file_folders = [Path(source).parent] if is_file_address(address) else []
    with _importable([*file_folders, *list_search_folders(folders)]):
        try:
            module = _import_file(spec) if file_folders else pkgutil.resolve_name(f"{spec.name}:")
        except Exception as error:
            error_text = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{refused}: running {source} raised {error_text}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        raise ConfigError(f"{refused}: {source} has no {attribute!r}") from error


def find_wrong_settings(
    kind: str,
    name: str,
    function: Callable[..., Any],
    settings: Mapping[str, Any],
    *,
    other_parameters: Collection[str] = (),
    has_types: bool = False,
) -> Iterator[tuple[str | None, str]]:
    """Yield each setting that a function or a class does not accept, and the reason; None for a
    missing setting.

    Args:
        kind: kind of the function, for messages.
        name: its name in the run file.
        function: the function, or the class.
        settings: values of parameters.
        other_parameters: parameters that are no settings.
        has_types: whether values are compared with the annotations, and missing settings are found:
            those of this project.
    """
    # `**fields` would accept a misspelled setting as a field of a row.
    parameters = {
        name: p
        for name, p in inspect.signature(function).parameters.items()
        if p.kind in _NAMED and name not in other_parameters
    }
    of = f"setting of the {kind} {name!r}"
    unknown = [setting for setting in settings if setting not in parameters]
    for setting in unknown:
        yield setting, str(unknown_name(of, setting, list(parameters)))
    if not has_types or unknown:
        return
    annotated = function.__init__ if isinstance(function, type) else function
    types = get_type_hints(annotated, include_extras=True)
    for setting, value in settings.items():
        try:
            TypeAdapter(types[setting]).validate_python(value, strict=True)
        except ValidationError as error:
            yield setting, f"{setting}, {of}, is {value!r}: {error.errors()[0]['msg']}"
    for setting, parameter in parameters.items():
        if parameter.default is parameter.empty and setting not in settings:
            yield None, f"the {kind} {name!r} needs {setting}: {{{name}: {{{setting}: …}}}}"


def _import_file(spec: ModuleSpec) -> ModuleType:
    """Import a file under its private name, once."""
    if spec.name not in sys.modules:
        module = module_from_spec(spec)
        sys.modules[spec.name] = module
        assert spec.loader is not None
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
    return sys.modules[spec.name]


@contextmanager
def _importable(folders: Iterable[Path]) -> Iterator[None]:
    """Let imports also search the folders, after the installed packages."""
    added = [str(folder) for folder in folders if str(folder) not in sys.path]
    sys.path.extend(added)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        for folder in added:
            sys.path.remove(folder)
