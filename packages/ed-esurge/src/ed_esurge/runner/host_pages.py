"""Pages in host memory: what the prefix cache of the device gives up, until it is wanted again.

Pages are copied a fixed number at a time, by one program for each direction, so that both are
compiled before anything is served. They come back bit by bit as they were.

Legend: n pages of a copy. An array of pages is [P, …] or, in a stack of layers, [L, P, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.cache import Cache, HybridCache, PagedCache

from ed_esurge.core.plan import Moves
from ed_esurge.runner.weights import abstract

#: n. A few long copies are quicker than many short ones, and what fills up the last one is lost.
PAGES_AT_ONCE = 16
#: Copies that the device has at once: one on its way, and the next, or one that comes back.
COPIES = 2
# Dimensions of an array of pages without that of layers.
DIMS = 5

Traced = Callable[[Callable[..., Any]], Callable[..., Any]]


class HostMemory:
    """The places that `ed_esurge.core.host_pages.HostPages` counts.

    Args:
        cache: of the device; those that come later are like it.
        places: how many there are, of each group of layers.
        traced: wraps functions of the device, to count how often they are traced.

    Attributes:
        bytes_saved, bytes_loaded: what was copied from and to the device since the start.
    """

    def __init__(self, cache: Cache, places: int, traced: Traced) -> None:
        self.places = places
        self.bytes_saved = self.bytes_loaded = 0
        self._groups = {
            name: HostGroup(pages, places, traced) for name, pages in groups(cache).items()
        }

    def compile(self) -> None:
        """Compile the copies; else that is done before the first one."""
        for group in self._groups.values():
            _ = group.programs

    def move(self, cache: Cache, moves: Moves) -> Cache:
        """Copy pages as a plan says; the cache that has them, of the arrays of this one."""
        for name, (saves, loads) in moves.items():
            group, pages = self._groups[name], groups(cache)[name]
            self.bytes_saved += len(saves) * group.page_bytes
            self.bytes_loaded += len(loads) * group.page_bytes
            group.save(pages, saves)
            if loads:
                pages = group.load(pages, loads)
                if not isinstance(cache, HybridCache):
                    return pages
                cache = replace(cache, caches={**cache.caches, name: pages})
        return cache


class HostGroup:
    """The places of one group.

    Args:
        pages: of the device.
        places, traced: see `HostMemory`.
    """

    def __init__(self, pages: PagedCache, places: int, traced: Traced) -> None:
        self._traced = traced
        self._like = abstract(pages)
        self._shardings = jax.tree.map(lambda x: x.sharding, pages)
        leaves, self._treedef = jax.tree.flatten(self._like)
        self._copied = [
            jax.ShapeDtypeStruct(
                (*leaf.shape[:-DIMS], PAGES_AT_ONCE, *leaf.shape[1 - DIMS :]),
                leaf.dtype,
                sharding=leaf.sharding,
            )
            for leaf in leaves
        ]
        self._axes = [leaf.ndim - DIMS for leaf in leaves]
        # The system gives memory to places when they are written to.
        self._arrays = [
            np.empty((places, *leaf.shape[:-DIMS], *leaf.shape[1 - DIMS :]), leaf.dtype)
            for leaf in leaves
        ]
        self.page_bytes = sum(array.nbytes for array in self._arrays) // places
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ed-esurge-pages")
        self._coming: Future[None] | None = None

    @cached_property
    def programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """`taken` and `written`, compiled."""
        take = jax.jit(self._traced(taken), out_shardings=self._shardings)
        put = jax.jit(self._traced(written), donate_argnums=0, out_shardings=self._shardings)
        which = np.zeros(PAGES_AT_ONCE, np.int32)
        values = jax.tree.unflatten(self._treedef, self._copied)
        lowered = take.lower(self._like, which), put.lower(self._like, which, values)
        return lowered[0].compile(), lowered[1].compile()

    def save(self, pages: PagedCache, saves: Mapping[int, int]) -> None:
        """Copy pages of the device here, place -> page. The last of them are on their way when this
        returns: device and caller go on."""
        for places, theirs in batches(saves):
            arrays = jax.tree.leaves(self.programs[0](pages, theirs))
            for array in arrays:
                array.copy_to_host_async()
            self._wait()
            self._coming = self._thread.submit(self._take, arrays, places)

    def load(self, pages: PagedCache, loads: Mapping[int, int]) -> PagedCache:
        """Copy pages from here to the device, page -> place."""
        self._wait()
        for theirs, places in batches(loads):
            values = [
                jax.device_put(np.moveaxis(array[places], 0, axis), like.sharding)
                for array, axis, like in zip(self._arrays, self._axes, self._copied, strict=True)
            ]
            pages = self.programs[1](pages, theirs, jax.tree.unflatten(self._treedef, values))
        return pages

    def _wait(self) -> None:
        """Until nothing is on its way."""
        if self._coming is not None:
            self._coming.result()

    def _take(self, arrays: list[jax.Array], places: np.ndarray) -> None:
        for mine, array, axis in zip(self._arrays, arrays, self._axes, strict=True):
            mine[places] = np.moveaxis(np.asarray(array), axis, 0)


def groups(cache: Cache) -> dict[str, PagedCache]:
    """The pages of each group of layers."""
    parts = cache.caches if isinstance(cache, HybridCache) else {"": cache}
    return {part.group: part for part in parts.values() if isinstance(part, PagedCache)}


def batches(copies: Mapping[int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Both sides of what is copied at once; int32 [n] each, filled up with the first of it."""
    pairs = [*copies.items()]
    for start in range(0, len(pairs), PAGES_AT_ONCE):
        batch = pairs[start : start + PAGES_AT_ONCE]
        batch += batch[:1] * (PAGES_AT_ONCE - len(batch))
        yield tuple(np.array(batch, np.int32).T.copy())


def taken(pages: PagedCache, numbers: jax.Array) -> PagedCache:
    """Pages of a pool; a function of the device.

    Args:
        numbers: which; int32 [n].
    """

    def of(leaf: jax.Array) -> jax.Array:
        bits = jnp.take(bits_of(leaf), numbers, leaf.ndim - DIMS, mode="clip")
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(of, pages)


def written(pages: PagedCache, numbers: jax.Array, values: PagedCache) -> PagedCache:
    """A pool with other pages; a function of the device.

    Args:
        numbers: which; int32 [n]. One that comes twice has the same values.
        values: of these pages.
    """

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        at = (*(slice(None),) * (leaf.ndim - DIMS), numbers)
        bits = bits_of(leaf).at[at].set(bits_of(new), mode="drop")
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(put, pages, values)


def bits_of(array: jax.Array) -> jax.Array:
    """Numbers as integers: a CPU would scatter 16-bit floats by way of a pool of 32-bit ones."""
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
