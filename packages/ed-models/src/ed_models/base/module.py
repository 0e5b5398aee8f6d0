"""`EasyDeLBaseModule`: the base class of every model.

This file contains creation, splitting, placement, the number of tokens, caches, adapters and
quantization. `ed_models.base.methods` contains the methods for files and generation. A method
imports its implementation when it is called, so the import of a family loads no more than it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

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
from jax.typing import ArrayLike, DTypeLike

from ed_models.base.conversions import ParameterConversions
from ed_models.base.methods import EasyBridgeMixin, EasyGenerationMixin
from ed_models.weights.rules import Rule

if TYPE_CHECKING:
    from ed_infra.specs import LoraSpec
    from ed_layers.cache.protocol import Cache, ContiguousCache
    from ed_layers.cache.spec import LayerSpecs
    from ed_layers.quantization.model import QuantizationRules

    from ed_models.adapters.named_adapters import NamedAdapters

#: Entry points of the state classes for `to_state`, from packages above this one.
STATE_GROUP = "easydel.state"
ModelT = TypeVar("ModelT", bound="EasyDeLBaseModule")


class EasyDeLBaseModule(EasyGenerationMixin, EasyBridgeMixin, ParameterConversions, nnx.Module):
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
    # Whether `mtp_head` is supported: the model has an MTP layer, or is a part of such a model.
    can_have_mtp_head: ClassVar[bool] = False
    # Whether the forward pass multiplies by a function of `hidden_size` (Gemma's embeddings).
    multiplies_by_width: ClassVar[bool] = False
    #: Number of token rows of the checkpoint, if `resize_token_embeddings` has changed the number.
    base_token_rows: int | None = None
    named_adapters: NamedAdapters | None = None

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
        if config.mtp_head is not None and not self.can_have_mtp_head:
            raise ConfigError(
                f"mtp_head={config.mtp_head!r}: {type(self).__name__} is not a causal language "
                "model with one decoder; omit mtp_head, or load the language model (the task "
                "causal-language-model)"
            )
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
    def merge_module(graphdef: nnx.GraphDef, graphstate: object, graphother: object) -> Any:
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
        return placement.build_partition_rules(self, self.config)

    def fully_shard(
        self: ModelT, partition_rules: object = None, mesh: jax.sharding.Mesh | None = None
    ) -> ModelT:
        """Return the model with its parameters on the mesh; see `shard_model`."""
        return self.shard_model(partition_rules, mesh)

    def fully_gather(self: ModelT, mesh: jax.sharding.Mesh | None = None) -> ModelT:
        """Return the model with every parameter on every device of the mesh."""
        return placement.gather(self, self.config, mesh)

    def shard_model(
        self: ModelT, partition_rules: object = None, mesh: jax.sharding.Mesh | None = None
    ) -> ModelT:
        """Place every parameter on the mesh, by its logical axes or by regex overrides.

        Args:
            partition_rules: (regular expression, PartitionSpec) pairs; None = the logical axes.
            mesh: None = the mesh of the config.
        """
        return placement.shard(self, self.config, overrides=partition_rules, mesh=mesh)

    def gather_model(self: ModelT) -> ModelT:
        """Replicate every parameter on every device of the mesh."""
        return placement.gather(self, self.config)

    def to_layout(self: ModelT, layout: Layout) -> ModelT:
        """Return a copy with the layer layout "stacked" (scanned) or "leaves" (unrolled)."""
        from ed_layers.attention.mechanism import change_configurations

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

    def to_state(self, state_class: type[Any] | None = None, *, optimizer: object = None) -> Any:
        """Create the initial training state, an `EasyDeLState` of this model.

        Args:
            optimizer: an optimizer of optax, whose state is created; also as first argument.
            state_class: a class with `create(model=...)`; None = the entry point `easydel.state` of
                an installed package (ed-trainers).

        Raises:
            ConfigError: no installed package has this entry point.
        """
        from importlib import metadata

        if state_class is not None and not isinstance(state_class, type):
            state_class, optimizer = None, state_class
        if state_class is None:
            states = metadata.entry_points(group=STATE_GROUP)
            if not states:
                raise ConfigError("no package for training is installed: pip install ed-trainers")
            state_class = cast(type[Any], next(iter(states)).load())
        if optimizer is None:
            return state_class.create(model=self)
        return state_class.create(model=self, tx=optimizer, init_opt_state=True)

    # Caches.

    def cache_specs(self) -> Sequence[LayerSpecs]:
        """Return the memory of each layer: a LayerCacheSpec, a RecurrentSpec, or a tuple of these.

        Raises:
            TypeError: the model has no cache, because it is not a decoder.
        """
        raise TypeError(f"{type(self).__name__} has no layers that keep keys and values")

    def init_cache(
        self,
        batch_size: int,
        max_length: int,
        dtype: DTypeLike | None = None,
        *,
        encoder_length: int | None = None,
    ) -> ContiguousCache:
        """Create an empty contiguous cache for `max_length` tokens per row.

        The cache is sharded over batch and heads. `use_sharded_kv_caching` also shards the slots
        along `kv_cache_sharding_sequence_axis_name`. `kv_cache_quantization_config` selects 8 bits.

        Args:
            encoder_length: number of encoder positions that cross-attention reads.

        Returns:
            A HybridCache; or a DenseCache or WindowCache if all layers have the same single memory.

        Raises:
            ConfigError: caches do not support the quantization, or `encoder_length` is missing.
        """
        from ed_models.base import caches

        return caches.contiguous(cast(Any, self), batch_size, max_length, dtype, encoder_length)

    def init_paged_cache(
        self,
        num_pages: int | Mapping[str, int],
        page_size: int,
        dtype: DTypeLike | None = None,
        *,
        num_states: int | None = None,
        encoder_length: int | None = None,
    ) -> Cache:
        """Create an empty pool of pages, sharded over heads; quantized as in `init_cache`.

        Args:
            num_pages: pages of the pool; for several groups of layers one number for all groups, or
                group -> number.
            page_size: tokens per page.
            num_states: slots for sequences, for recurrent layers and for encoder outputs.
            encoder_length: number of encoder positions that cross-attention reads.

        Returns:
            A HybridCache; or a PagedCache if all layers have the same single memory.
        """
        from ed_models.base import caches

        return caches.create_paged_cache(
            cast(Any, self), num_pages, page_size, dtype, num_states, encoder_length
        )

    def init_operations_cache(
        self,
        batch_size: int,
        max_length: int,
        *,
        page_size: int = 128,
        dtype: DTypeLike | None = None,
        starts: ArrayLike | None = None,
    ) -> Cache:
        """Create the cache that the layers and the attention mechanism need.

        If `attn_mechanism` or `decode_attn_mechanism` reads pages, the result is a pool for
        `batch_size` sequences of `max_length` tokens; otherwise it is the result of `init_cache`.

        Args:
            page_size: tokens per page.
            starts: index of the first token of each row, [b]; only 0, because a cache does not
                store padding.

        Raises:
            ConfigError: a row starts after 0.
        """
        from ed_models.base import caches

        if starts is not None and jnp.any(jnp.asarray(starts) != 0):
            raise ConfigError(
                f"starts {starts}: a cache stores no padding, so each row starts at 0; pass the "
                "padding of a prompt as attention_mask of the call"
            )
        return caches.for_operations(cast(Any, self), batch_size, max_length, page_size, dtype)

    # Adapters. Each method returns another model, sharded like this one.

    @property
    def lora_is_enabled(self) -> bool:
        """Whether layers have adapters."""
        from ed_models.adapters.lora import has_lora

        return has_lora(self)

    @property
    def active_adapter(self) -> str | None:
        """Name of the adapter on the layers; None if no adapter is active."""
        from ed_models.adapters import named_adapters

        return named_adapters.active_adapter(self)

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of all adapters: active, merged and inactive."""
        from ed_models.adapters import named_adapters

        return named_adapters.list_adapters(self)

    def apply_lora(
        self,
        spec: LoraSpec | Mapping[LoraSpec, list[str]],
        *,
        name: str = "default",
        seed: int = 0,
    ) -> Self:
        """Add a new adapter to the layers; only this adapter is trained from then on.

        Args:
            spec: see `ed_models.adapters.lora.apply_lora`.
            name: a name that no adapter of the model has; the other adapters become inactive.
            seed: seed of the random numbers.

        Raises:
            ConfigError: the name is taken, a target matches no layer, or an adapter is merged.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.add_adapter(self, spec, name, seed)

    def apply_lora_to_layers(
        self,
        lora_rank: int,
        lora_pattern: str | None = None,
        *,
        lora_alpha: float | None = None,
        seed: int = 0,
    ) -> Self:
        """Add adapters of a rank to the layers whose canonical names a pattern matches.

        Args:
            lora_rank: r.
            lora_pattern: regular expression; None = every linear layer except the head.
            lora_alpha: the scale is `lora_alpha / lora_rank`; None = 1.
            seed: seed of the random numbers.
        """
        from ed_infra.specs import LoraSpec

        spec = LoraSpec(rank=lora_rank, alpha=lora_alpha, targets=lora_pattern)
        return self.apply_lora(spec, seed=seed)

    def load_adapter(self, directory: str | Path, *, name: str = "default") -> Self:
        """Activate the adapter of a directory in PEFT's layout, under a name.

        Raises:
            CheckpointError: see `ed_models.adapters.peft.read_adapter`.
            ConfigError: the name is taken, or an adapter is merged.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.load_named_adapter(self, directory, name)

    def set_adapter(self, name: str | None) -> Self:
        """Activate the adapter with a name; None deactivates all adapters.

        Raises:
            ConfigError: no adapter has the name, or an adapter is merged.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.activate(self, name)

    def delete_adapter(self, name: str) -> Self:
        """Remove the adapter with a name; if it was active, no adapter is active afterwards.

        Raises:
            ConfigError: no adapter has the name, or an adapter is merged.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.delete_adapter(self, name)

    def merge_adapter(self, name: str | None = None, *, dequantize: bool = False) -> Self:
        """Add the update of an adapter to the weights, so that the adapter costs no time.

        The original matrices are kept (twice the memory of the adapted matrices).
        `unmerge_adapter` restores them exactly.

        Args:
            name: name of the adapter; None = the active adapter.
            dequantize: convert quantized matrices with adapters to plain matrices.

        Raises:
            ConfigError: the adapter does not exist, an adapter is merged, or a matrix is quantized.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.merge_adapter(self, name, dequantize)

    def unmerge_adapter(self) -> Self:
        """Undo `merge_adapter`: restore the exact base weights, and activate the adapter.

        Changes of these weights since `merge_adapter` are lost.

        Raises:
            ConfigError: no adapter is merged, or the layout of the layers has changed.
        """
        from ed_models.adapters import named_adapters

        return named_adapters.unmerge(self)

    def unwrap_lora_to_layers(self, *, dequantize: bool = False) -> Self:
        """Merge the active adapter into the weights permanently, and remove all adapters.

        Args:
            dequantize: convert quantized matrices with adapters to plain matrices.
        """
        from ed_models.adapters.lora import merge_lora

        return merge_lora(cast(Any, self), dequantize=dequantize).shard_model()

    # Quantization. Each method returns another model, sharded like this one.

    def quantize(
        self,
        rules: QuantizationRules | None = None,
        *,
        quantization_config: QuantizationRules | None = None,
        apply_quantization: bool = True,
        **fields: object,
    ) -> Self:
        """Quantize the matrices that rules select; see `ed_layers.quantization.quantize`.

        Args:
            rules: None = the configuration's `quantization_config`.
            quantization_config: another name of `rules`.
            apply_quantization: False returns the model unchanged.
            fields: fields of one `EasyDeLQuantizationConfig` instead of rules, such as `method`,
                `group_size` and `quantization_pattern`.

        Raises:
            ConfigError: the model is quantized, a rule matches nothing, a group does not fit, or
                there are neither rules nor a `quantization_config`, or several of them.
        """
        from ed_models.base.quantization import merge_rules, quantize_model

        rules = merge_rules(rules, quantization_config, fields)
        return quantize_model(self, rules) if apply_quantization else self

    def dequantize(self) -> Self:
        """Convert quantized matrices to plain matrices with the same values."""
        from ed_models.base.quantization import dequantize_model

        return dequantize_model(self)

    @property
    def is_quantized(self) -> bool:
        """Whether a matrix is quantized."""
        from ed_layers.quantization.model import is_quantized

        return is_quantized(cast(Any, self))
