"""`EasyDeLBaseModule`: the base class of every model.

This file contains creation, splitting, placement and the number of tokens.
`ed_models.base.methods` contains the methods for files, generation, caches, adapters and
quantization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.dtypes import floating_dtype
from ed_infra.errors import ConfigError
from ed_infra.sharding import placement
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers import native
from ed_layers.depth.stack import Layout, Stack, to_layout
from flax import nnx
from jax.typing import DTypeLike

from ed_models.base.methods import ModelMethods
from ed_models.weights.rules import Rule

ModelT = TypeVar("ModelT", bound="EasyDeLBaseModule")


class EasyDeLBaseModule(ModelMethods, nnx.Module):
    """A model: a config, parameters, and one `__call__`.

    Args:
        config: the configuration; the model seals it, because compiled functions depend on it.
        dtype: dtype of activations.
        param_dtype: dtype of stored parameters.
        precision: precision of matrix products; None = the backend's default.
    """

    config_class: ClassVar[type[EasyDeLBaseConfig]]
    # Names and layouts of the parameters in Hugging Face checkpoints (ed_models.weights.rules).
    WEIGHTS: ClassVar[Sequence[Rule]]
    # Whether `batch_invariant` is supported; sums without a fixed order are then found in a call.
    can_be_batch_invariant: ClassVar[bool] = False
    #: Number of token rows of the checkpoint, if `resize_token_embeddings` has changed the number.
    base_token_rows: int | None = None

    def __init__(
        self,
        config: EasyDeLBaseConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs | None = None,
    ):
        config.seal()
        if config.batch_invariant:
            if not self.can_be_batch_invariant:
                raise ConfigError(
                    f"batch_invariant=True: {type(self).__name__} is not a causal language model "
                    "with one decoder; set batch_invariant to false"
                )
            native.require_fixed_order(config)
        self.config = config
        self.dtype = jnp.dtype(floating_dtype("dtype", dtype))
        self.param_dtype = jnp.dtype(floating_dtype("param_dtype", param_dtype))
        self.precision = precision

    @classmethod
    def create(
        cls: type[ModelT],
        config: EasyDeLBaseConfig,
        *,
        seed: int = 0,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
    ) -> ModelT:
        """Create a model with random parameters directly on its devices.

        The parameters are not quantized: `quantize` applies the `quantization_config`.
        """
        if isinstance(config.quantization_config, EasyDeLQuantizationConfig):
            from ed_layers.quantization.model import warn_of_plain_weights

            warn_of_plain_weights(config.quantization_config)

        def build() -> ModelT:
            return cls(config, dtype, param_dtype, precision, rngs=nnx.Rngs(seed))

        return placement.create_sharded(build, config)

    # The parts that a train step, a checkpoint or the engine uses.

    @property
    def graphdef(self) -> nnx.GraphDef:
        """The static part: structure, config, dtypes."""
        return self.split_module()[0]

    @property
    def graphstate(self) -> nnx.State:
        """The trained parameters."""
        return self.split_module()[1]

    @property
    def graphother(self) -> nnx.State:
        """All arrays that are not trained parameters."""
        return self.split_module()[2]

    def split_module(
        self, trainable: nnx.filterlib.Filter | None = None
    ) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
        """Return `(graphdef, graphstate, graphother)`. Split once, not per step: a split needs
        milliseconds.

        Args:
            trainable: nnx filter of the trained variables; default: the adapters if the model has
                adapters, otherwise all parameters.
        """
        if trainable is None:
            trainable = nnx.LoRAParam if self.lora_is_enabled else nnx.Param
        graphdef, params, graphother = nnx.split(self, trainable, ...)
        return graphdef, params, graphother

    @staticmethod
    def merge_module(graphdef: nnx.GraphDef, graphstate: Any, graphother: Any) -> Any:
        """Return the module; inside jit this has no run-time cost."""
        return nnx.merge(graphdef, graphstate, graphother)

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length: within a class, equal prefixes have equal keys."""
        return 0

    # Placement.

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The device mesh of the config."""
        return self.config.mesh

    def _get_partition_rules(self, partition_rules: object = None) -> Any:
        """Return the given rules, or `(regular expression, PartitionSpec)` of each parameter."""
        if partition_rules is not None:
            return partition_rules
        return placement.partition_rules(self, self.config)

    def shard_model(self: ModelT, partition_rules: object = None) -> ModelT:
        """Place every parameter on the mesh, by its logical axes or by regex overrides."""
        return placement.shard(self, self.config, overrides=partition_rules)

    def gather_model(self: ModelT) -> ModelT:
        """Replicate every parameter on every device of the mesh."""
        return placement.gather(self, self.config)

    def to_layout(self: ModelT, layout: Layout) -> ModelT:
        """Return a copy with the layer layout "stacked" (scanned) or "leaves" (unrolled)."""
        from ed_layers.attention.configurations import change_configurations

        graphdef, state = nnx.split(self)
        model = nnx.merge(graphdef, state)
        to_layout(model, layout)
        change_configurations(model, lambda config: config.replace(scan_layers=layout == "stacked"))
        return model

    def resize_token_embeddings(
        self: ModelT,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
        *,
        seed: int = 0,
    ) -> ModelT:
        """Return a model with another number of token rows, as `transformers` resizes them.

        The embedding, the head and its bias get new rows, or lose the last ones, and `vocab_size`
        of the configuration changes. Adapters that are saved later contain the resized tables.

        Args:
            new_num_tokens: number of rows; None = the present number.
            pad_to_multiple_of: round the number up to a multiple.
            mean_resizing: draw new rows close to the mean of the old rows; otherwise around zero,
                with the deviation `initializer_range`.
            seed: seed of the new rows.

        Raises:
            ConfigError: a number is invalid, or the model has no tokens, or has adapters.
        """
        from ed_models.adapters.token_rows import resize_token_rows

        return resize_token_rows(
            self, new_num_tokens, pad_to_multiple_of, mean_resizing=mean_resizing, seed=seed
        )

    @property
    def layout(self) -> Layout:
        """The storage layout of the layers."""
        stacks = (node for _, node in nnx.iter_modules(self) if isinstance(node, Stack))
        return next(stacks).layout
