"""Host memory for pages that the prefix cache evicts from the device.

One program for each direction copies a fixed number of pages, so that both programs are compiled
before serving. The copies are bitwise exact. Each process keeps the parts of the pages that its
devices hold, once each.

Legend: n pages of a copy. An array of pages is [P, …] or, in a stack of layers, [L, P, …].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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

#: n. Fewer, larger copies are faster, but the padding of the last copy is wasted.
PAGES_AT_ONCE = 16
#: Maximum number of concurrent copies on the device: one in progress, and the next one.
COPIES = 2
# Dimensions of an array of pages without that of layers.
DIMS = 5

#: First and last + 1 index of each dimension of an array: the part of a device.
Part = tuple[tuple[int, int], ...]
#: The same in the form of jax.
DeviceIndex = tuple[slice, ...]

Traced = Callable[[Callable[..., Any]], Callable[..., Any]]


class HostMemory:
    """The contents of the places that `ed_esurge.core.host_pages.HostPages` manages.

    Args:
        cache: a cache of the device; later caches have the same shapes.
        places: number of places of each group of layers.
        traced: wrapper that counts the traces of compiled functions.

    Attributes:
        device: returns the cache on the device; None = its pages are not allocated.
        draft: the same places for the pages of the draft model; None without a draft model.
    """

    def __init__(self, cache: Cache, places: int, traced: Traced) -> None:
        self.places = places
        self.draft: HostMemory | None = None
        self._saved = self._loaded = 0
        self.device: Callable[[], Cache | None] = lambda: None
        self._groups = {
            name: HostGroup(pages, places, traced) for name, pages in groups(cache).items()
        }

    @property
    def bytes_saved(self) -> int:
        """Bytes copied from the device since the start."""
        return self._saved + (0 if self.draft is None else self.draft.bytes_saved)

    @property
    def bytes_loaded(self) -> int:
        """Bytes copied to the device since the start."""
        return self._loaded + (0 if self.draft is None else self.draft.bytes_loaded)

    def compile(self) -> None:
        """Compile the copy programs. Otherwise the first copy compiles them."""
        for group in self._groups.values():
            _ = group.programs

    def move(self, cache: Cache, moves: Moves) -> Cache:
        """Execute the copies of a plan and return the new cache. Loads donate the given cache."""
        for name, (saves, loads) in moves.items():
            group, pages = self._groups[name], groups(cache)[name]
            self._saved += len(saves) * group.page_bytes
            self._loaded += len(loads) * group.page_bytes
            group.save(pages, saves)
            if loads:
                pages = group.load(pages, loads)
                if not isinstance(cache, HybridCache):
                    return pages
                cache = replace(cache, caches={**cache.caches, name: pages})
        return cache

    def page_bytes(self, group: str) -> int:
        """Return the number of bytes of a page on all devices."""
        draft, size = self._draft(group), self._groups[group].page_bytes
        return size if draft is None else size + draft.page_bytes(group)

    def parts(self) -> list[str]:
        """Return a description of the parts of pages that this process keeps."""
        descriptions = [f"{name}: {group.parts()}" for name, group in sorted(self._groups.items())]
        return descriptions if self.draft is None else [*descriptions, *self.draft.parts()]

    def on_device(self, group: str, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yield the content of pages on the device."""
        cache = self.device()
        if cache is None or not numbers:
            return
        page_contents = self._groups[group].on_device(groups(cache)[group], numbers)
        draft = self._draft(group)
        if draft is None:
            yield from page_contents
        else:
            for one, draft_content in zip(
                page_contents, draft.on_device(group, numbers), strict=True
            ):
                yield one + draft_content

    def content(self, group: str, place: int) -> bytes:
        """Return the content of a place."""
        page_content, draft = self._groups[group].content(place), self._draft(group)
        return page_content if draft is None else page_content + draft.content(group, place)

    def fill(self, group: str, place: int, content: bytes) -> bool:
        """Write the content of a place. Return False if it has another length."""
        host_group, draft = self._groups[group], self._draft(group)
        if draft is not None and not draft.fill(group, place, content[host_group.place_bytes :]):
            return False
        return host_group.fill(
            place, content[: host_group.place_bytes] if draft is not None else content
        )

    def _draft(self, group: str) -> HostMemory | None:
        """Return the memory of the draft model, if it has pages of this group."""
        draft = self.draft
        return draft if draft is not None and group in draft._groups else None


