"""Many adapters on the experts; each token of a batch uses one adapter or none.

The adapters of the experts are stored in slots: `lora_a` [e, i, n * r], the slots side by side, and
`lora_b` [e, n, r, o]. As in `ed_layers.lora.slots`, an expert multiplies by all slots together, and
sets the part of the other slots to zero between the two products. Both products are further layers
of the expert, so every method of `ed_layers.moe.experts` computes them.

The slot of a token travels with the token: a row has n more numbers, 1 for the slot of the token.
The exchange of tokens between devices (`ed_layers.moe.mesh`) therefore moves both.

Legend: e experts, i in features, o out features, n slots, r rank, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.lora.layers import adopt
from ed_layers.lora.slots import SlotParam, by_row
from ed_layers.moe.blocks import ExpertProduct, Network
from ed_layers.projections.linear import ExpertLinear

#: Names of the two products of a layer's slots, after the name of the layer.
_FIRST, _SECOND = "slot_a", "slot_b"


class ExpertSlots(ExpertLinear):
    """The linear layers of all experts with `n` adapter slots, which are initially empty (zero).

    Args:
        base: the layers; this module takes over their variables.
        slots: n.
        rank: r; the rest of an adapter with a smaller rank is zero.
        dtype: dtype of the products.
    """

    def __init__(self, base: ExpertLinear, slots: int, rank: int, dtype: DTypeLike):
        adopt(self, base)
        experts, inputs, outputs = base.kernel.get_value().shape
        expert_axis, input_axis, output_axis = base.kernel.get_metadata().get("axes", (None,) * 3)
        a = jnp.zeros((experts, inputs, slots * rank), dtype)
        b = jnp.zeros((experts, slots, rank, outputs), dtype)
        self.lora_a = SlotParam(a, axes=(expert_axis, input_axis, None), columns=rank)
        self.lora_b = SlotParam(b, axes=(expert_axis, None, None, output_axis))

    def variables(self) -> dict[str, nnx.Variable]:
        """The arrays of the experts by name; those of the slots are two further kernels."""
        variables = super().variables()
        first, second = variables.pop("lora_a"), variables.pop("lora_b")
        value, axes = second.get_value(), second.get_metadata()["axes"]
        joined = SlotParam(
            value.reshape(value.shape[0], -1, value.shape[-1]), axes=(axes[0], None, axes[-1])
        )
        return {**variables, f"{_FIRST}.kernel": first, f"{_SECOND}.kernel": joined}


def select_slots(
    network: Network,
    layers: Mapping[str, ExpertLinear],
    x: Float[Array, "b s d"],
    adapter_ids: Int[Array, "b t"],
) -> tuple[Network, Float[Array, "b s n"]]:
    """Return the network with adapters, and the tokens with their slots.

    Args:
        network: the network of an expert.
        layers: its layers by name.
        x: tokens; a token may be several rows one after another (experts on scaled inputs).
        adapter_ids: slot of each token, or of each row of the batch; 0 = none.

    Returns:
        a network from [r, d + n] to [r, d + n], whose last n outputs are zero, and [b, s, d + n].
        Without layers with slots, the arguments.
    """
    slots = next((x.lora_b for x in layers.values() if isinstance(x, ExpertSlots)), None)
    if slots is None:
        return network, x
    count, (_, rows, features) = slots.get_value().shape[-3], x.shape
    if adapter_ids.shape[1] not in (1, rows) and rows % adapter_ids.shape[1] == 0:
        adapter_ids = jnp.repeat(adapter_ids, rows // adapter_ids.shape[1], axis=1)
    numbers = jnp.arange(1, count + 1)
    selected = by_row(adapter_ids, x)[..., None] == numbers
    names = frozenset(name for name, layer in layers.items() if isinstance(layer, ExpertSlots))
    adapted = partial(_apply_slots, network, names, features)
    return adapted, jnp.concatenate([x, selected.astype(x.dtype)], axis=-1)


def _apply_slots(
    network: Network,
    names: frozenset[str],
    features: int,
    x: Float[Array, "r n"],
    product: ExpertProduct,
) -> Float[Array, "r n"]:
    """Apply a network with adapters to rows [r, d + n]."""
    rows, selected = x[..., :features], x[..., features:]

    def add_change(name: str, rows: jax.Array) -> jax.Array:
        y = product(name, rows)
        if name not in names:
            return y
        inner = product(f"{name}.{_FIRST}", rows)
        by_slot = inner.reshape(*inner.shape[:-1], selected.shape[-1], -1)
        # A condition and not a factor: numbers of other slots that are not finite have no effect.
        by_slot = jnp.where(selected[..., None] > 0, by_slot, 0)
        return y + product(f"{name}.{_SECOND}", by_slot.reshape(inner.shape))

    y = network(rows, add_change)
    return jnp.concatenate([y, jnp.zeros(selected.shape, y.dtype)], axis=-1)
