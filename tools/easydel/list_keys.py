"""Print the keys of run files of the original EasyDeL, as JSON: section -> keys.

This program runs in the environment of the original (`easydel`), not in that of this project:

    $EASYDEL_PYTHON tools/easydel/list_keys.py

The keys of `trainer` are the fields of the argument classes, by method. The other keys are those of
the typed dictionaries of a run file; dots separate inner keys.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pkgutil
import sys
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

#: Section -> the typed dictionaries of its keys, with the key that contains them.
SECTIONS = {
    "model": (("ModelCfg", ""),),
    "loader": (("LoaderCfg", ""),),
    "sharding": (("ShardingCfg", ""),),
    "platform": (("PlatformCfg", ""),),
    "quantization": (
        ("QuantizationCfg", ""),
        ("EasyDeLQuantizationCfg", "model."),
        ("EasyDeLQuantizationCfg", "kv_cache."),
    ),
    "base_config": (("BaseCfg", ""),),
    "mixture": (
        ("DataMixtureCfg", ""),
        ("TokenizationCfg", "tokenization."),
        ("DatasetSaveCfg", "save."),
    ),
    "esurge": (("eSurgeCfg", ""),),
    "eval": (("EvalKwargs", ""),),
    "trainer loss_config": (("LossConfig", "loss_config."),),
}


def list_subclasses(cls: type) -> Iterator[type]:
    """Yield all classes below a class."""
    for sub in cls.__subclasses__():
        yield sub
        yield from list_subclasses(sub)


def list_trainer_keys() -> dict[str, list[str]]:
    """Return method -> fields of its argument class; an empty method: of every method."""
    from easydel.trainers.training_configurations import TrainingArguments

    for module in pkgutil.walk_packages(
        sys.modules["easydel.trainers"].__path__, "easydel.trainers."
    ):
        if module.name.endswith("_config"):
            importlib.import_module(module.name)  # noqa: TID251
    out = {"": [one.name for one in dataclasses.fields(TrainingArguments)]}
    for cls in {*list_subclasses(TrainingArguments)}:
        method = cls.__module__.rpartition(".")[2].removesuffix("_config")
        out[method] = sorted({one.name for one in dataclasses.fields(cls)} - {*out[""]})
    return out


def list_section_keys() -> dict[str, list[str]]:
    """Return section -> keys of its typed dictionaries."""
    from easydel.infra.elarge import types

    out: dict[str, list[str]] = {}
    for section, parts in SECTIONS.items():
        for name, prefix in parts:
            keys = getattr(types, name).__annotations__
            out.setdefault(section, []).extend(f"{prefix}{key}" for key in keys)
    return out


if __name__ == "__main__":
    json.dump({"trainer": list_trainer_keys(), **list_section_keys()}, sys.stdout)