class HostGroup:
    """The places of one group.

    Args:
        pages: page arrays of the device.
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
        # The operating system allocates this memory when it is first written.
        self._arrays = [
            {part: np.empty((places, *_page_shape(part)), like.dtype) for part in _parts(like)}
            for like in self._copied
        ]
        self.page_bytes = sum(
            leaf.size // leaf.shape[axis] * leaf.dtype.itemsize
            for leaf, axis in zip(leaves, self._axes, strict=True)
        )
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ed-esurge-pages")
        self._coming: Future[None] | None = None

    @cached_property
    def programs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """The compiled `take_pages` and `write_pages`."""
        take = jax.jit(self._traced(take_pages), out_shardings=self._shardings)
        put = jax.jit(self._traced(write_pages), donate_argnums=0, out_shardings=self._shardings)
        which = np.zeros(PAGES_AT_ONCE, np.int32)
        values = jax.tree.unflatten(self._treedef, self._copied)
        lowered = take.lower(self._like, which), put.lower(self._like, which, values)
        return lowered[0].compile(), lowered[1].compile()

    def save(self, pages: PagedCache, saves: Mapping[int, int]) -> None:
        """Copy device pages to host memory.

        The last copies may still run when this method returns.

        Args:
            saves: place -> device page.
        """
        for places, theirs in _batches(saves):
            parts = self._take_parts(pages, theirs)
            for array in parts:
                array.copy_to_host_async()
            self._wait()
            self._coming = self._thread.submit(self._take, parts, places)

    def load(self, pages: PagedCache, loads: Mapping[int, int]) -> PagedCache:
        """Copy pages from host memory to the device, device page -> place."""
        self._wait()
        for theirs, places in _batches(loads):
            values = [
                _on_devices(like, parts, places)
                for like, parts in zip(self._copied, self._arrays, strict=True)
            ]
            pages = self.programs[1](pages, theirs, jax.tree.unflatten(self._treedef, values))
        return pages

    def on_device(self, pages: PagedCache, numbers: Sequence[int]) -> Iterator[bytes]:
        """Yield the content of pages of the device, in the order of `numbers`."""
        for start in range(0, len(numbers), PAGES_AT_ONCE):
            batch = list(numbers[start : start + PAGES_AT_ONCE])
            padded = np.array(batch + batch[:1] * (PAGES_AT_ONCE - len(batch)), np.int32)
            arrays = [
                np.moveaxis(np.asarray(part), part.ndim - DIMS, 0)
                for part in self._take_parts(pages, padded)
            ]
            for place in range(len(batch)):
                yield b"".join(array[place].tobytes() for array in arrays)

    def parts(self) -> list[tuple[Part, ...]]:
        """Return the parts of each array that this process keeps."""
        return [tuple(parts) for parts in self._arrays]

    def content(self, place: int) -> bytes:
        """Return the content of a place: the parts of this process."""
        self._wait()
        return b"".join(array[place].tobytes() for array in self._flat)

    def fill(self, place: int, content: bytes) -> bool:
        """Write the content of a place. Return False if it has another length."""
        if len(content) != self.place_bytes:
            return False
        at = 0
        for array in self._flat:
            one = array[0]
            values = np.frombuffer(content, np.uint8, one.nbytes, at).view(one.dtype)
            array[place] = values.reshape(one.shape)
            at += one.nbytes
        return True

    @property
    def place_bytes(self) -> int:
        """Bytes of a place: the parts of this process."""
        return sum(array[0].nbytes for array in self._flat)

    @property
    def _flat(self) -> list[np.ndarray]:
        """The host arrays of all parts, in the order of `_take_parts`."""
        return [array for parts in self._arrays for array in parts.values()]

    def _take_parts(self, pages: PagedCache, numbers: np.ndarray) -> list[jax.Array]:
        """Return the parts of pages on the devices of this process, each part once."""
        page_parts: list[jax.Array] = []
        for leaf, parts in zip(
            jax.tree.leaves(self.programs[0](pages, numbers)), self._arrays, strict=True
        ):
            local_shards = {
                _part(one.index, leaf.shape): one.data for one in leaf.addressable_shards
            }
            page_parts += [local_shards[part] for part in parts]
        return page_parts

    def _wait(self) -> None:
        """Wait for all running copies."""
        if self._coming is not None:
            self._coming.result()

    def _take(self, parts: list[jax.Array], places: np.ndarray) -> None:
        for mine, part in zip(self._flat, parts, strict=True):
            mine[places] = np.moveaxis(np.asarray(part), part.ndim - DIMS, 0)


def _on_devices(
    like: jax.ShapeDtypeStruct, parts: Mapping[Part, np.ndarray], places: np.ndarray
) -> jax.Array:
    """Return an array of pages on the devices, from the places of its parts in host memory."""

    def of(index: DeviceIndex | None) -> np.ndarray:
        return np.moveaxis(parts[_part(index, like.shape)][places], 0, len(like.shape) - DIMS)

    return jax.make_array_from_callback(like.shape, like.sharding, of)


def _part(index: DeviceIndex | None, shape: tuple[int, ...]) -> Part:
    """Return the part of an array that a device holds."""
    assert index is not None, "the device holds a part"
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def _parts(like: jax.ShapeDtypeStruct) -> list[Part]:
    """Return the different parts of an array on the devices of this process."""
    indices = like.sharding.addressable_devices_indices_map(like.shape)
    return sorted({_part(index, like.shape) for index in indices.values()})


def _page_shape(part: Part) -> tuple[int, ...]:
    """Return the shape of one page of a part of [n, …] or [L, n, …]."""
    sizes = [last - first for first, last in part]
    return (*sizes[:-DIMS], *sizes[1 - DIMS :])


def groups(cache: Cache) -> dict[str, PagedCache]:
    """Return the pages of each group of layers."""
    parts = cache.caches if isinstance(cache, HybridCache) else {"": cache}
    return {part.group: part for part in parts.values() if isinstance(part, PagedCache)}


def _batches(copies: Mapping[int, int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield sources and targets of each copy; int32 [n] each, padded with the first entry."""
    pairs = [*copies.items()]
    for start in range(0, len(pairs), PAGES_AT_ONCE):
        batch = pairs[start : start + PAGES_AT_ONCE]
        batch += batch[:1] * (PAGES_AT_ONCE - len(batch))
        yield tuple(np.array(batch, np.int32).T.copy())


