"""Configuration, device meshes, sharding, registry, rope and mask maths for JAX language models.

Importing this package imports neither jax nor transformers; the names below do when they are used.
"""

# ruff: noqa: F401 - names for type checkers
from typing import TYPE_CHECKING

from ed_infra.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "AXIS_NAMES": "ed_infra.sharding.axes",
        "PARAM_AXES": "ed_infra.sharding.axes",
        "PartitionAxis": "ed_infra.sharding.axes",
        "EasyDeLBaseConfig": "ed_infra.config.base",
        "EasyDeLBaseConfigDict": "ed_infra.config.typed_dict",
        "canonical_dtype": "ed_infra.dtypes",
        "EasyDeLBackends": "ed_infra.enums",
        "EasyDeLGradientCheckPointers": "ed_infra.enums",
        "EasyDeLPlatforms": "ed_infra.enums",
        "EasyMethod": "ed_infra.enums",
        "TaskType": "ed_infra.enums",
        "CheckpointError": "ed_infra.errors",
        "ConfigError": "ed_infra.errors",
        "EasyDeLError": "ed_infra.errors",
        "MeshError": "ed_infra.errors",
        "RegistryError": "ed_infra.errors",
        "ModuleCaches": "ed_infra.config.documented",
        "NOT_GIVEN": "ed_infra.config.documented",
        "extract_commit_hash": "ed_infra.config.documented",
        "set_attrs_smartly": "ed_infra.config.documented",
        "MaskInfo": "ed_infra.masks",
        "create_mesh": "ed_infra.sharding.mesh",
        "Options": "ed_infra.options",
        "BaseModelOutput": "ed_infra.outputs",
        "CausalLMOutput": "ed_infra.outputs",
        "EmbeddingOutput": "ed_infra.outputs",
        "SequenceClassifierOutput": "ed_infra.outputs",
        "Metric": "ed_infra.outputs",
        "PartitionManager": "ed_infra.sharding.partition",
        "get_config": "ed_infra.registry",
        "get_module": "ed_infra.registry",
        "register_config": "ed_infra.registry",
        "register_module": "ed_infra.registry",
        "Rules": "ed_infra.rules",
        "AttnMaskDetail": "ed_infra.specs",
        "BaseOperationConfig": "ed_infra.specs",
        "EasyDeLQuantizationConfig": "ed_infra.specs",
        "LoraSpec": "ed_infra.specs",
    },
)

if TYPE_CHECKING:
    from ed_infra.config.base import EasyDeLBaseConfig
    from ed_infra.config.documented import (
        NOT_GIVEN,
        ModuleCaches,
        extract_commit_hash,
        set_attrs_smartly,
    )
    from ed_infra.config.typed_dict import EasyDeLBaseConfigDict
    from ed_infra.dtypes import canonical_dtype
    from ed_infra.enums import (
        EasyDeLBackends,
        EasyDeLGradientCheckPointers,
        EasyDeLPlatforms,
        EasyMethod,
        TaskType,
    )
    from ed_infra.errors import (
        CheckpointError,
        ConfigError,
        EasyDeLError,
        MeshError,
        RegistryError,
    )
    from ed_infra.masks import MaskInfo
    from ed_infra.options import Options
    from ed_infra.outputs import (
        BaseModelOutput,
        CausalLMOutput,
        EmbeddingOutput,
        Metric,
        SequenceClassifierOutput,
    )
    from ed_infra.registry import get_config, get_module, register_config, register_module
    from ed_infra.rules import Rules
    from ed_infra.sharding.axes import AXIS_NAMES, PARAM_AXES, PartitionAxis
    from ed_infra.sharding.mesh import create_mesh
    from ed_infra.sharding.partition import PartitionManager
    from ed_infra.specs import (
        AttnMaskDetail,
        BaseOperationConfig,
        EasyDeLQuantizationConfig,
        LoraSpec,
    )
