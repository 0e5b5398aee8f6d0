"""Arrays that persist between steps: pages, recurrent states and the sampler's state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from ed_layers.cache import Cache, HybridCache, PagedCache, RecurrentCache
from ed_layers.cache.storage import zeros
from ed_models.protocol import LanguageModel

from ed_esurge.runner.sampler_rows import SamplerState

Tree = TypeVar("Tree")


class Memory:
    """The arrays that steps donate and replace. Initially nothing is allocated.

    Args:
        model: model that creates the cache, on its mesh.
        page_size: number of tokens in a page.
        num_pages: number of pages of each group's pool.
        max_num_seqs: maximum number of running sequences: the slots of the sampler's state and of
            the recurrent states.
        encoder_rows: number of rows of the table of encoder outputs; 0 = no table.
        encoder_features: number of columns of the table; None = that of the hidden states.
        encoder_length: encoder positions of a sequence of an encoder-decoder; None for others.
        num_states: number of saved recurrent states; None = states are not copied.
        second_states: whether each sequence has a second slot for its recurrent state.

    Attributes:
        encoded: table of encoder outputs [encoder_rows, encoder_features], or None.
        cache: pages and recurrent states.
        state: state of the sampler.
        sums: sums of the hidden states of pooled sequences; float32 `[m, d]`.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        page_size: int,
        num_pages: dict[str, int],
        max_num_seqs: int,
        encoder_rows: int = 0,
        encoder_features: int | None = None,
        encoder_length: int | None = None,
        num_states: int | None = None,
        second_states: bool = False,
    ) -> None:
        self.num_states, self.second_states = num_states, second_states
        self.encoder_rows, self.encoder_length = encoder_rows, encoder_length
        self._encoder_features = encoder_features
        self.encoded: jax.Array | None = None
        self.page_size, self.num_pages = page_size, num_pages
        self.max_num_seqs = max_num_seqs
        self.cache: Cache | None = None
        self.state: SamplerState | None = None
        self.sums: jax.Array | None = None
        self._model, self._mesh = model, model.config.mesh
        text = model.config.get_text_config()
        self._vocab_size, self._width = cast(int, text.vocab_size), cast(int, text.hidden_size)

    def allocate(self) -> Cache:
        """Allocate empty pages and states, and return the cache."""
        sizes = [*self.num_pages.values()]
        # A single pool does not need a hybrid cache with names.
        pages = sizes[0] if len(sizes) == 1 else self.num_pages
        # A mesh of one device does not determine the placement of its arrays.
        with jax.default_device(self._mesh.local_devices[0]):
            cache = self._model.init_paged_cache(
                pages,
                self.page_size,
                num_states=self.num_state_slots,
                encoder_length=self.encoder_length,
            )
        # Committed like the outputs of a step: jit would trace again for an uncommitted array.
        self.cache = cache if self._mesh.size > 1 else self.replicate_arrays(cache)
        self.state = self.replicate_arrays(SamplerState.create(self.max_num_seqs, self._vocab_size))
        self.sums = self.replicate_arrays(zeros((self.max_num_seqs, self._width), jnp.float32))
        if self.encoder_rows:
            dtype = cast(Any, self._model).dtype
            shape = (self.encoder_rows, self._encoder_features or self._width)
            self.encoded = self.replicate_arrays(zeros(shape, dtype))
        return self.cache

    @property
    def num_state_slots(self) -> int:
        """Number of slots of recurrent states: one for each sequence, one for each saved state, and
        with `second_states` another one for each sequence."""
        return self.max_num_seqs * (1 + self.second_states) + (self.num_states or 0)

    def free(self) -> None:
        """Free the pages and states."""
        for leaf in jax.tree.leaves((self.cache, self.state, self.sums, self.encoded)):
            leaf.delete()
        self.cache = self.state = self.sums = self.encoded = None

    @property
    def allocated(self) -> bool:
        return self.cache is not None

    def get_encoder_outputs(self, featured: bool) -> tuple[jax.Array, ...]:
        """Return the last arguments of a step: the table of encoder outputs, if the step reads
        it."""
        return (self.encoded,) if featured and self.encoded is not None else ()

    def bytes(self) -> int:
        """Return the bytes of all arrays over all devices."""
        arrays = (self.cache, self.state, self.sums, self.encoded)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))

    def cache_bytes(self) -> int:
        """Return the bytes of all pages and recurrent states over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.cache))

    def state_bytes(self) -> int:
        """Return the bytes of the states of sequences, without pages, on each device."""
        parts = list(self.cache.caches.values()) if isinstance(self.cache, HybridCache) else []
        recurrent = [part for part in parts if not isinstance(part, PagedCache)]
        arrays = (self.state, self.sums, self.encoded, recurrent)
        return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))

    def saved_state_bytes(self) -> int:
        """Return the bytes of all saved recurrent states over all devices."""
        arrays = jax.tree.leaves([*get_recurrent_caches(self.cache).values()])
        one = sum(leaf.nbytes for leaf in arrays) // self.num_state_slots
        return one * (self.num_states or 0)

    # ---- placement of arrays

    @property
    def placement(self) -> jax.sharding.Sharding:
        """The sharding of the arrays of `replicate_arrays`: replicated over all devices."""
        if self._mesh.size == 1:
            return jax.sharding.SingleDeviceSharding(self._mesh.devices.flat[0])
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def replicate_arrays(self, tree: Tree) -> Tree:
        """Replicate arrays over the devices."""
        return jax.device_put(tree, self.placement)


def get_recurrent_caches(cache: Cache | None) -> dict[str, RecurrentCache]:
    """Return the states of each group of recurrent layers."""
    parts = cache.caches if isinstance(cache, HybridCache) else {}
    return {name: part for name, part in parts.items() if isinstance(part, RecurrentCache)}


def copy_states(cache: Cache, copies: jax.Array, count: jax.Array) -> Cache:
    """Return a cache with copies of recurrent states. Runs on the device.

    Args:
        cache: pages, which do not change, and states.
        copies: source and target of each copy; int32 [2, c].
        count: number of used copies.
    """
    assert isinstance(cache, HybridCache), "recurrent layers have states"
    recurrent = get_recurrent_caches(cache).items()
    copied_caches = {name: part.copy_rows(copies, count) for name, part in recurrent}
    return replace(cache, caches={**cache.caches, **copied_caches})