def take_pages(pages: PagedCache, numbers: jax.Array) -> PagedCache:
    """Return pages of a pool. Runs on the device.

    Args:
        pages: page arrays.
        numbers: page numbers; int32 [n].
    """

    def of(leaf: jax.Array) -> jax.Array:
        page_bits = jnp.take(to_bits(leaf), numbers, leaf.ndim - DIMS, mode="clip")
        return jax.lax.bitcast_convert_type(page_bits, leaf.dtype)

    return jax.tree.map(of, pages)


def write_pages(pages: PagedCache, numbers: jax.Array, values: PagedCache) -> PagedCache:
    """Return a pool with replaced pages. Runs on the device.

    Args:
        pages: page arrays.
        numbers: page numbers; int32 [n]. Duplicates have equal values.
        values: new contents of these pages.
    """

    def put(leaf: jax.Array, new: jax.Array) -> jax.Array:
        at = (*(slice(None),) * (leaf.ndim - DIMS), numbers)
        bits = to_bits(leaf).at[at].set(to_bits(new), mode="drop")
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(put, pages, values)


def copy_pages(cache: Cache, numbers: Mapping[str, jax.Array]) -> Cache:
    """Return a cache with copies of pages. Runs on the device.

    Args:
        cache: pages, and recurrent states, which do not change.
        numbers: group of layers -> sources and targets of the copies, int32 [2, n].
    """
    page_groups = groups(cache)
    new = {
        name: write_pages(page_groups[name], targets, take_pages(page_groups[name], sources))
        for name, (sources, targets) in numbers.items()
    }
    if isinstance(cache, HybridCache):
        return replace(cache, caches={**cache.caches, **new})
    return next(iter(new.values()))


def to_bits(array: jax.Array) -> jax.Array:
    """Return floats of less than 32 bits as integers of the same width.

    A CPU scatters such floats through a temporary pool of 32-bit floats. Other numbers are returned
    unchanged, because the conversion of a pool copies the pool on a CPU.
    """
    if array.dtype.itemsize >= 4 or not jnp.issubdtype(array.dtype, jnp.inexact):
        return array
    return jax.lax.bitcast_convert_type(array, f"uint{8 * array.dtype.itemsize}")
