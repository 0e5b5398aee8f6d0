"""Depth: many layers, stored stacked and scanned, or as separate leaves and unrolled.

Both give the same numbers and the same checkpoint. Scanned compiles one body for any depth;
unrolled is faster per step on a CPU, because every weight is a leaf of its own.

Storage names tell their layers (`ed_infra.paths`): `run_0_30_1` holds layers 0 to 29, stacked;
`layer_3` holds layer 3.

Legend: L layers, n layers of a run, p period.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ed_layers.context import Ctx
from ed_layers.remat import remat

Layout = Literal["stacked", "leaves"]
MakeLayer = Callable[[int, nnx.Rngs], nnx.Module]


class Stack(nnx.Module):
    """The layers of a decoder.

    Args:
        make: `make(layer_index, rngs)` builds one layer; layers whose indices differ by a multiple
            of `period` must be equal in structure.
        num_layers: L.
        scan: store runs of layers stacked and scan over them; False stores every layer on its own.
        period: how many layers make one repeating unit (Gemma 3's five windowed layers and a full
            one: 6). What is left over at the end is a run of its own.
        gradient_checkpointing, gradient_checkpointing_targets: see `ed_layers.remat`.
        rngs: layer i gets `fold_in(rngs.params(), i)`, whatever the storage.
    """

    def __init__(
        self,
        make: MakeLayer,
        num_layers: int,
        *,
        scan: bool,
        period: int = 1,
        gradient_checkpointing: str = "",
        gradient_checkpointing_targets: Sequence[str] | None = None,
        rngs: nnx.Rngs,
    ):
        self.num_layers = num_layers
        self.period = period
        self.gradient_checkpointing = str(gradient_checkpointing)
        self.targets = tuple(gradient_checkpointing_targets or ())
        remat(lambda: None, self.gradient_checkpointing, self.targets)
        key = rngs.params()
        if not scan:
            for i in range(num_layers):
                layer_rngs = nnx.Rngs(params=jax.random.fold_in(key, i))
                setattr(self, f"layer_{i}", make(i, layer_rngs))
            return
        for start, n, run_period in runs_of(num_layers, period):
            units = [
                build_stacked(make, key, start + slot, run_period, n // run_period)
                for slot in range(run_period)
            ]
            setattr(self, f"run_{start}_{n}_{run_period}", nnx.List(units))

    @property
    def layout(self) -> Layout:
        """How the layers are stored."""
        return "leaves" if hasattr(self, "layer_0") else "stacked"

    def __call__(
        self, x: jax.Array, ctx: Ctx, cache: Any = None, *, keep_hidden: bool = False
    ) -> tuple[jax.Array, Any, dict[str, Any], tuple[jax.Array, ...] | None]:
        """Run all layers.

        Args:
            x: [b, s, d].
            cache: carried through the layers; None in training.
            keep_hidden: also return the input of every layer.

        Returns:
            x, the cache, the layers' `aux` with a leading axis [L], and the hidden states.
        """
        hidden: list[jax.Array] = []
        aux: list[Any] = []
        apply = partial(apply_layer, ctx=ctx)
        if cache is None and ctx.mode == "train":
            apply = remat(apply, self.gradient_checkpointing, self.targets)
        if self.layout == "leaves":
            for i in range(self.num_layers):
                if keep_hidden:
                    hidden.append(x)
                graphdef, state = nnx.split(getattr(self, f"layer_{i}"))
                x, cache, layer_aux = apply(Static(graphdef, i), state, x, cache)
                aux.append(jax.tree.map(lambda leaf: leaf[None], layer_aux))
        for start, n, period in self.runs():
            units = getattr(self, f"run_{start}_{n}_{period}")
            split = [nnx.split(unit) for unit in units]
            graphdefs, states = [s[0] for s in split], [s[1] for s in split]

            def unit(carry, weights, graphdefs=graphdefs, start=start, period=period):
                x, cache = carry
                states, repeat = weights
                inputs, auxes = [], []
                for slot in range(period):
                    inputs.append(x)
                    layer = start + repeat * period + slot
                    x, cache, layer_aux = apply(
                        Static(graphdefs[slot]), states[slot], x, cache, layer
                    )
                    auxes.append(layer_aux)
                kept = jnp.stack(inputs) if keep_hidden else None
                return (x, cache), (kept, jax.tree.map(lambda *a: jnp.stack(a), *auxes))

            (x, cache), (kept, run_aux) = jax.lax.scan(
                unit, (x, cache), (states, jnp.arange(n // period))
            )
            if kept is not None:
                hidden.extend(kept.reshape(n, *x.shape))
            aux.append(jax.tree.map(lambda leaf, n=n: leaf.reshape(n, *leaf.shape[2:]), run_aux))
        joined = jax.tree.map(lambda *parts: jnp.concatenate(parts), *aux)
        return x, cache, joined, (*hidden, x) if keep_hidden else None

    def runs(self) -> list[tuple[int, int, int]]:
        """`(start, n, period)` of the stored runs; empty when unrolled."""
        return [] if self.layout == "leaves" else runs_of(self.num_layers, self.period)

    def to_layout(self, layout: Layout) -> None:
        """Change the storage in place: separate leaves for a CPU engine, stacks for training."""
        if layout == self.layout:
            return
        if layout == "leaves":
            for start, n, period in self.runs():
                name = f"run_{start}_{n}_{period}"
                for slot, unit in enumerate(getattr(self, name)):
                    graphdef, state = nnx.split(unit)
                    for repeat in range(n // period):
                        one = jax.tree.map(lambda leaf, r=repeat: leaf[r], state)
                        layer = start + repeat * period + slot
                        setattr(self, f"layer_{layer}", nnx.merge(graphdef, one))
                delattr(self, name)
            return
        for start, n, period in runs_of(self.num_layers, self.period):
            units = []
            for slot in range(period):
                layers = [
                    getattr(self, f"layer_{i}") for i in range(start + slot, start + n, period)
                ]
                split = [nnx.split(layer) for layer in layers]
                stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s[1] for s in split])
                units.append(nnx.merge(split[0][0], stacked))
            setattr(self, f"run_{start}_{n}_{period}", nnx.List(units))
        for i in range(self.num_layers):
            delattr(self, f"layer_{i}")


@jax.tree_util.register_static
class Static:
    """What a layer is built from besides arrays, hidden from tracing.

    An unrolled layer knows its index here; a scanned one is told by a traced number.
    """

    def __init__(self, graphdef: nnx.GraphDef, layer: int | None = None):
        self.graphdef, self.layer = graphdef, layer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.graphdef, self.layer))


def apply_layer(
    static: Static, state: Any, x: jax.Array, cache: Any, layer: Any = None, *, ctx: Ctx
):
    """One layer, as a function of arrays: what remat wraps and scan repeats."""
    index: Any = static.layer if layer is None else layer
    return nnx.merge(static.graphdef, state)(x, ctx.at_layer(index), cache, index)


def runs_of(num_layers: int, period: int) -> list[tuple[int, int, int]]:
    """`(start, n, period)`: whole periods, then the rest as runs of single layers.

    >>> runs_of(30, 1), runs_of(8, 3)
    ([(0, 30, 1)], [(0, 6, 3), (6, 1, 1), (7, 1, 1)])
    """
    whole = num_layers // period * period
    runs = [(0, whole, period)] if whole else []
    return runs + [(i, 1, 1) for i in range(whole, num_layers)]


def build_stacked(make: MakeLayer, key: jax.Array, first: int, step: int, count: int) -> nnx.Module:
    """`count` equal layers, every leaf with a leading axis; metadata stays that of one layer."""
    graphdef: nnx.GraphDef | None = None

    def build(layer_key: jax.Array) -> nnx.State:
        nonlocal graphdef
        graphdef, state = nnx.split(make(first, nnx.Rngs(params=layer_key)))
        return state

    indices = first + step * jnp.arange(count)
    state = jax.vmap(build)(jax.vmap(partial(jax.random.fold_in, key))(indices))
    assert graphdef is not None
    return nnx.merge(graphdef, state)


def to_layout(module: nnx.Module, layout: Layout) -> None:
    """Change the storage of every Stack inside a module, in place."""
    for _, node in nnx.iter_modules(module):
        if isinstance(node, Stack):
            node.to_layout(layout)
