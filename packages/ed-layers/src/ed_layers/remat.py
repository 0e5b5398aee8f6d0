"""Which intermediate results the backward pass keeps, by the names of `gradient_checkpointing`.

A layer is wrapped in `jax.checkpoint`: what its policy does not keep is computed again from the
layer's input, which is always kept. Policies that take `gradient_checkpointing_targets` choose
among the results that `ed_layers.named` gave a name.

Under every policy, none included, what costs next to nothing is computed again: `recomputed`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from ed_infra.errors import ConfigError, unknown_name

Policy = Callable[..., Any]

POLICIES = jax.checkpoint_policies
#: Memory kinds of jax: a device's own, and the host's pages that it copies from and to by itself.
DEVICE, HOST = "device", "pinned_host"

MLP = ("mlp_gate", "mlp_up", "mlp_down", "mlp_output")
ATTENTION = ("attn_query", "attn_key", "attn_value", "attn_weights", "attn_dense", "attn_output")

#: Policies that are a fixed rule.
FIXED: dict[str, Policy] = {
    "everything_saveable": POLICIES.everything_saveable,
    "nothing_saveable": POLICIES.nothing_saveable,
    "checkpoint_dots": POLICIES.dots_saveable,
    "dots_saveable": POLICIES.dots_saveable,
    "checkpoint_dots_with_no_batch_dims": POLICIES.dots_with_no_batch_dims_saveable,
    "dots_with_no_batch_dims_saveable": POLICIES.dots_with_no_batch_dims_saveable,
    # "Any names but these" and not "anything except these names": the latter keeps what a name is
    # given to, which is all but the same array.
    "mlp_notsaveable": POLICIES.save_any_names_but_these(*MLP),
    "attn_notsaveable": POLICIES.save_any_names_but_these(*ATTENTION),
    "mlp_attn_notsaveable": POLICIES.save_any_names_but_these(*MLP, *ATTENTION),
    "offload_dot_with_no_batch_dims": POLICIES.offload_dot_with_no_batch_dims(DEVICE, HOST),
}

#: Policies made from targets.
BY_NAME: dict[str, Callable[..., Policy]] = {
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
#: Policies whose targets are kept where they are.
KEEP = ("save_only_these_names", "save_from_both_policies")

#: Made outside of the layers, where nothing is computed again: kept under every policy.
OUTSIDE = ("embeddings", "model_output", "lm_head_output")
#: The input of the next layer: kept too, but it may be moved to the host.
BETWEEN = "layer_output"


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def recomputed(function: Callable[..., jax.Array], *arguments: Any) -> jax.Array:
    """`function(*arguments)`, of which the backward pass keeps the arguments alone.

    For norms and activations: what they make on the way is as large as the results of the products
    around them, and costs a pass over memory. Not `jax.checkpoint`, which would hide arguments that
    have a name from the policy of the layer.

    Args:
        function: of arrays, and holds none itself.
        arguments: trees of floating-point arrays.
    """
    return function(*arguments)


def recomputed_forward(function: Callable[..., jax.Array], *arguments: Any):
    return function(*arguments), arguments


def recomputed_backward(function: Callable[..., jax.Array], arguments: Any, d_result: jax.Array):
    # The barrier keeps the compiler from finding, and keeping, what the forward pass made.
    return jax.vjp(function, *jax.lax.optimization_barrier(arguments))[1](d_result)


recomputed.defvjp(recomputed_forward, recomputed_backward)


@dataclass(frozen=True)
class Remat:
    """A checked choice of policy, held by a `Stack`.

    Attributes:
        name: `gradient_checkpointing`; "" keeps everything and leaves a layer as it is.
        targets: `gradient_checkpointing_targets`, for the policies that take names.

    Raises:
        ConfigError: the policy is unknown, needs targets and has none (or the reverse), or the
            targets name what it has no say over.
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
        if self.name not in KEEP and (kept := [t for t in self.targets if t in fixed]):
            raise ConfigError(
                f"gradient_checkpointing={self.name!r} has no say over {', '.join(kept)}: what is "
                "made outside of the layers, or goes from layer to layer, is always kept on the "
                "device; leave it out of gradient_checkpointing_targets"
            )

    @classmethod
    def resolve(cls, config: Any) -> Remat:
        """Take the choice out of an EasyDeLBaseConfig.

        Raises:
            ConfigError: as above; or the policy keeps results on the host, and the devices of the
                mesh cannot copy from and to its memory.
        """
        targets = tuple(config.gradient_checkpointing_targets or ())
        remat = cls(str(config.gradient_checkpointing), targets)
        if remat.name in OFFLOAD and config.easy_method == "train":
            check_host_memory(remat.name, config.mesh)
        return remat

    @property
    def policy(self) -> Policy:
        """As `jax.checkpoint` takes it; only of a choice that is not ""."""
        return FIXED[self.name] if self.name in FIXED else BY_NAME[self.name](*self.targets)

    def wrap(self, layer: Callable[..., Any], *, looped: bool = False) -> Callable[..., Any]:
        """The layer, so that its backward pass computes again what the policy does not keep.

        Args:
            layer: a function of arrays.
            looped: it is the body of a loop. The compiler then cannot merge the two computations,
                and need not be kept from it.
        """
        if self.name == "":
            return layer
        return jax.checkpoint(layer, policy=self.policy, prevent_cse=not looped)

    def check(self, seen: Iterator[set[str]]) -> None:
        """Compare the targets with the names that the layers carry.

        Args:
            seen: the names of one kind of layer after the other; read until all targets are found.

        Raises:
            ConfigError: a target is the name of nothing; the message says what the names are.
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


def names_in(jaxpr: Any) -> set[str]:
    """Names that `ed_layers.named` gave inside a jaxpr, at any depth."""
    found: set[str] = set()
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "name":
            found.add(equation.params["name"])
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                found |= names_in(value)
    return found
