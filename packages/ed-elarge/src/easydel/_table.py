"""The names of the umbrella and the modules that define them.

`NAMES` contains the public names of the seven packages and further names from EasyDeL's guides.
`MODULES` contains the module paths of the guides; each exports a part of the names. Only `easydel`
is a file; `SOURCES` contains the sources of the others. The modules in `OPEN` also export the
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
}

_PATHS: dict[str, str] = {
    "easydel.infra.base_config": (
        "AXIS_NAMES PARAM_AXES PartitionAxis EasyDeLBaseConfig EasyDeLBaseConfigDict "
        "AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS "
        "AVAILABLE_MOE_METHODS EasyDeLBackends EasyDeLGradientCheckPointers EasyDeLPlatforms "
        "EasyMethod TaskType ModuleCaches NOT_GIVEN extract_commit_hash set_attrs_smartly "
        "PartitionManager AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig "
        "LoraSpec"
    ),
    "easydel.infra.base_module": "EasyDeLBaseModule",
    "easydel.infra.base_state": "EasyDeLState",
    "easydel.infra.elarge_model": "eLargeModel",
    "easydel.infra.elarge_model.elarge_model": "eLargeModel",
    "easydel.infra.errors": (
        "CheckpointError ConfigError EasyDeLError MeshError RegistryError DataError InputError"
    ),
    "easydel.infra.etils": (
        "AVAILABLE_ATTENTION_MECHANISMS AVAILABLE_GRADIENT_CHECKPOINT_TARGETS "
        "AVAILABLE_MOE_METHODS EasyDeLBackends EasyDeLGradientCheckPointers EasyDeLPlatforms "
        "EasyMethod TaskType"
    ),
    "easydel.infra.loss_utils": "cross_entropy_sum token_logprobs",
    "easydel.infra.mixins": "EasyBridgeMixin EasyGenerationMixin GenerateOutput",
    "easydel.infra.mixins.bridge": "EasyBridgeMixin",
    "easydel.infra.mixins.generation": "EasyGenerationMixin GenerateOutput",
    "easydel.infra.mixins.operation_cache": (
        "Cache CrossCache DenseCache HybridCache LayerCacheSpec PagedCache RecurrentCache "
        "RecurrentSpec StateSpec WindowCache"
    ),
    "easydel.infra.mixins.protocol": "BaseModuleProtocol LanguageModel",
    "easydel.infra.modeling_outputs": (
        "BaseModelOutput CausalLMOutput EmbeddingOutput Metric SequenceClassifierOutput"
    ),
    "easydel.layers.quantization": (
        "AttnMaskDetail BaseOperationConfig EasyDeLQuantizationConfig LoraSpec "
        "QArray quantize dequantize is_quantized"
    ),
    "easydel.layers.quantization.quantizers": (
        "EasyDeLQuantizationConfig QArray quantize dequantize is_quantized"
    ),
    "easydel.infra.utils": "canonical_dtype MaskInfo create_mesh",
    "easydel.infra.factory": "get_config get_module register_config register_module TaskType",
}

#: Module path -> its names and the modules that export them.
MODULES: dict[str, dict[str, str]] = {
    "easydel": NAMES,
    "easydel.infra": {
        name: owner
        for name, owner in NAMES.items()
        if owner.startswith("ed_infra")
        or name in ("EasyDeLBaseModule", "EasyDeLState", "eLargeModel")
    },
    "easydel.inference": {name: at for name, at in NAMES.items() if at.startswith("ed_esurge")},
    "easydel.layers": {},
    "easydel.modules": {name: at for name, at in NAMES.items() if at.startswith("ed_models")},
    "easydel.trainers": {name: at for name, at in NAMES.items() if at.startswith("ed_trainers")},
    **{path: {name: NAMES[name] for name in names.split()} for path, names in _PATHS.items()},
}
MODULES["easydel.infra.factory"]["registry"] = "ed_infra.registry:*"

#: Module path -> source, of the modules without a file.
SOURCES: dict[str, str] = {
    **{
        path: (
            "from easydel._table import attach\n\n"
            f"__getattr__, __dir__, __all__ = attach({path!r})\n"
        )
        for path in MODULES
        if path != "easydel"
    },
    "easydel.scripts": "",
    "easydel.scripts.elarge": write_command("ed_elarge.__main__", "main"),
}

#: The modules that also export the names of `easydel._found`.
OPEN = ("easydel", "easydel.modules", "easydel.trainers")

Attached = tuple[Callable[[str], object], Callable[[], list[str]], list[str]]


def attach(module: str) -> Attached:
    """Return `__getattr__`, `__dir__` and `__all__` of a module of the umbrella."""
    listed, listing, everything = lazy.attach(module, MODULES[module])
    if module not in OPEN:
        return listed, listing, everything

    def __getattr__(name: str) -> object:
        if name in MODULES[module] or name.startswith("_"):
            return listed(name)
        return lazy.attach(module, find_names(module))[0](name)

    def __dir__() -> list[str]:
        return sorted({*listing(), *find_names(module)})

    return __getattr__, __dir__, everything


def find_names(module: str) -> dict[str, str]:
    """Return every name of a module of `OPEN`."""
    from easydel._found import names

    packages = {"easydel.modules": "ed_models", "easydel.trainers": "ed_trainers"}
    begin = packages.get(module, "ed_")
    return MODULES[module] | {n: at for n, at in names().items() if at.startswith(begin)}
