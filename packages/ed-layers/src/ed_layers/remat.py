"""Which intermediate results the backward pass keeps, by Hugging Face-style policy names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from ed_infra.errors import ConfigError, unknown_name

POLICIES = jax.checkpoint_policies

# Policies that are a fixed rule.
FIXED: dict[str, Callable[..., Any]] = {
    "everything_saveable": POLICIES.everything_saveable,
    "nothing_saveable": POLICIES.nothing_saveable,
    "checkpoint_dots": POLICIES.dots_saveable,
    "dots_saveable": POLICIES.dots_saveable,
    "checkpoint_dots_with_no_batch_dims": POLICIES.dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_saveable": POLICIES.dots_with_no_batch_dims_saveable,
}

# Policies made from `gradient_checkpointing_targets`, the names given by `ed_layers.named`.
BY_NAME: dict[str, Callable[..., Any]] = {
    "save_only_these_names": POLICIES.save_only_these_names,
    "save_any_names_but_these": POLICIES.save_any_names_but_these,
    "save_anything_except_these_names": POLICIES.save_anything_except_these_names,
    "save_from_both_policies": lambda *names: POLICIES.save_from_both_policies(
        POLICIES.dots_with_no_batch_dims_saveable, POLICIES.save_only_these_names(*names)
    ),
}

MLP = ("mlp_gate", "mlp_up", "mlp_down", "mlp_output")
ATTENTION = ("attn_query", "attn_key", "attn_value", "attn_weights", "attn_dense", "attn_output")
# "Any names but these" and not "anything except these names": the latter keeps what a name is given
# to, which is all but the same array.
FIXED["mlp_notsaveable"] = POLICIES.save_any_names_but_these(*MLP)
FIXED["attn_notsaveable"] = POLICIES.save_any_names_but_these(*ATTENTION)
FIXED["mlp_attn_notsaveable"] = POLICIES.save_any_names_but_these(*MLP, *ATTENTION)


def remat(
    function: Callable[..., Any], name: str, targets: Sequence[str] | None = None
) -> Callable[..., Any]:
    """Wrap a layer so that the backward pass recomputes what the policy does not keep.

    Args:
        name: `gradient_checkpointing`; "" keeps everything and returns the function as it is.
        targets: `gradient_checkpointing_targets`, for the policies that take names.

    Raises:
        ConfigError: the policy is unknown, or needs targets and has none (or the reverse).
    """
    if name == "":
        return function
    if name in FIXED:
        if targets:
            raise ConfigError(
                f"gradient_checkpointing={name!r} takes no gradient_checkpointing_targets; these "
                f"policies do: {', '.join(BY_NAME)}"
            )
        return jax.checkpoint(function, policy=FIXED[name])
    if name in BY_NAME:
        if not targets:
            raise ConfigError(
                f"gradient_checkpointing={name!r} needs gradient_checkpointing_targets, "
                "for example ['attn_output', 'mlp_down']"
            )
        return jax.checkpoint(function, policy=BY_NAME[name](*targets))
    raise unknown_name("gradient_checkpointing policy", name, ["", *FIXED, *BY_NAME])
