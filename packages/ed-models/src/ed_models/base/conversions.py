"""EasyDeL's further methods of a model: trees of parameters, dtypes, placement, parts, FLOPs.

Each method uses the methods of `EasyDeLBaseModule`. A method that changes a model returns another
model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, Self, cast

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.sharding import placement
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

#: Nested mapping of names to arrays.
ParameterTree = Mapping[Any, Any]


class _Output(Protocol):
    loss: jax.Array


class ParameterConversions:
    """A mixin of `EasyDeLBaseModule`."""

    config: EasyDeLBaseConfig
    dtype: jnp.dtype
    param_dtype: jnp.dtype

    # Trees of parameters.

    @property
    def params(self) -> nnx.State:
        """All parameters."""
        return nnx.state(self, nnx.Param)

    @property
    def graphtree_params_shape(self) -> nnx.State:
        """Shape and dtype of each parameter."""
        return jax.eval_shape(lambda: self.params)

    def split_params(self) -> nnx.State:
        """Return all parameters; see `merge_params`."""
        return self.params

    def merge_params(self, params: nnx.State) -> Self:
        """Return the model with other parameters.

        Args:
            params: a tree of `split_params`, or a part of the tree.
        """
        graphdef, state = nnx.split(self)
        model = nnx.merge(graphdef, state)
        nnx.update(model, params)
        return model

    def split_params_dict(self) -> dict[Any, Any]:
        """Return all parameters as nested dictionaries of arrays."""
        return nnx.to_pure_dict(self.params)

    def merge_params_dict(self, params: ParameterTree) -> Self:
        """Return the model with other parameters; the inverse of `split_params_dict`.

        Raises:
            ConfigError: a name is no parameter of the model.
        """
        state = self.params
        known = dict(nnx.to_flat_state(state))
        flat = nnx.traversals.flatten_mapping(params)
        for path, value in flat.items():
            if path not in known:
                names = "/".join(map(str, path))
                raise ConfigError(f"{names} is no parameter of {type(self).__name__}")
            known[path] = known[path].replace(value)
        return self.merge_params(nnx.from_flat_state(known.items()))

    def split_lora_params(self) -> nnx.State:
        """Return the parameters of the adapters; see `merge_lora_params`."""
        return nnx.state(self, nnx.LoRAParam)

    def merge_lora_params(self, params: nnx.State | None = None) -> Self:
        """Return the model with other parameters of its adapters.

        Args:
            params: a tree of `split_lora_params`; None merges the active adapter into the weights.
        """
        if params is None:
            return cast(Any, self).merge_adapter()
        return self.merge_params(params)

    def pure_transform_fn(self) -> Callable[..., object]:
        """Return a function `(params, inputs, **more)` that calls the model with parameters.

        `inputs` is a mapping of arguments of a call, or None.
        """
        graphdef, _, others = nnx.split(self, nnx.Param, ...)

        def call(
            params: nnx.State, inputs: Mapping[str, object] | None = None, **more: object
        ) -> object:
            model = cast("Callable[..., object]", nnx.merge(graphdef, params, others))
            return model(**(inputs or {}), **more)

        return call

    @classmethod
    def lazy_init(cls, config: EasyDeLBaseConfig, **options: object) -> Self:
        """Return the model with shapes instead of arrays.

        Args:
            config: the configuration.
            options: arguments of the class; shapes do not depend on `rngs`.
        """
        options.pop("rngs", None)

        def build() -> Self:
            return cast("Callable[..., Self]", cls)(config, rngs=nnx.Rngs(0), **options)

        return nnx.eval_shape(build)

    def update_module(self, **fields: object) -> Self:
        """Return the model with other fields of its configuration and the same arrays.

        Args:
            fields: fields that change no shape, such as `attn_mechanism`.

        Raises:
            ConfigError: a shape changes, or the model has adapters or is quantized.
        """
        config = self.config.replace(**fields)
        build = partial(cast("Callable[..., Self]", type(self)), config)
        numbers = self.dtype, self.param_dtype, cast(Any, self).precision
        graphdef, shapes = nnx.split(nnx.eval_shape(lambda: build(*numbers, rngs=nnx.Rngs(0))))
        state = nnx.state(self)
        before, after = (
            {path: jnp.shape(variable.get_raw_value()) for path, variable in nnx.to_flat_state(one)}
            for one in (state, shapes)
        )
        if before != after:
            raise ConfigError(
                f"update_module({', '.join(fields)}) changes the arrays of the model: create "
                "another model, or merge its adapters and dequantize it first"
            )
        return nnx.merge(graphdef, state)

    # Dtypes.

    @property
    def module_dtype(self) -> jnp.dtype:
        """Dtype of the parameters."""
        return jax.tree.leaves(self.params)[0].dtype

    def to_dtype(self, dtype: DTypeLike) -> Self:
        """Return the model with floating-point parameters of another dtype."""
        return self.change_dtypes(param_dtype=dtype)

    def half(self, change_runtime_dtype: bool = True) -> Self:
        """Return the model in float16; see `float`."""
        runtime = jnp.float16 if change_runtime_dtype else None
        return self.change_dtypes(dtype=runtime, param_dtype=jnp.float16)

    def float(self, change_runtime_dtype: bool = True) -> Self:
        """Return the model in float32.

        Args:
            change_runtime_dtype: whether the dtype of activations changes, too.
        """
        runtime = jnp.float32 if change_runtime_dtype else None
        return self.change_dtypes(dtype=runtime, param_dtype=jnp.float32)

    def change_dtypes(
        self, *, dtype: DTypeLike | None = None, param_dtype: DTypeLike | None = None
    ) -> Self:
        """Return the model with another dtype of activations or of its parameters.

        Args:
            dtype: dtype of activations; None = unchanged.
            param_dtype: dtype of floating-point parameters; None = unchanged.
        """

        def convert(array: jax.Array) -> jax.Array:
            is_float = jnp.issubdtype(array.dtype, jnp.floating)
            return array.astype(param_dtype) if is_float else array

        graphdef, params, others = nnx.split(self, nnx.Param, ...)
        if param_dtype is not None:
            params = jax.tree.map(convert, params)
        model = nnx.merge(graphdef, params, others)
        given = {"dtype": dtype, "param_dtype": param_dtype}
        values = {name: jnp.dtype(value) for name, value in given.items() if value is not None}
        for _, module in nnx.iter_modules(cast("nnx.Module", model)):
            for name, value in values.items():
                if isinstance(getattr(module, name, None), jnp.dtype):
                    setattr(module, name, value)
        return model

    # Placement.

    def _specs_sharding(self, partition_rules: object = None) -> Any:
        """Return the partition specification of each array."""
        return placement.specs(
            cast("nnx.Module", self), self.config, None, cast(Any, partition_rules)
        )

    def _named_shardings(self, partition_rules: object = None, mesh: Mesh | None = None) -> Any:
        """Return the sharding of each array on the mesh."""
        return placement.shardings(
            cast("nnx.Module", self), self.config, mesh, cast(Any, partition_rules)
        )

    def _shard_fns(
        self, partition_rules: object = None, mesh: Mesh | None = None
    ) -> dict[tuple[Any, ...], Callable[[jax.Array], jax.Array]]:
        """Return path of an array -> function that places the array on the mesh."""
        return {
            path: lambda array, to=to: jax.device_put(array, getattr(to, "value", to))
            for path, to in nnx.to_flat_state(self._named_shardings(partition_rules, mesh))
        }

    def _gather_fns(
        self, partition_rules: object = None, mesh: Mesh | None = None
    ) -> dict[tuple[Any, ...], Callable[[jax.Array], jax.Array]]:
        """Return path of an array -> function that copies the array to every device."""
        to = NamedSharding(mesh or self.config.mesh, jax.sharding.PartitionSpec())
        paths = self._shard_fns(partition_rules, mesh)
        return {path: lambda array: jax.device_put(array, to) for path in paths}

    def _apply_sharding_fns(
        self,
        tree: nnx.State,
        partition_rules: object = None,
        mesh: Mesh | None = None,
        is_gather: bool = False,
    ) -> nnx.State:
        """Return a tree of the model's arrays, placed on the mesh or gathered.

        Args:
            tree: arrays under the paths of the model's parameters.
            partition_rules, mesh: see `shard_model`.
            is_gather: whether every device gets the whole arrays.
        """
        make = self._gather_fns if is_gather else self._shard_fns
        functions = make(partition_rules, mesh)
        placed = [
            (path, variable.replace(functions[path](variable.get_value())))
            for path, variable in nnx.to_flat_state(tree)
        ]
        return nnx.from_flat_state(placed)

    # Parts.

    def get_decoder(self) -> nnx.Module:
        """Return the body with the layers of the decoder.

        Raises:
            ConfigError: the model has no decoder.
        """
        body: object = getattr(self, "model", self)
        decoder: object = getattr(body, "decoder", body)
        if not hasattr(decoder, "layers"):
            raise ConfigError(f"{type(self).__name__} has no decoder")
        return cast("nnx.Module", decoder)

    def get_embedding(self) -> nnx.Module:
        """Return the layer that embeds tokens.

        Raises:
            ConfigError: the model reads no tokens.
        """
        for owner in (self.get_decoder(), getattr(self, "model", self)):
            embedding = getattr(owner, "embed_tokens", None)
            if embedding is not None:
                return embedding
        raise ConfigError(f"{type(self).__name__} embeds no tokens")

    def get_lm_head(self) -> nnx.Module:
        """Return the layer of the head; for a tied head, the embedding."""
        return getattr(self, "lm_head", None) or self.get_embedding()

    @property
    def loss_function(self) -> Callable[..., tuple[_Output, jax.Array]]:
        """The function that computes the loss of a batch, `compute_loss`.

        Raises:
            ConfigError: the model has no loss.
        """
        compute = getattr(self, "compute_loss", None)
        if compute is None:
            raise ConfigError(f"{type(self).__name__} has no loss")
        return compute

    def get_static_arguments(self) -> tuple[str, ...]:
        """Return the names of arguments of a call that are no arrays."""
        return ("logits_at", "output_hidden_states", "output_routed_experts")

    def prepare_inputs_for_call(self, **inputs: object) -> dict[str, object]:
        """Return the arguments of a call; None is left out."""
        return {name: value for name, value in inputs.items() if value is not None}

    # FLOPs.

    def flops_per_token(
        self,
        sequence_length: int | None = None,
        include_loss: bool = True,
        include_backward: bool = False,
    ) -> float:
        """Return the floating-point operations of a token; see `ed_models.base.flops`.

        Args:
            sequence_length: tokens of a sequence; None = the largest number of positions.
            include_loss: whether to count the head.
            include_backward: whether to add the backward pass, in which all parameters are trained.
        """
        from ed_models.base.flops import count_token_flops  # read by this method only

        config = self.config.get_text_config()
        length = sequence_length or getattr(config, "max_position_embeddings", 0)
        flops = count_token_flops(self.params, None, self.config)
        if not include_loss and hasattr(self, "head"):
            head = config.hidden_size * config.vocab_size
            flops = flops._replace(trained=flops.trained - head)
        return flops.count_training(length) if include_backward else flops.count_forward(length)
