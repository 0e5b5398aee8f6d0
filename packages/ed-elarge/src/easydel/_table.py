"""The names of the umbrella and the modules that define them.

`NAMES` contains the public names of the seven packages and further names from EasyDeL's guides.
`MODULES` contains the module paths of the guides; each exports a part of the names. Only `easydel`
is a file; `SOURCES` contains the sources of the others. The modules in `_OPEN` also export the
classes that `easydel._found` reads from the sources of the packages.
"""

from __future__ import annotations

from collections.abc import Callable

import ed_data
import ed_elarge
import ed_esurge
import ed_infra
import ed_layers
import ed_models
import ed_trainers
from ed_elarge.import_paths import write_command
from ed_infra import lazy

from easydel._other_names import ABSENT, COUNTERPARTS, FAMILY_FILES, FAMILY_MODULES, FAMILY_WORDS
from easydel._paths import PATH_NAMES, PATHS, PROGRAM_PATHS

#: The packages; their public names are lazy.
_PACKAGES = (ed_infra, ed_layers, ed_models, ed_data, ed_trainers, ed_esurge, ed_elarge)
_OTHERS: dict[str, str] = {
    "AVAILABLE_ATTENTION_MECHANISMS": "ed_infra.enums",
    "AVAILABLE_GRADIENT_CHECKPOINT_TARGETS": "ed_infra.enums",
    "AVAILABLE_MOE_METHODS": "ed_infra.enums",
    "BaseModuleProtocol": "ed_models.protocol:LanguageModel",
    "Cache": "ed_layers.cache.protocol",
    "LanguageModel": "ed_models.protocol",
}

#: Name -> the module that exports it.
NAMES: dict[str, str] = {
    **{name: package.__name__ for package in _PACKAGES for name in package.__all__},
    **_OTHERS,
    **COUNTERPARTS,
}

#: Names of `easydel.infra` from other packages.
_OF_INFRA = (
    "EasyDeLBaseModule",
    "EasyDeLState",
    "LossConfig",
    "PyTree",
    "Rngs",
    "auto_pytree",
    "eLargeModel",
    "init_cluster",
)
#: Module path -> its names and the modules that export them.
MODULES: dict[str, dict[str, str]] = {
    "easydel": NAMES,
    "easydel.infra": {
        name: owner
        for name, owner in NAMES.items()
        if owner.startswith("ed_infra") or name in _OF_INFRA
    },
    "easydel.inference": {name: at for name, at in NAMES.items() if at.startswith("ed_esurge")},
    "easydel.modules": {name: at for name, at in NAMES.items() if at.startswith("ed_models")},
    "easydel.trainers": {name: at for name, at in NAMES.items() if at.startswith("ed_trainers")},
    **{
        path: {name: NAMES.get(name, f"easydel:{name}") for name in names.split()}
        | PATH_NAMES.get(path, {})
        for path, names in PATHS.items()
    },
}

#: Module path of a family -> the modules here whose classes it exports.
FAMILY_PATHS: dict[str, tuple[str, ...]] = {
    f"easydel.modules.{name}{file}": tuple(
        f"ed_models.families.{family}" for family in FAMILY_FILES.get(name, (name,))
    )
    for name in FAMILY_MODULES.split()
    for word in (FAMILY_WORDS.get(name, name),)
    for file in ("", f".modeling_{word}", f".{word}_configuration")
}

#: Module path -> source, of the modules without a file.
SOURCES: dict[str, str] = {
    **{
        path: (
            "from easydel._table import attach\n\n"
            f"__getattr__, __dir__, __all__ = attach({path!r})\n"
        )
        for path in (*MODULES, *FAMILY_PATHS)
        if path != "easydel"
    },
    "easydel.scripts": "",
    **{path: write_command(*at) for path, at in PROGRAM_PATHS.items()},
}

#: The modules that also export the names of `easydel._found`.
_OPEN = ("easydel", "easydel.modules", "easydel.trainers")

Attached = tuple[Callable[[str], object], Callable[[], list[str]], list[str]]


def attach(module: str) -> Attached:
    """Return `__getattr__`, `__dir__` and `__all__` of a module of the umbrella.

    A module also has its submodules as attributes. The error of a name without a counterpart here
    contains the reason (`easydel._other_names.ABSENT`).
    """
    exports = MODULES.get(module, {})
    listed, listing, everything = lazy.attach(module, exports)
    is_open = module in _OPEN or module in FAMILY_PATHS

    def __getattr__(name: str) -> object:
        if f"{module}.{name}" in SOURCES and name not in exports:
            return lazy.attach(module, {name: f"{module}.{name}:*"})[0](name)
        reason = ABSENT.get(f"{module}.{name}".removeprefix("easydel."), ABSENT.get(name))
        if reason is not None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}: {reason}")
        if not is_open or name in exports or name.startswith("_"):
            return listed(name)
        return lazy.attach(module, find_names(module))[0](name)

    def __dir__() -> list[str]:
        return sorted({*listing(), *(find_names(module) if is_open else ()), *children(module)})

    return __getattr__, __dir__, everything


def children(module: str) -> list[str]:
    """Return the names of the submodules of a module."""
    begin = f"{module}."
    return [
        p.removeprefix(begin) for p in SOURCES if p.startswith(begin) and "." not in p[len(begin) :]
    ]


def find_names(module: str) -> dict[str, str]:
    """Return every name of a module of `_OPEN` or of `FAMILY_PATHS`."""
    from easydel._found import family_names, list_names

    if module in FAMILY_PATHS:
        owners = FAMILY_PATHS[module]
        aliases = {n: at for n, at in COUNTERPARTS.items() if at.partition(":")[0] in owners}
        return family_names(owners) | aliases
    packages = {"easydel.modules": "ed_models", "easydel.trainers": "ed_trainers"}
    begins = (packages.get(module, "ed_"), list_names.__module__)
    return {n: at for n, at in list_names().items() if at.startswith(begins)} | MODULES[module]
