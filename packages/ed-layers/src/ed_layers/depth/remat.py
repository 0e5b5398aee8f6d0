"""Rematerialization: the policies of `gradient_checkpointing`.

A layer is wrapped in `jax.checkpoint`. The input of the layer is always kept. The backward pass
recomputes from it every value that the policy does not keep. Policies with
`gradient_checkpointing_targets` select among the values that `ed_layers.context.named` names.

Cheap values are recomputed under every policy, including no policy: see `call_with_remat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError, unknown_name
from jax.extend.core import ClosedJaxpr, Jaxpr

from ed_layers import native

RematPolicy = Callable[..., Any]

POLICIES = jax.checkpoint_policies
#: Memory kinds of jax: device memory, and pinned host memory that the device can copy directly.
DEVICE, HOST = "device", "pinned_host"

_MLP = ("mlp_gate", "mlp_up", "mlp_down", "mlp_output")
ATTENTION = ("attn_query", "attn_key", "attn_value", "attn_weights", "attn_dense", "attn_output")

#: Policies without targets.
FIXED: dict[str, RematPolicy] = {
    "everything_saveable": POLICIES.everything_saveable,
    "nothing_saveable": POLICIES.nothing_saveable,
    "checkpoint_dots": POLICIES.dots_saveable,
    "dots_saveable": POLICIES.dots_saveable,
    "checkpoint_dots_with_no_batch_dims": POLICIES.dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_saveable": POLICIES.dots_with_no_batch_dims_saveable,
    # These policies use "any names but these", not "anything except these names". The latter keeps
    # the unnamed input of the name operation, which is the same array.
    "mlp_notsaveable": POLICIES.save_any_names_but_these(*_MLP),
    "attn_notsaveable": POLICIES.save_any_names_but_these(*ATTENTION),
    "mlp_attn_notsaveable": POLICIES.save_any_names_but_these(*_MLP, *ATTENTION),
    "offload_dot_with_no_batch_dims": POLICIES.offload_dot_with_no_batch_dims(DEVICE, HOST),
}

#: Policies with targets.
BY_NAME: dict[str, Callable[..., RematPolicy]] = {
    "save_only_these_names": POLICIES.save_only_these_names,
    "save_any_names_but_these": POLICIES.save_any_names_but_these,
    "save_anything_except_these_names": POLICIES.save_anything_except_these_names,
    "save_from_both_policies": lambda *names: POLICIES.save_from_both_policies(
        POLICIES.dots_with_no_batch_dims_saveable, POLICIES.save_only_these_names(*names)
    ),
    "save_and_offload_only_these_names": lambda *names: POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(names),
        offload_src=DEVICE,
        offload_dst=HOST,
    ),
}

OFFLOAD = ("offload_dot_with_no_batch_dims", "save_and_offload_only_these_names")
#: Policies that keep their targets in device memory.
KEEP = ("save_only_these_names", "save_from_both_policies")

#: Names outside of the layers, where nothing is recomputed: kept under every policy.
OUTSIDE = ("embeddings", "model_output", "lm_head_output")
#: The input of the next layer: also kept, but a policy may offload it to the host.
BETWEEN = "layer_output"


def call_with_remat(function: Callable[..., jax.Array], *arguments: object) -> jax.Array:
    """Return `function(*arguments)`; the backward pass keeps only the arguments.

    Norms and activations use this function: their intermediate values are as large as the results
    of the neighbouring products, but cost only one pass over memory. `jax.checkpoint` would hide
    named arguments from the policy of the layer.

    Args:
        function: a function of arrays that closes over no array.
        arguments: trees of floating-point arrays.
    """
    return call_and_forget(native.KernelChoice.get_current().wrap_function(function), *arguments)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def call_and_forget(function: Callable[..., jax.Array], *arguments: object) -> jax.Array:
    return function(*arguments)


def recomputed_forward(function: Callable[..., jax.Array], *arguments: object):
    return function(*arguments), arguments


def recomputed_backward(
    function: Callable[..., jax.Array], arguments: tuple[object, ...], d_result: jax.Array
):
    # The barrier prevents the compiler from reusing, and so keeping, values of the forward pass.
    return jax.vjp(function, *jax.lax.optimization_barrier(arguments))[1](d_result)


call_and_forget.defvjp(recomputed_forward, recomputed_backward)


@dataclass(frozen=True)
class Remat:
    """A validated policy, stored in a `Stack`.

    Attributes:
        name: `gradient_checkpointing`; "" keeps every value and does not wrap the layer.
        targets: `gradient_checkpointing_targets`, for the policies with targets.

    Raises:
        ConfigError: the policy is unknown, lacks its targets, has targets that it does not accept,
            or a target names a value outside of the layers.
    """

    name: str = ""
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in ("", *FIXED, *BY_NAME):
            raise unknown_name("gradient_checkpointing policy", self.name, ["", *FIXED, *BY_NAME])
        if self.name in BY_NAME and not self.targets:
            raise ConfigError(
                f"gradient_checkpointing={self.name!r} needs gradient_checkpointing_targets, "
                "for example ['attn_output', 'mlp_down']"
            )
        if self.name not in BY_NAME and self.targets:
            raise ConfigError(
                f"gradient_checkpointing={self.name!r} takes no gradient_checkpointing_targets; "
                f"these policies do: {', '.join(BY_NAME)}"
            )
        fixed = {*OUTSIDE} if self.name in OFFLOAD else {*OUTSIDE, BETWEEN}
        if self.name not in KEEP and (fixed_targets := [t for t in self.targets if t in fixed]):
            raise ConfigError(
                f"gradient_checkpointing={self.name!r} has no say over {', '.join(fixed_targets)}: "
                "what is "
                "made outside of the layers, or goes from layer to layer, is always kept on the "
                "device; leave it out of gradient_checkpointing_targets"
            )

    @classmethod
    def resolve(cls, config: EasyDeLBaseConfig) -> Remat:
        """Read the policy from an `EasyDeLBaseConfig`.

        Raises:
            ConfigError: as above; or the policy offloads values to the host, and the devices of the
                mesh have no pinned host memory.
        """
        targets = tuple(config.gradient_checkpointing_targets or ())
        remat = cls(str(config.gradient_checkpointing), targets)
        if remat.name in OFFLOAD and config.easy_method == "train":
            check_host_memory(remat.name, config.mesh)
        return remat

    @property
    def policy(self) -> RematPolicy:
        """The policy function for `jax.checkpoint`; undefined for the policy ""."""
        return FIXED[self.name] if self.name in FIXED else BY_NAME[self.name](*self.targets)

    def wrap(self, layer: Callable[..., Any], *, looped: bool = False) -> Callable[..., Any]:
        """Wrap a layer. Its backward pass recomputes the values that the policy does not keep.

        Args:
            layer: a function of arrays.
            looped: the layer is the body of a loop. The compiler cannot merge the forward pass with
                the recomputation across a loop, so no barrier is needed.
        """
        if self.name == "":
            return layer
        return jax.checkpoint(layer, policy=self.policy, prevent_cse=not looped)

    def check(self, seen: Iterator[set[str]]) -> None:
        """Check that the layers produce every target.

        Args:
            seen: the names of each kind of layer; read until all targets are found.

        Raises:
            ConfigError: no layer produces a target; the message lists the available names.
        """
        missing = set(self.targets) - {*OUTSIDE, BETWEEN}
        carried: set[str] = set()
        while missing and (names := next(seen, None)) is not None:
            carried |= names
            missing -= names
        if not missing:
            return
        hint = (
            " ('attn_weights' exists where whole score matrices do: attn_mechanism='vanilla')"
            if "attn_weights" in missing
            else ""
        )
        raise ConfigError(
            f"gradient_checkpointing_targets: no layer of this model makes "
            f"{', '.join(sorted(missing))}{hint}; its layers make: "
            f"{', '.join(sorted(carried | {BETWEEN}))}"
        )


def check_host_memory(name: str, mesh: jax.sharding.Mesh) -> None:
    """Raise ConfigError unless the devices of a mesh have pinned host memory."""
    device = mesh.local_devices[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise ConfigError(
            f"gradient_checkpointing={name!r} keeps results in pinned host memory, which these "
            f"{device.platform} devices do not reach (memories: {', '.join(kinds)}): take a policy "
            f"that keeps them on the device ({', '.join(KEEP)}), or 'nothing_saveable'"
        )


def names_in(jaxpr: Jaxpr | ClosedJaxpr) -> set[str]:
    """Return the names that `ed_layers.context.named` assigns inside a jaxpr, at any depth."""
    names: set[str] = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "name":
            names.add(equation.params["name"])
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                names |= names_in(value)
    return names
