"""The base class of models with a head: a body under `model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from ed_infra.enums import TaskType
from ed_layers.cache.spec import LayerSpecs
from ed_layers.parts import Parts
from flax import nnx

from ed_models.base.module import EasyDeLBaseModule
from ed_models.checkpoints.task_rules import without_first_part
from ed_models.weights.rules import STANDARD


class HeadModel(EasyDeLBaseModule):
    """A body under `model`. Subclasses set `body_class`, and create a head in `add_head`.

    Attributes:
        body_class: class of the body. Its `__call__` accepts tokens, masks, positions and a cache
            (see `CausalLM.__call__`) and returns a BaseModelOutput. A body without `WEIGHTS` gets
            the table of this class, for checkpoints that contain only the body.
        DERIVED: further tasks of the family, for the registry: task -> function that returns the
            module class of the task for a class with this body.
    """

    body_class: ClassVar[type[EasyDeLBaseModule]]
    WEIGHTS = STANDARD
    DERIVED: ClassVar[Mapping[TaskType, Callable[[type[Any]], type]]] = {}

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        body = cls.__dict__.get("body_class")
        if body is not None and "WEIGHTS" not in vars(body):
            body.WEIGHTS, body.head_class = without_first_part(cls.WEIGHTS), cls

    def __init__(
        self,
        config: Any,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        self.model: Any = self.body_class(config, dtype, param_dtype, precision, rngs=rngs)
        self.add_head(Parts(config, rngs, self.dtype, self.param_dtype, precision))

    def add_head(self, parts: Parts) -> None:
        """Create the parameters of the head, after those of the body."""

    @property
    def features(self) -> int:
        """Size of the hidden states of the body, d."""
        return self.model.embed_tokens.embedding.shape[-1]

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer of the body."""
        return self.model.cache_specs()

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length; see `Decoder.prompt_class`."""
        return self.model.prompt_class(prompt_len)
