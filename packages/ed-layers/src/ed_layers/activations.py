"""Activations by Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from ed_infra.errors import unknown_name
from jaxtyping import Array

# Hugging Face's names (transformers.activations.ACT2FN).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": partial(jax.nn.gelu, approximate=True),
    # Other formulas of these two functions, and the first one with bounds.
    "gelu_python": partial(jax.nn.gelu, approximate=False),
    "gelu_fast": partial(jax.nn.gelu, approximate=True),
    "gelu_accurate": partial(jax.nn.gelu, approximate=True),
    "gelu_python_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu_10": lambda x: jnp.clip(jax.nn.gelu(x, approximate=False), -10, 10),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "hardswish": jax.nn.hard_swish,
    "mish": jax.nn.mish,
    "linear": lambda x: x,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def activation(name: str) -> Callable[[Array], Array]:
    """Return the activation with the given Hugging Face name.

    Raises:
        ConfigError: the name is unknown; the message lists the known ones.
    """
    if name not in ACTIVATIONS:
        raise unknown_name("activation (hidden_act)", name, ACTIVATIONS)
    return ACTIVATIONS[name]
