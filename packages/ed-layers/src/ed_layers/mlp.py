"""Feed-forward layers. Legend: b batch, s sequence, d hidden, f intermediate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.errors import unknown_name
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from ed_layers.context import Ctx
from ed_layers.linear import Initializer, Linear

# Hugging Face's names (transformers.activations.ACT2FN).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def activation(name: str) -> Callable[[Array], Array]:
    """The activation of that Hugging Face name.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise unknown_name("activation (hidden_act)", name, ACTIVATIONS)
    return ACTIVATIONS[name]


class GatedMLP(nnx.Module):
    """`down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        hidden_act: str,
        use_bias: bool = False,
        dtype: jnp.dtype = jnp.float32,
        param_dtype: jnp.dtype = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        kernel_init: Initializer,
        rngs: nnx.Rngs,
    ):
        linear = partial(
            Linear,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            kernel_init=kernel_init,
            rngs=rngs,
        )
        self.gate_proj = linear(hidden_size, intermediate_size, axes=("embed", "mlp"))
        self.up_proj = linear(hidden_size, intermediate_size, axes=("embed", "mlp"))
        self.down_proj = linear(intermediate_size, hidden_size, axes=("mlp", "embed"))
        self.hidden_act = hidden_act
        activation(hidden_act)

    def __call__(self, x: Float[Array, "b s d"], ctx: Ctx | None = None) -> Float[Array, "b s d"]:
        gate = checkpoint_name(self.gate_proj(x, ctx), "mlp_gate")
        up = checkpoint_name(self.up_proj(x, ctx), "mlp_up")
        out = self.down_proj(activation(self.hidden_act)(gate) * up, ctx)
        return checkpoint_name(out, "mlp_down")
