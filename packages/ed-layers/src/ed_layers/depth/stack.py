"""The layer stack: layers stored stacked and scanned, or as separate leaves and unrolled.

Both layouts produce the same numbers and the same checkpoint. The scanned layout compiles one body
for any depth. The unrolled layout is faster per step on a CPU, because every weight is a separate
leaf.

The storage names contain the layer numbers (`ed_infra.parameter_names`): `run_0_30_1` holds layers
0 to 29, stacked; `layer_3` holds layer 3.

Legend: L layers, n layers of a run, p period.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.outputs import LayerReport
from ed_infra.parameter_names import Run, split_runs
from ed_infra.sharding.placement import constrain
from flax import nnx
from jaxtyping import Array, Float

from ed_layers.cache.spec import LayerSpecs
from ed_layers.cache.storage import Layout
from ed_layers.context import STREAM, Ctx, name_activation
from ed_layers.depth.remat import BETWEEN, Remat, names_in

MakeLayer = Callable[[int, nnx.Rngs], nnx.Module]
CarryT = TypeVar("CarryT")


class Stack(nnx.Module):
    """The layers of a decoder.

    A layer is called as `layer(x, ctx, cache, index) -> (x, cache, report)`. In a scan the index is
    a traced number, so a layer can index a table with it, for example a table of windows. The
    report (`ed_infra.outputs.LayerReport`) has one structure for all layers of a run.

    Args:
        make: `make(layer_index, rngs)` builds one layer.
        num_layers: L.
        scan: store runs of layers stacked and scan over them; False stores every layer separately.
        period: number of layers in one repeating unit (6 for Gemma 3: five windowed layers and a
            full one). The layers that remain at the end form a separate run.
        kinds: instead of `period`, one value per layer; layers with the same value have the same
            structure. Runs and periods are derived from these values: a dense layer before the
            layers with experts, or one layer that a rule singles out, is a separate run.
        remat: the values that the backward pass keeps.
        rngs: layer i gets `fold_in(rngs.params(), i)`, whatever the storage.

    Raises:
        ConfigError: layers of one run are not equal, or `kinds` does not fit.
    """

    #: The runs before `ed_layers.transform` split them; None for undivided runs.
    uncut: tuple[Run, ...] | None = None

    def __init__(
        self,
        make: MakeLayer,
        num_layers: int,
        *,
        scan: bool,
        period: int = 1,
        kinds: Sequence[Hashable] | None = None,
        remat: Remat | None = None,
        rngs: nnx.Rngs,
    ):
        if kinds is not None and (len(kinds) != num_layers or period != 1):
            raise ConfigError(
                f"Stack of {num_layers} layers with {len(kinds)} kinds and period={period}: give "
                "one kind for each layer, and no period beside them"
            )
        self.num_layers = num_layers
        self.runs = split_runs([i % period for i in range(num_layers)] if kinds is None else kinds)
        self.remat = Remat() if remat is None else remat
        key = rngs.params()
        if not scan:
            for i in range(num_layers):
                rngs = layer_rngs(jax.random.fold_in(key, i))
                setattr(self, f"layer_{i}", make(i, rngs))
            return
        for run in self.runs:
            units = [build_stacked(make, key, run, slot) for slot in range(run.period)]
            setattr(self, run.name, nnx.List(units))

    @property
    def layout(self) -> Layout:
        """The storage layout of the layers."""
        return "leaves" if hasattr(self, "layer_0") else "stacked"

    def __call__(
        self, x: Float[Array, "b s d"], ctx: Ctx, cache: object = None, *, keep_hidden: bool = False
    ) -> tuple[Float[Array, "b s d"], Any, LayerReport, tuple[jax.Array, ...] | None]:
        """Run all layers.

        Args:
            x: [b, s, d].
            cache: carried through the layers; None in training.
            keep_hidden: also return the input of every layer.

        Returns:
            x, the cache, the report of all layers, and the hidden states.

        Raises:
            ConfigError: no layer produces one of the `gradient_checkpointing_targets`.
        """
        hidden: list[jax.Array] = []
        reports: list[LayerReport] = []
        apply = partial(apply_layer, ctx=ctx)
        if ctx.ragged is not None:  # products of zeros are not computed (`native.products`)
            x = jnp.where(ctx.ragged.real()[:, None], x, 0)
        remat = self.remat if ctx.mode == "train" else Remat()
        remat.check(self.names(apply, x, cache))

        def apply_and_record(static: Static, state: object, x: jax.Array, cache: object):
            hidden.append(x)
            return remat.wrap(apply)(static, state, x, cache)

        if self.layout == "leaves":
            for i in range(self.num_layers):
                graphdef, state = nnx.split(getattr(self, f"layer_{i}"))
                x, cache, report = apply_and_record(Static(graphdef, i), state, x, cache)
                reports.append(report.for_layer(i).under(f"layer_{i}"))
        for run, units in self.iter_stacked_runs():
            if run.repeats == 1:
                graphdef, state = units[0]
                state = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), state)
                x, cache, report = apply_and_record(Static(graphdef, run.start), state, x, cache)
                report = jax.tree.map(lambda leaf: leaf[None], report)
                reports.append(report.over_layers([run.start]).under(run.name, 0))
                continue
            body = partial(_unit, remat.wrap(apply, looped=True), run, units, keep_hidden)
            xs = [state for _, state in units], jnp.arange(run.repeats)
            (x, cache), (hidden_states, slots) = jax.lax.scan(body, (x, cache), xs)
            if hidden_states is not None:
                hidden.extend(hidden_states.reshape(run.length, *x.shape))
            reports += [
                report.over_layers(run.layers(slot)).under(run.name, slot)
                for slot, report in enumerate(slots)
            ]
        return x, cache, sum(reports, LayerReport()), (*hidden, x) if keep_hidden else None

    def fold(self, call: Callable[[Any, CarryT, Any], CarryT], carry: CarryT) -> CarryT:
        """Return `carry = call(layer, carry, index)` after all layers, without hidden states.

        Args:
            call: a function of a layer, the carry, and the index, which is traced in a scan.
            carry: any pytree; its structure does not change.
        """
        if self.layout == "leaves":
            for i in range(self.num_layers):
                carry = call(getattr(self, f"layer_{i}"), carry, i)
        for run, units in self.iter_stacked_runs():

            def period(carry: CarryT, xs: Any, run: Run = run, units: Any = units):
                states, repeat = xs
                for slot, (graphdef, _) in enumerate(units):
                    index = run.start + repeat * run.period + slot
                    carry = call(nnx.merge(graphdef, states[slot]), carry, index)
                return carry, None

            xs = [state for _, state in units], jnp.arange(run.repeats)
            carry, _ = jax.lax.scan(period, carry, xs)
        return carry

    def layer(self, index: int) -> Any:
        """Return layer `index` as a separate module that shares or slices the stored arrays."""
        if self.layout == "leaves":
            return getattr(self, f"layer_{index}")
        for run, units in self.iter_stacked_runs():
            for slot, (graphdef, state) in enumerate(units):
                layers = run.layers(slot)
                if index in layers:
                    at = layers.index(index)
                    return nnx.merge(graphdef, jax.tree.map(lambda leaf, at=at: leaf[at], state))
        raise ConfigError(f"there is no layer {index}: the stack has {self.num_layers}")

    def __getitem__(self, index: int) -> Any:
        """Return a stored layer, whose parts may be replaced.

        Raises:
            ConfigError: the layers are stacked.
            IndexError: there is no such layer.
        """
        if not -self.num_layers <= index < self.num_layers:
            raise IndexError(f"layer {index} of {self.num_layers} layers")
        if self.layout == "stacked":
            raise ConfigError(
                "the layers are stacked in one array, so a layer cannot be replaced: use "
                "scan_layers=False, or layer() for a copy"
            )
        return self.layer(index % self.num_layers)

    def cache_specs(self) -> list[LayerSpecs]:
        """Return the `cache_specs()` of every layer."""
        if self.layout == "leaves":
            return [getattr(self, f"layer_{i}").cache_specs() for i in range(self.num_layers)]
        specs: list[LayerSpecs] = [()] * self.num_layers
        for run in self.runs:
            for slot, layer in enumerate(getattr(self, run.name)):
                for i in run.layers(slot):
                    specs[i] = layer.cache_specs()
        return specs

    def iter_stacked_runs(self) -> Iterator[tuple[Run, list[tuple[nnx.GraphDef, nnx.State]]]]:
        """The runs with their split layers, one per slot of the period; empty if unrolled."""
        for run in self.runs if self.layout == "stacked" else ():
            yield run, [nnx.split(layer) for layer in getattr(self, run.name)]

    def names(self, apply: Callable[..., Any], x: jax.Array, cache: object) -> Iterator[set[str]]:
        """The names that each kind of layer passes to `name_activation`, traced on first use."""

        def differentiate_layer(static: Static, state: object, x: jax.Array, cache: object):
            # The forward pass of a derivative may name more values than the layer alone.
            return jax.vjp(lambda x: apply(static, state, x, cache), x)[0]

        trace = jax.make_jaxpr(differentiate_layer, return_shape=True)
        for layer, graphdef, state in self.kinds():
            jaxpr, (_, cache, _) = trace(Static(graphdef, layer), state, x, cache)
            yield names_in(jaxpr)

    def kinds(self) -> Iterator[tuple[int, nnx.GraphDef, nnx.State]]:
        """The first layer of each kind, in order: its number, and the shapes of its arrays."""
        if self.layout == "leaves":
            for i in range(self.num_layers):
                yield i, *nnx.split(getattr(self, f"layer_{i}"))
        for run, units in self.iter_stacked_runs():
            for slot, (graphdef, state) in enumerate(units):
                shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), state)
                yield run.start + slot, graphdef, shapes

    def to_layout(self, layout: Layout) -> None:
        """Convert the storage in place: separate arrays for a CPU engine, stacks for training."""
        if layout == self.layout:
            return
        if layout == "leaves":
            for run, units in list(self.iter_stacked_runs()):
                for slot, (graphdef, state) in enumerate(units):
                    for repeat, layer in enumerate(run.layers(slot)):
                        one = jax.tree.map(lambda leaf, r=repeat: leaf[r], state)
                        setattr(self, f"layer_{layer}", nnx.merge(graphdef, one))
                delattr(self, run.name)
            return
        for run in self.runs:
            units = []
            for slot in range(run.period):
                split = [nnx.split(getattr(self, f"layer_{i}")) for i in run.layers(slot)]
                stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[s[1] for s in split])
                units.append(nnx.merge(split[0][0], stacked))
            setattr(self, run.name, nnx.List(units))
        for i in range(self.num_layers):
            delattr(self, f"layer_{i}")


@jax.tree_util.register_static
class Static:
    """The static part of a layer, hidden from tracing.

    An unrolled layer stores its index here; a scanned layer receives the index as a traced number.
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
    """Apply one layer as a function of arrays; remat wraps this function and scan repeats it."""
    index: Any = static.layer if layer is None else layer
    # The input is named here, so a policy that offloads it keeps no second copy on the device.
    x = ctx.rename(x, name_activation(x, BETWEEN))
    ctx = ctx.at_layer(index)
    out, cache, report = nnx.merge(static.graphdef, state)(x, ctx, cache, index)
    x = ctx.layer_dropped(x, out)
    # The stream has a fixed placement between layers; inside a layer the compiler may choose.
    x = x if ctx.config is None else ctx.rename(x, constrain(x, STREAM, ctx.config))
    return x, cache, report


