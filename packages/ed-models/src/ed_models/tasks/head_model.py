"""The base class of models with a head: a body under `model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.outputs import BaseModelOutput
from ed_layers.cache.spec import LayerSpecs
from ed_layers.parts import Parts
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.typing import DTypeLike

from ed_models.base.module import EasyDeLBaseModule
from ed_models.weights.rules import STANDARD

if TYPE_CHECKING:
    from ed_infra.inputs import Encoded, Inputs


class Body(Protocol):
    """A body without a head, such as `ed_models.body.decoder.Decoder`."""

    @property
    def embed_tokens(self) -> Embed:
        """The token embedding."""
        ...

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        ...

    def __call__(self, *args: Any, **inputs: Any) -> BaseModelOutput:
        """Return the hidden states of the tokens."""
        ...

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Compute the embeddings of images, or of the tokens of an encoder."""
        ...

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer."""
        ...

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length."""
        ...


BodyT = TypeVar("BodyT", bound=Body)


class HeadModel(EasyDeLBaseModule, Generic[BodyT]):
    """A body under `model`. Subclasses set `body_class`, and create a head in `add_head`.

    Attributes:
        body_class: class of the body. Its `__call__` accepts tokens, masks, positions and a cache
            (see `CausalLM.__call__`) and returns a BaseModelOutput. A checkpoint of a body without
            `WEIGHTS` is read with the rules of this class.
        DERIVED: further tasks of the family, for the registry: task -> function that returns the
            module class of the task for a class with this body.
    """

    body_class: ClassVar[type[EasyDeLBaseModule]]
    WEIGHTS = STANDARD
    DERIVED: ClassVar[Mapping[TaskType, Callable[[type[Any]], type]]] = {}

    def __init_subclass__(cls, **options: bool):
        super().__init_subclass__(**options)
        body = cls.__dict__.get("body_class")
        if body is not None and not {"WEIGHTS", "head_class"} & vars(body).keys():
            body.head_class = cls

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        body = self.body_class(config, dtype, param_dtype, precision, rngs=rngs)
        self.model = cast(BodyT, body)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        build_norm = getattr(self.body_class, "build_norm", None)
        self.add_head(replace(parts, norm_of_family=build_norm and build_norm(parts)))

    def add_head(self, parts: Parts) -> None:
        """Create the parameters of the head, after those of the body."""

    @property
    def features(self) -> int:
        """Size of the hidden states of the body, d."""
        return self.model.features

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer of the body."""
        return self.model.cache_specs()

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length; see `Decoder.prompt_class`."""
        return self.model.prompt_class(prompt_len)


# Class attributes about checkpoints, which other tasks of a family share.
_OF_CHECKPOINTS = ("OTHER_NAMES", "TIED_WEIGHTS", "MODULES", "as_published", "locate_parts")


def task_class(model_class: type[Any], family: type[Any], task: str) -> type[Any]:
    """Name a class after the body of a family, as Hugging Face does, and return the class.

    Args:
        model_class: the class, `SequenceClassifier` or `Embedder` with the body of the family.
        family: the language model of the family.
        task: the end of the name: `Gemma3TextModel` and `ForEmbedding` result
            in `Gemma3TextForEmbedding`.
    """
    body = family.body_class.__name__
    stem = body.removesuffix("Model") if body.endswith("Model") else family.__name__
    model_class.__name__ = model_class.__qualname__ = f"{stem}{task}"
    model_class.__module__ = family.__module__
    for name in _OF_CHECKPOINTS:
        if hasattr(family, name):
            setattr(model_class, name, getattr(family, name))
    return model_class
