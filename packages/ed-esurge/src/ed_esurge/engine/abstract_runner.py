"""A runner without arrays, whose steps are compiled for devices that this machine does not have.

The model has shapes, dtypes and shardings instead of arrays (`jax.ShapeDtypeStruct`), and its mesh
may consist of described devices. The programs are those of `ModelRunner`; none can be executed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from ed_infra.compilation.hlo import HloShape
from ed_infra.compilation.launches import PageArray
from ed_infra.errors import ConfigError
from ed_layers.cache import Cache, HybridCache, PagedCache
from jax.typing import DTypeLike

from ed_esurge.engine.setup import Setup
from ed_esurge.runner.buckets import StepShape
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.model_runner import ModelRunner
from ed_esurge.runner.sampler_rows import SamplerState
from ed_esurge.runner.uncompiled import ProgramKey

Tree = TypeVar("Tree")
#: Type of jax -> XLA's name, for types whose name is not a letter with the bits.
_XLA_NAMES = {
    "bfloat16": "bf16",
    "bool": "pred",
    "float8_e4m3fn": "f8e4m3fn",
    "float8_e5m2": "f8e5m2",
}


class AbstractMemory(Memory):
    """Shapes of the arrays that steps replace."""

    def allocate(self) -> Cache:
        """Determine the shapes of pages, states and sums, and return the cache."""
        sizes = [*self.num_pages.values()]
        pages = sizes[0] if len(sizes) == 1 else self.num_pages
        create_cache = partial(
            self._model.init_paged_cache,
            pages,
            self.page_size,
            num_states=self.num_state_slots,
        )
        create_state = partial(SamplerState.create, self.max_num_seqs, self._vocab_size)
        create_sums = partial(jnp.zeros, (self.max_num_seqs, self._width), jnp.float32)
        cache = trace_shapes(create_cache, self.placement)
        self.cache, self.state = cache, trace_shapes(create_state, self.placement)
        self.sums = trace_shapes(create_sums, self.placement)
        return cache

    def replicate_arrays(self, tree: Tree) -> Tree:
        """Return the shapes of arrays that all devices have whole."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.placement), tree
        )


class AbstractRunner(ModelRunner):
    """A runner whose programs are compiled and never executed."""

    memory_type = AbstractMemory


class StepPrograms(NamedTuple):
    """The programs of one step of the engine.

    Attributes:
        tokens, seqs: tokens and sequences of the step.
        keys: names of the programs.
    """

    tokens: int
    seqs: int
    keys: tuple[ProgramKey, ...]


def create_abstract_runner(setup: Setup, num_pages: Mapping[str, int]) -> AbstractRunner:
    """Return the runner of a model without arrays.

    Args:
        setup: sizes of the engine for the model.
        num_pages: group -> pages of its pool.

    Raises:
        ConfigError: the model reads images, audio or an encoder.
    """
    if setup.encoder is not None:
        raise ConfigError(
            f"{type(setup.model).__name__} has an encoder, and only steps of text models are "
            "compiled without arrays: plan without --compile"
        )
    sizes = {name: num_pages.get(name, max(num_pages.values())) for name in setup.windows}
    options = setup.get_runner_options(sizes)
    options["ahead_of_time"] = False
    return AbstractRunner(setup.model, setup.buckets, **options)


def list_steps(setup: Setup, *, rows: int | None = None) -> dict[str, StepPrograms]:
    """Return the largest decode step, and the largest step that also computes prompts.

    Args:
        setup: sizes of the engine.
        rows: minimum number of sequences of the decode step; None = the maximum.
    """
    buckets = setup.buckets
    decode: StepShape = buckets.decode[-1] if rows is None else buckets.pick(rows, rows)
    mixed = buckets.prefill[-1]
    return {
        name: StepPrograms(shape.tokens, shape.seqs, (shape, ("sample", shape.seqs)))
        for name, shape in (("decode step", decode), ("mixed step", mixed))
    }


def trace_shapes(create: Callable[[], Tree], placement: jax.sharding.Sharding) -> Tree:
    """Return shapes, dtypes and shardings of the arrays that a function creates, without arrays.

    Args:
        create: a function that places its arrays with `jax.device_put`.
        placement: sharding of arrays that the function does not place.
    """
    closed, shapes = jax.make_jaxpr(create, return_shape=True)()
    results = closed.jaxpr.outvars
    shardings = {
        id(result): place
        for equation in closed.jaxpr.eqns
        if equation.primitive.name == "device_put"
        for result, place in zip(equation.outvars, equation.params["devices"], strict=True)
        if isinstance(place, jax.sharding.NamedSharding)
    }
    leaves, treedef = jax.tree.flatten(shapes)
    places = [shardings.get(id(result), placement) for result in results]
    abstract_leaves = [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
        for leaf, place in zip(leaves, places, strict=True)
    ]
    return cast(Tree, jax.tree.unflatten(treedef, abstract_leaves))


def list_page_arrays(
    runner: AbstractRunner, setup: Setup, *, seqs: int, context: int
) -> list[PageArray]:
    """Return the page pools of a runner for `ed_infra.compilation.launches`.

    Args:
        runner, setup: the runner and its sizes.
        seqs: sequences of the step.
        context: tokens of each sequence in the cache.
    """
    cache = runner.memory.cache
    parts = list(cache.caches.values()) if isinstance(cache, HybridCache) else [cache]
    pools: list[PageArray] = []
    for part in parts:
        if not isinstance(part, PagedCache):
            continue
        tokens = seqs * min(context, setup.windows.get(part.group) or context)
        for leaf in jax.tree.leaves(part.pages):
            dims = leaf.sharding.shard_shape(leaf.shape)
            is_stacked = part.layout == "stacked"
            shape = HloShape(get_xla_dtype(leaf.dtype), dims[1:] if is_stacked else dims)
            share = tokens / (part.num_pages * part.page_size)
            pools.append(PageArray(shape, dims[0] if is_stacked else 1, share * shape.bytes))
    return pools


def get_xla_dtype(dtype: DTypeLike) -> str:
    """Return XLA's name of a type: "bf16", "s8"."""
    name = jnp.dtype(dtype).name
    if name in _XLA_NAMES:
        return _XLA_NAMES[name]
    bits = "".join(letter for letter in name if letter.isdigit())
    return {"int": "s", "uint": "u", "float": "f"}[name.removesuffix(bits)] + bits
