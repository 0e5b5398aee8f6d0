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
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
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
