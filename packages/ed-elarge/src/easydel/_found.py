"""Names of the umbrella in the sources of the packages: families, `Auto` classes, trainers.

The names of families and `Auto` classes are read from the sources, without an import. A new family
needs no entry here. The table is made at the first name that `easydel._table` lacks.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

#: Entry points of the model families.
FAMILIES = "easydel.models"
_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)
_AUTO = "AutoEasyDeLModel"


@cache
def names() -> dict[str, str]:
    """Return name -> the module that exports it."""
    return {**_trainers(), **_auto_classes(), **_families()}


def _families() -> dict[str, str]:
    """Return the classes of every family: `Qwen3Config`, `Qwen3Model`, `Qwen3ForCausalLM`."""
    modules = {point.value.partition(":")[0] for point in entry_points(group=FAMILIES)}
    return {
        name: module
        for module in sorted(modules, reverse=True)
        for name in _CLASS.findall(_source(module))
    }


def _auto_classes() -> dict[str, str]:
    """Return the `Auto` classes of models, and the class of states for each of them."""
    module = "ed_models.auto"
    auto = [name for name in _CLASS.findall(_source(module)) if name.startswith("Auto")]
    states = [name.replace(_AUTO, "AutoState") for name in auto if name.startswith(_AUTO)]
    return dict.fromkeys(auto, module) | dict.fromkeys(states, "ed_trainers.auto_state")


def _trainers() -> dict[str, str]:
    """Return trainer, options and configuration of each method: `DPOTrainer`, `DPOArguments`,
    `DPOConfig`."""
    from ed_trainers.arguments import METHODS

    owners = {}
    for entry in METHODS.values():
        arguments = entry.arguments
        owners[arguments.__name__] = arguments.__module__
        config = arguments.__name__.removesuffix("Arguments") + "Config"
        owners[config] = f"{arguments.__module__}:{arguments.__name__}"
        module, _, trainer = (
            entry.method.partition(":") if isinstance(entry.method, str) else ("",) * 3
        )
        if trainer.endswith("Trainer"):
            owners[trainer] = module
    return owners


def _source(module: str) -> str:
    """Return the source of a module, without importing the module."""
    top, *submodules = module.split(".")
    spec = find_spec(top)
    for part in submodules:
        if spec is None or spec.submodule_search_locations is None:
            return ""
        top = f"{top}.{part}"
        spec = PathFinder.find_spec(top, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return ""
    return Path(spec.origin).read_text("utf-8")
