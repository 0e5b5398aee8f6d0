"""Configurations and models by the `model_type` in config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from flax import nnx
from jax.typing import DTypeLike

from ed_models import hub
from ed_models.heads import CausalLM
from ed_models.loading import float_dtype
from ed_models.module import EasyDeLBaseModule

ModelT = TypeVar("ModelT", bound=EasyDeLBaseModule)


class AutoEasyDeLConfig:
    """Reads a configuration of any registered model type."""

    def __init__(self) -> None:
        raise TypeError("AutoEasyDeLConfig is not made; use AutoEasyDeLConfig.from_pretrained(...)")

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        **options: Any,
    ) -> EasyDeLBaseConfig:
        """Read config.json from a directory or a hub repository.

        Args:
            name_or_path: the directory or repository.
            options: those of `ed_models.hub.HubOptions`; all others are fields to set instead of
                the file's values, and unknown names are errors.

        Raises:
            CheckpointError: no readable config.json.
            RegistryError: nobody has registered its model type.
        """
        of_hub = hub.HubOptions.__annotations__
        changes = {name: value for name, value in options.items() if name not in of_hub}
        where = {name: value for name, value in options.items() if name in of_hub}
        directory = hub.resolve(name_or_path, weights=False, **where)
        return hub.read_config(directory, **changes)

    @classmethod
    def for_model(cls, model_type: str, **fields: Any) -> EasyDeLBaseConfig:
        """Make a configuration from nothing, to train from scratch.

        Args:
            model_type: a registered one, as in config.json.
            fields: of the family and of execution; unknown names are errors.

        Raises:
            RegistryError: nobody has registered the model type.
        """
        return registry.get_config(model_type)(**fields)


class _AutoModel(Generic[ModelT]):
    """A task; its classmethods pick the class by the configuration's model type."""

    task: ClassVar[TaskType]

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} is not made; use {name}.from_pretrained(...) or .from_config(...)")

    @classmethod
    def from_config(
        cls,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.bfloat16,
        param_dtype: DTypeLike = jnp.bfloat16,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs | None = None,
        seed: int = 0,
    ) -> ModelT:
        """Make a model with random parameters, on its devices.

        Args:
            config: gives the model type, the architecture and the mesh.
            dtype, param_dtype: of computation and of stored parameters.
            precision: of matrix products.
            rngs: its `params` stream gives the seed.
            seed: of the parameters, where `rngs` is not given.
        """
        if not isinstance(config, EasyDeLBaseConfig):
            raise ConfigError(
                f"from_config takes an EasyDeL configuration, not {type(config).__name__}; "
                "read one with AutoEasyDeLConfig.from_pretrained(...)"
            )
        if rngs is not None:
            seed = int(jax.random.randint(rngs.params(), (), 0, 2**31 - 1))
        return registry.get_module(cls.task, config.model_type).create(
            config,
            seed=seed,
            dtype=float_dtype("dtype", dtype),
            param_dtype=float_dtype("param_dtype", param_dtype),
            precision=precision,
        )

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **options: Any) -> ModelT:
        """Load a directory or a hub repository; options: see `ed_models.hub.from_pretrained`."""
        return hub.from_pretrained(name_or_path, task=cls.task, **options)


class AutoEasyDeLModelForCausalLM(_AutoModel[CausalLM]):
    """Decoder language models."""

    task = TaskType.CAUSAL_LM
