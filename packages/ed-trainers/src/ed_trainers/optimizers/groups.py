"""Weight decay and learning rates of groups of parameters, by rules over canonical names.

Parameters are distinguished by canonical name (`model.layers.3.input_layernorm.weight`), never by
rank: a norm's weight has rank two when its layers are stacked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from ed_infra.parameter_names import canonical, is_stacked
from ed_infra.rules import Rules

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.optimizers import GRAD_NORMS

#: Parameters without weight decay: biases, all parameters of norms, and the rates, steps, skips
#: and mixtures of a recurrence (Mamba, RG-LRU, RWKV).
_OWN = r"bias|A_log|D|dt_bias|\w+_gate_bias|recurrent_param|time_(decay|first|mix_\w+)"
NO_DECAY = re.compile(rf"(^|\.)({_OWN})$|norm[^.]*(\.(weight|scale|bias))?$", re.IGNORECASE)

#: A tree like the parameters with one number for each.
ParamTree = optax.Params


def decays(path: Sequence[object]) -> bool:
    """Return whether weight decay applies by default to the parameter at a path."""
    return not NO_DECAY.search(canonical(path)[0])


def weight_decays(arguments: TrainingArguments, params: optax.Params | None) -> ParamTree:
    """Return the weight decay of each parameter.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    rules = Rules(arguments.weight_decay_rules, kind="weight decay rule")

    def decay(path: Sequence[object], _: jax.Array) -> float:
        return rules.at(path, arguments.weight_decay if decays(path) else 0.0)

    numbers = jax.tree_util.tree_map_with_path(decay, params)
    rules.check_used()
    return numbers


def learning_rate_factors(arguments: TrainingArguments, params: optax.Params | None) -> ParamTree:
    """Return the factor on the learning rate of each parameter.

    Raises:
        ConfigError: a rule matches no parameter.
    """
    return Rules(arguments.learning_rate_rules, kind="learning rate rule").tree(params, 1.0)


def get_array_norms(grads: optax.Updates) -> dict[str, jax.Array]:
    """Return `grad_norm/<name>`, the Euclidean norm of the gradient of each parameter, in float32.

    Layers that are stored as one array have one norm each.
    """
    norms: dict[str, jax.Array] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        for name, array in split_layers(path, leaf):
            norms[f"{GRAD_NORMS}/{name}"] = jnp.sqrt(jnp.sum(jnp.square(array.astype(jnp.float32))))
    return norms


def split_layers(path: Sequence[object], leaf: jax.Array) -> list[tuple[str, jax.Array]]:
    """Return the canonical name and the array of each layer that a parameter stores."""
    names = canonical(path)
    if not is_stacked(path):
        return [(names[0], leaf)]
    return [(name, leaf[index]) for index, name in enumerate(names)]