def _unit(apply: Callable[..., Any], run: Run, units: Any, keep_hidden: bool, carry: Any, xs: Any):
    """Apply one period of a run, the body of the scan; return the layers' inputs and reports."""
    x, cache = carry
    states, repeat = xs
    inputs, slots = [], []
    for slot, (graphdef, _) in enumerate(units):
        inputs.append(x)
        layer = run.start + repeat * run.period + slot
        x, cache, report = apply(Static(graphdef), states[slot], x, cache, layer)
        slots.append(report)
    return (x, cache), (jnp.stack(inputs) if keep_hidden else None, slots)


def build_stacked(make: MakeLayer, key: jax.Array, run: Run, slot: int) -> nnx.Module:
    """Stack the equal layers of one slot along a new first axis; keep the metadata of one layer."""
    layers = run.layers(slot)
    graphdefs: list[nnx.GraphDef] = []

    def build(index: int, layer_key: jax.Array) -> nnx.State:
        graphdef, state = nnx.split(make(index, layer_rngs(layer_key)))
        graphdefs.append(graphdef)
        return state

    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.asarray(layers))
    state = jax.vmap(partial(build, layers[0]))(keys)
    if len(layers) > 1:
        # Only the first and the last layer are compared; the caller guarantees the others.
        last = jax.eval_shape(partial(build, layers[-1]), key)
        shapes = [leaf.shape[1:] for leaf in jax.tree.leaves(state)]
        if graphdefs[0] != graphdefs[1] or shapes != [x.shape for x in jax.tree.leaves(last)]:
            raise ConfigError(
                f"layers {layers[0]} and {layers[-1]} are scanned as one run, but differ in "
                "structure or in an attribute that is no array: pass `kinds` to Stack to name the "
                "equal layers, index a table of the differences by the layer, or unroll them "
                "(scan_layers: false)"
            )
    return nnx.merge(graphdefs[0], state)


def to_layout(module: nnx.Module, layout: Layout) -> None:
    """Convert the storage of every `Stack` inside a module, in place."""
    for _, node in nnx.iter_modules(module):
        if isinstance(node, Stack):
            node.to_layout(layout)


class KeyStream(nnx.RngStream):
    """The keys of `nnx.RngStream`, with a counter in Python.

    flax counts in an array. While a module is traced, each update of that array searches
    everything that was traced before.
    """

    def __init__(self, key: jax.Array, *, tag: str) -> None:
        super().__init__(key, tag=tag)
        self.drawn = 0

    def __call__(self) -> jax.Array:
        key = jax.random.fold_in(self.key.get_value(), self.drawn)
        self.drawn += 1
        return key


def layer_rngs(key: jax.Array) -> nnx.Rngs:
    """Return `nnx.Rngs(params=key)` with the same keys, which are faster to draw."""
    rngs = nnx.Rngs()
    setattr(rngs, "params", KeyStream(key, tag="params"))  # noqa: B010
    return rngs
