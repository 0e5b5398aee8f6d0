"""Low-rank adapters: a frozen matrix with a trained low-rank update.

`y = x W + scale * dropout(x) A B`, with A [i, r] and B [r, o] (Hu et al. 2021). B starts at zero,
so a new adapter changes nothing. DoRA (Liu et al. 2024) also trains the norm of each column.

An adapted layer keeps its parameters and their names, and adds `lora_a`, `lora_b` and
`lora_magnitude`. These are `nnx.LoRAParam`, so trainers can select them.

An adapter may start as a part of W (PiSSA, OLoRA). The layer then keeps this part, A0 B0, in
`lora_initial_a` and `lora_initial_b`, and computes `y = x (W - scale * A0 B0) + scale *
dropout(x) A B`. W itself stays unchanged.

Legend: i in features, o out features, r rank, v vocabulary, d hidden, e experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.specs import LoraSpec
from flax import nnx
from jax.lax import PrecisionLike
from jaxtyping import Array, Float

from ed_layers.context import Ctx
from ed_layers.projections.dot import Weight, dot
from ed_layers.projections.embed import Embed
from ed_layers.projections.linear import ExpertLinear, Linear
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from ed_layers.sums import over_axis
from ed_layers.updated import Updated


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRank:
    """The matrix `(W + scale * A B) * factor`, which is never materialized.

    Attributes:
        base: W [i, o].
        a, b: [i, r] and [r, o].
        factor: factor on each column, [o]; None = 1.
        scale: factor on the update.
        initial: A0 [i, r] and B0 [r, o], whose product is subtracted from W; None = nothing.
    """

    base: Weight
    a: Float[Array, "i r"]
    b: Float[Array, "r o"]
    factor: Float[Array, " o"] | None = None
    scale: float = field(default=1.0, metadata={"static": True})
    initial: tuple[jax.Array, jax.Array] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(i, o)."""
        return self.base.shape

    def dense(self) -> jax.Array:
        """Return `W + scale * A B` in float32, without the factor; W as products read it."""
        assert isinstance(self.base, jax.Array | QArray | Simulated), "adapters are not nested"
        change = dot(self.a, self.b)
        if self.initial is not None:
            change = change - dot(*self.initial)
        return self.base.astype(jnp.float32) + self.scale * change

    def column_norms(self) -> Float[Array, " o"]:
        """Return the norm of each column of `dense`."""
        return jnp.sqrt(over_axis(jnp.square(self.dense()), 0))

    def product(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
        """Return `x @ self`, [..., o], in the dtype of `x`."""
        base = self.base_product(x, precision=precision)
        return self.finish(base, self.change(x, precision=precision))

    def base_product(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
        """Return the product of `x` with the part of the matrix that is not trained."""
        product = dot(x, self.base, precision=precision)
        if self.initial is None:
            return product
        inner = dot(x, self.initial[0], precision=precision)
        return product - dot(inner, self.initial[1], precision=precision) * self.scale

    def change(self, x: jax.Array, *, precision: PrecisionLike = None) -> jax.Array:
        """Return `scale * x A B`."""
        inner = dot(x, self.a, precision=precision)
        return dot(inner, self.b, precision=precision) * self.scale

    def finish(self, base: jax.Array, change: jax.Array) -> jax.Array:
        """Combine the two products."""
        out = base + change
        return out if self.factor is None else out * self.factor.astype(out.dtype)


class InitialMatrix(Updated):
    """A factor of the part of the weights that an adapter starts with: constant, in checkpoints."""

    @classmethod
    def like(cls, matrix: nnx.LoRAParam) -> InitialMatrix:
        """Return zeros with the shape and the axes of a trained factor."""
        return cls(jnp.zeros(matrix.get_value().shape), axes=matrix.get_metadata()["axes"])


class LoRALinear(Linear):
    """A linear layer with an adapter.

    Args:
        base: the layer to adapt; this layer takes over its variables.
        spec: rank, scale, dropout, DoRA.
        key: random key of A.
    """

    def __init__(self, base: Linear, spec: LoraSpec, key: jax.Array):
        adopt(self, base)
        self.lora_a, self.lora_b = fresh(base.kernel, spec.rank, key)
        if spec.dora:
            axes = base.kernel.get_metadata().get("axes", (None, None))
            length = jnp.linalg.norm(base.kernel.get_value().astype(jnp.float32), axis=0)
            self.lora_magnitude = nnx.LoRAParam(length, axes=(axes[1],))
        if spec.subtracts_start:
            self.lora_initial_a = InitialMatrix.like(self.lora_a)
            self.lora_initial_b = InitialMatrix.like(self.lora_b)
        self.spec = spec

    @property
    def weight(self) -> LowRank:
        """The matrix with its update, as an argument of `dot`."""
        a, b = self.lora_a.get_value(), self.lora_b.get_value()
        initial = None
        if self.spec.subtracts_start:
            initial = (self.lora_initial_a.get_value(), self.lora_initial_b.get_value())
        weight = LowRank(self.kernel.get_value(), a, b, scale=self.spec.scale, initial=initial)
        if not self.spec.dora:
            return weight
        # The gradient treats the norm as a constant (section 4.3 of the paper).
        length = jax.lax.stop_gradient(weight.column_norms())
        return replace(weight, factor=self.lora_magnitude.get_value() / length)

    def __call__(self, x: Float[Array, "*rows i"], ctx: Ctx | None = None):
        """Project [..., in] to [..., out]; training applies dropout to the adapter's input."""
        x, weight = x.astype(self.dtype), self.weight
        dropped = x
        if ctx is not None:
            site = f"lora {x.shape[-1]} {weight.shape[-1]}"
            dropped = ctx.apply_dropout(x, self.spec.dropout, site)
        base = weight.base_product(x, precision=self.precision)
        change = weight.change(dropped, precision=self.precision)
        if self.spec.dora and dropped is not x:
            # As in PEFT: the base term of DoRA is not affected by the dropout of the adapter.
            assert weight.factor is not None
            base_product = weight.base_product(dropped, precision=self.precision)
            factor = weight.factor.astype(x.dtype)
            y = base + (factor - 1) * base_product + factor * change
        else:
            y = weight.finish(base, change)
        if self.use_bias:
            y = y + self.bias.get_value().astype(self.dtype)
        return y

    def merge_adapter(self) -> Linear:
        """Return the layer without an adapter and with the updated kernel."""
        weight = self.weight
        dense_kernel = weight.dense() if weight.factor is None else weight.dense() * weight.factor
        layer = self.base()
        layer.kernel = plain_matrix(self.kernel, dense_kernel)
        return layer

    def base(self) -> Linear:
        """Return the layer without its adapter."""
        return strip_adapter(Linear, self)


class LoRAEmbed(Embed):
    """An embedding with an adapter: `E[id] + scale * A[id] B`, A [v, r] and B [r, d]; A starts at
    zero, as in PEFT. A head that is tied to the embedding does not use the adapter."""

    def __init__(self, base: Embed, spec: LoraSpec, key: jax.Array):
        if spec.dora:
            raise ConfigError("dora is for linear layers; leave embeddings out of its targets")
        adopt(self, base)
        rows, features = base.embedding.get_value().shape[-2:]
        b = jax.random.normal(key, (spec.rank, features))
        self.lora_a = nnx.LoRAParam(jnp.zeros((rows, spec.rank)), axes=("vocab", None))
        self.lora_b = nnx.LoRAParam(b, axes=(None, "embed"))
        self.spec = spec

    def __call__(self, input_ids):
        """Look up [b, s] tokens: [b, s, d]."""
        rows = jnp.take(self.lora_a.get_value(), input_ids, axis=0)
        change = dot(rows, self.lora_b.get_value()) * self.spec.scale
        return super().__call__(input_ids) + change.astype(self.dtype)

    def merge_adapter(self) -> Embed:
        """Return the embedding without an adapter and with the updated table."""
        change = self.lora_a.get_value() @ self.lora_b.get_value() * self.spec.scale
        layer = self.base()
        layer.embedding = plain_matrix(
            self.embedding, self.embedding.get_value().astype(jnp.float32) + change
        )
        return layer

    def base(self) -> Embed:
        """Return the embedding without its adapter."""
        return strip_adapter(Embed, self)


class LoRAExperts(ExpertLinear):
    """The linear layers of all experts, each with a separate adapter: A [e, i, r], B [e, r, o].

    Raises:
        ConfigError: the specification has dropout, DoRA or initial values from the weights, which
            PEFT does not support for experts.
    """

    def __init__(self, base: ExpertLinear, spec: LoraSpec, key: jax.Array):
        start = spec.decomposes_weights and f"init_lora_weights {spec.init_lora_weights!r}"
        for name, value in (("dropout", spec.dropout), ("dora", spec.dora), (start, start)):
            if value:
                raise ConfigError(
                    f"{name} is for linear layers; leave experts out of its targets, or {name} out"
                )
        adopt(self, base)
        self.lora_a, self.lora_b = fresh(base.kernel, spec.rank, key)
        self.spec = spec

    def arrays(self) -> dict[str, jax.Array]:
        """Return the arrays, with the scale multiplied into B."""
        arrays = super().arrays()
        return {**arrays, "lora_b": arrays["lora_b"] * self.spec.scale}

    def merge_adapter(self) -> ExpertLinear:
        """Return the layers without adapters and with updated kernels."""
        change = self.lora_a.get_value() @ self.lora_b.get_value() * self.spec.scale
        layer = self.base()
        layer.kernel = plain_matrix(
            self.kernel, self.kernel.get_value().astype(jnp.float32) + change
        )
        return layer

    def base(self) -> ExpertLinear:
        """Return the layers without their adapters."""
        return strip_adapter(ExpertLinear, self)


#: A layer with an adapter: it has `lora_a`, `lora_b` and `spec`, `merge_adapter()` and `base()`.
AdaptedLayer = LoRALinear | LoRAEmbed | LoRAExperts

#: Class of a layer that can have an adapter -> class of the adapted layer.
ADAPTED: dict[type[nnx.Module], type[AdaptedLayer]] = {
    Linear: LoRALinear,
    Embed: LoRAEmbed,
    ExpertLinear: LoRAExperts,
}


def fresh(kernel: nnx.Variable, rank: int, key: jax.Array) -> tuple[nnx.LoRAParam, nnx.LoRAParam]:
    """Create A and B for a kernel [*experts, i, o]; B is zero."""
    *leading, inputs, outputs = kernel.get_value().shape
    *leading_axes, input_axis, output_axis = kernel.get_metadata().get("axes", (None, None))
    # PEFT uses torch's initialization of a linear layer.
    bound = inputs**-0.5
    a = jax.random.uniform(key, (*leading, inputs, rank), jnp.float32, -bound, bound)
    b = jnp.zeros((*leading, rank, outputs))
    return (
        nnx.LoRAParam(a, axes=(*leading_axes, input_axis, None)),
        nnx.LoRAParam(b, axes=(*leading_axes, None, output_axis)),
    )


def plain_matrix(old: nnx.Variable, value: jax.Array) -> nnx.Param:
    """Return a plain parameter with another value, to replace one that may be quantized."""
    value = value.astype(old.get_value().dtype)
    if isinstance(old, nnx.Param):
        return cast(nnx.Param, old.replace(value))
    return nnx.Param(value, axes=old.get_metadata().get("axes"))


def adopt(new: object, old: nnx.Module) -> Any:
    """Copy the variables and attributes of a layer to another layer, except those of an adapter."""
    for name, value in vars(old).items():
        if not name.startswith(("_", "lora_")) and name != "spec":
            setattr(new, name, value)
    return new


def strip_adapter(cls: type[Any], adapted: nnx.Module) -> Any:
    """Return a layer of class `cls` with the variables of an adapted layer."""
    # The constructor would create new variables, so the layer is created without calling it.
    new = nnx.Module()
    object.__setattr__(new, "__class__", cls)  # not an attribute in the eyes of nnx
    return adopt(new, adapted)
