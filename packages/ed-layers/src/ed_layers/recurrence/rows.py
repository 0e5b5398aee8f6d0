"""The batch of a recurrent layer: rows of consecutive tokens, each row with a state.

A mixer runs the same steps in training, in `generate` and in serving:

    rows = Rows.of(ctx, x.shape[:2], cache)
    states = rows.states(cache, layer, self.cache_spec)
    u = rows.enter(self.in_proj(x, ctx))
    u, states["conv"] = self.conv1d(u, states["conv"], rows)
    y, states["ssm"] = rows.scan(step, states["ssm"], (u, ...))
    cache = rows.store(cache, layer, states, self.cache_spec)
    return self.out_proj(rows.leave(y), ctx), cache

The rows depend on the batch:

- without a cache, the rows are the rows of the batch, and several sequences may begin in one row;
- with a contiguous cache, the rows are the rows of the batch, with their tokens moved to the front;
- in a serving step of single tokens, a row is the token of a sequence;
- in any other serving step, a row is a chunk of one sequence, and the rows of a sequence are
  consecutive.

Legend: b batch, s positions, r rows, c columns, m states, n sequences, q rows of a step, C columns
of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.sharding.placement import constrain
from jaxtyping import Array, Bool, Float, Int, PyTree

from ed_layers import fixed_order
from ed_layers.cache.protocol import StateCache, States
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.cache.spec import RecurrentSpec
from ed_layers.cache.storage import Layer
from ed_layers.context import Ctx
from ed_layers.native import recurrences
from ed_layers.native.recurrences import Terms

#: A recurrence over C tokens: `(state [q, ...], inputs [q, C, ...], begun) -> (state, outputs [q,
#: C, ...])`. `begun` [q, C] is the number of sequences that began at or before a token. The given
#: state contributes to the tokens with count 0, a token contributes to later tokens with the same
#: count, and the returned state belongs to the last count. None: no sequence begins.
RecurrenceStep = Callable[[PyTree, PyTree, Any], tuple[PyTree, PyTree]]

#: Number of tokens that a recurrence computes in parallel.
CHUNK = 64
#: Maximum number of columns of a serving step in one order of sums, in which each position of a row
#: is computed alone, also those without a token.
ORDERED_CHUNK = 16
#: Maximum number of columns of a serving step whose sequences have a few tokens each: drafts.
DRAFT_CHUNK = 8


@dataclass(frozen=True)
class Rows:
    """The mapping between the tokens of a batch and the positions of its rows; see the module.

    Attributes:
        ctx: context of the layer.
        real: whether a position holds a token, [r, c]. The inputs of a mixer at other positions
            must not change the state.
        starts: whether a sequence begins at a position, [r, c]; None = each row continues its
            state.
        chunk: number of tokens that a recurrence computes in parallel.
        take: for each position, the index of the token in its row of the batch, or in a flat batch;
            None = the positions of the batch.
        back: for each token, its position; None = the positions of the batch.
        owner: the state of each row if rows are consecutive chunks, [r]; None = row i has state i.
        last: the last row of each state, [m]; None = row i.
    """

    ctx: Ctx
    real: Bool[Array, "r c"]
    starts: Bool[Array, "r c"] | None = None
    chunk: int = CHUNK
    take: Int[Array, "r c"] | None = None
    back: Int[Array, "b s"] | None = None
    owner: Int[Array, " r"] | None = None
    last: Int[Array, " m"] | None = None

    @classmethod
    def of(
        cls, ctx: Ctx, shape: tuple[int, int], cache: StateCache | None, *, chunk: int = CHUNK
    ) -> Rows:
        """Create the rows of a batch.

        Args:
            ctx: context of the layer.
            shape: (b, s) of the batch.
            cache: cache of the model; None in training.
            chunk: number of tokens to compute in parallel, at least the memory of a convolution.
        """
        s = shape[1]
        if ctx.ragged is not None:
            ragged = ctx.ragged.of_states or ctx.ragged
            if ragged.decode_only:
                return _build_token_rows(ctx, ragged)
            if fixed_order.active():
                chunk = min(chunk, ORDERED_CHUNK)
            if ctx.ragged.decode_only:  # of_states merges the tokens of a sequence
                chunk = min(chunk, DRAFT_CHUNK)
            return _build_chunk_rows(ctx, ragged, min(chunk, s))
        assert ctx.mask_info is not None, "only a serving step has no mask"
        real = ctx.mask_info.q_segment_ids != 0
        if cache is None:
            return cls(ctx, real, starts=real & (ctx.mask_info.q_index == 0), chunk=chunk)
        if s == 1:
            return cls(ctx, real, chunk=chunk)
        # A stable sort moves the tokens of each row to the front.
        take = jnp.argsort(~real, axis=1, stable=True)
        count = jnp.cumsum(real, axis=1)
        places = jnp.arange(s) < count[:, -1:]
        return cls(ctx, places, chunk=chunk, take=take, back=jnp.maximum(count - 1, 0))

    def enter(
        self, x: Float[Array, "b s *dims"], axis: str | None = None
    ) -> Float[Array, "r c *dims"]:
        """Move values of tokens to their positions; the values of positions without a token are
        arbitrary.

        Args:
            axis: logical axis of the third dimension (`"mlp"`, `"heads"`), which devices split;
                None = not split.
        """
        if self.ctx.config is not None:
            # A recurrence runs along the sequence: each device has whole rows.
            axes = ("batch", None, axis, *(None,) * x.ndim)[: x.ndim]
            x = constrain(x, axes, self.ctx.config)
        if self.take is None:
            return x
        if self.ctx.ragged is not None:
            return x[0].at[self.take].get(mode="clip")
        return jnp.take_along_axis(x, _spread(self.take, x.ndim), axis=1)

    def leave(self, y: Float[Array, "r c *dims"]) -> Float[Array, "b s *dims"]:
        """Move values back to the tokens."""
        if self.back is None:
            return y
        if self.ctx.ragged is not None:
            return y.reshape(-1, *y.shape[2:]).at[self.back].get(mode="clip")
        return jnp.take_along_axis(y, _spread(self.back, y.ndim), axis=1)

    def states(self, cache: StateCache | None, layer: Layer, spec: RecurrentSpec) -> States:
        """Return the states of a layer before this step; zeros without a cache."""
        if cache is None:
            rows = self.real.shape[0]
            return {x.name: jnp.zeros((rows, *x.shape), x.dtype) for x in spec.states}
        return cache.get(layer, ragged=self._ragged, group=spec.group)

    def store(
        self, cache: StateCache | None, layer: Layer, states: States, spec: RecurrentSpec
    ) -> StateCache | None:
        """Return the cache after this step; None stays None."""
        if cache is None:
            return None
        return cache.set(layer, states, ragged=self._ragged, group=spec.group)

    @property
    def _ragged(self) -> RaggedBatch | None:
        """The batch of a serving step; None otherwise."""
        ragged = self.ctx.ragged
        return None if ragged is None else ragged.of_states or ragged

    def mask_padding(
        self, x: Float[Array, "r c *dims"], value: float = 0.0
    ) -> Float[Array, "r c *dims"]:
        """Replace the values of positions without a token."""
        return jnp.where(_spread(self.real, x.ndim), x, jnp.asarray(value, x.dtype))

    def prepend_history(
        self, x: Float[Array, "r c *dims"], state: Float[Array, "m k *dims"]
    ) -> tuple[Float[Array, "r kc *dims"], Float[Array, "m k *dims"]]:
        """Prepend the `k` previous inputs to each row.

        Args:
            x: inputs.
            state: the last k inputs of each state.

        Returns:
            [r, k + c, ...], and the state after this step.
        """
        k, previous_inputs = state.shape[1], state
        if self.owner is not None:
            goes_on = jnp.pad(self.owner[1:] == self.owner[:-1], (1, 0))
            # With fewer columns than k, all tokens of a sequence are in one row.
            start = max(x.shape[1] - k, 0)
            missing = max(k - x.shape[1], 0)
            tail = jnp.pad(x[:-1, start:], ((1, 0), (missing, 0), *((0, 0),) * (x.ndim - 2)))
            previous_inputs = jnp.where(
                _spread(goes_on, x.ndim), tail, state[self.owner].astype(x.dtype)
            )
        inputs = jnp.concatenate([previous_inputs.astype(x.dtype), x], axis=1)
        ends = jnp.sum(self.real, axis=1)[:, None] + jnp.arange(k)
        last_inputs = jnp.take_along_axis(inputs, _spread(ends, x.ndim), axis=1)
        return inputs, self.update_states(last_inputs, state)

    def update_states(self, rows: jax.Array, state: jax.Array) -> jax.Array:
        """Return the states of the last rows, from rows [r, ...] and previous states [m, ...], in
        the dtype of the states; a state without a token does not change."""
        if self.last is not None:
            ragged = self._ragged
            assert ragged is not None, "only sequences of a serving step have many rows"
            goes_on = _spread(ragged.q_lens > 0, rows.ndim)
            rows = jnp.where(goes_on, rows[self.last], state.astype(rows.dtype))
        return rows.astype(state.dtype)

    def begun(self) -> Int[Array, "r c"] | None:
        """Return the number of sequences that began at or before each position of its row; None if
        no sequence begins."""
        return None if self.starts is None else jnp.cumsum(self.starts, axis=1, dtype=jnp.int32)

    def scan(
        self,
        step: RecurrenceStep,
        state: PyTree,
        inputs: PyTree,
        terms: Callable[[Any], Terms] | None = None,
    ) -> tuple[PyTree, PyTree]:
        """Run a recurrence over all tokens.

        With sums in one order (`ed_layers.fixed_order`), and in the native library, the recurrence
        computes one token after another.

        Args:
            step: the recurrence for `chunk` tokens of several rows; see `RecurrenceStep`.
            state: a pytree of [m, ...].
            inputs: a pytree of [r, c, ...]; zeros, which fill the rows, must not change the state.
            terms: returns the inputs of the native library's recurrence for `inputs`; None = the
                library does not have the recurrence.

        Returns:
            The outputs, a pytree of [r, c, ...], and the state after this step, in its own dtype.
        """
        train = self.ctx.mode == "train"
        fixed_order.KernelChoice.note("recurrence", self, step, state, inputs, terms)
        if terms is None or not recurrences.takes(gradient=train):
            return self._scan(step, state, inputs)
        if not train:
            return self._recur(terms(inputs), state)
        native = self._recur(*jax.lax.stop_gradient((terms(inputs), state)))
        return fixed_order.with_ordinary_gradient(native, lambda: self._scan(step, state, inputs))

    def _recur(self, terms: Terms, state: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Run a recurrence of the native library."""
        marks = self.real.astype(jnp.int32)
        if self.starts is not None:
            marks = marks + self.starts
        out, new_state = recurrences.recur(terms, state.astype(jnp.float32), marks, self.owner)
        return out, new_state.astype(state.dtype)

    def _scan(self, step: RecurrenceStep, state: PyTree, inputs: PyTree) -> tuple[PyTree, PyTree]:
        """Run a recurrence of XLA."""
        if fixed_order.active():
            step = token_by_token(step)
        if self.ctx.mode == "train":
            # The backward pass needs only the states between the chunks.
            step = jax.checkpoint(step, prevent_cse=False)
        r, c = self.real.shape
        if self.owner is not None:
            return self._scan_chained(step, state, inputs)
        width = min(self.chunk, c)
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
        if width == c:
            state, outputs = step(state, inputs, self.begun())
            return outputs, jax.tree.map(lambda leaf, d: leaf.astype(d), state, dtypes)
        count = -(-c // width)

        def split_chunks(x: jax.Array) -> jax.Array:
            x = jnp.pad(x, ((0, 0), (0, count * width - c), *((0, 0),) * (x.ndim - 2)))
            return jnp.moveaxis(x.reshape(r, count, width, *x.shape[2:]), 1, 0)

        def body(state: PyTree, now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            inputs, starts = now
            begun = None if starts is None else jnp.cumsum(starts, axis=1, dtype=jnp.int32)
            new, outputs = step(state, inputs, begun)
            return jax.tree.map(lambda leaf, d: leaf.astype(d), new, dtypes), outputs

        starts = None if self.starts is None else split_chunks(self.starts)
        state, outputs = jax.lax.scan(body, state, (jax.tree.map(split_chunks, inputs), starts))

        def merge_chunks(y: jax.Array) -> jax.Array:
            return jnp.moveaxis(y, 0, 1).reshape(r, count * width, *y.shape[3:])[:, :c]

        return jax.tree.map(merge_chunks, outputs), state

    def _scan_chained(
        self, step: RecurrenceStep, states: PyTree, inputs: PyTree
    ) -> tuple[PyTree, PyTree]:
        """Run the rows one after another: each row reads and updates the state of its sequence."""

        def body(states: PyTree, now: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            owner, inputs = now
            one = jax.tree.map(lambda s: jax.lax.dynamic_slice_in_dim(s, owner, 1), states)
            new, outputs = step(one, jax.tree.map(lambda x: x[None], inputs), None)
            states = jax.tree.map(
                lambda s, x: jax.lax.dynamic_update_slice_in_dim(s, x.astype(s.dtype), owner, 0),
                states,
                new,
            )
            return states, jax.tree.map(lambda y: y[0], outputs)

        states, outputs = jax.lax.scan(body, states, (self.owner, inputs))
        return outputs, states


def token_by_token(step: RecurrenceStep) -> RecurrenceStep:
    """Return a recurrence without sums that calls `step` for one token after another.

    A token then has the same operations in a whole prompt, in a chunk and alone.
    """

    def one(state: PyTree, inputs: PyTree, begun: object) -> tuple[PyTree, PyTree]:
        dtypes = jax.tree.map(lambda leaf: leaf.dtype, state)
        new, outputs = step(state, inputs, begun)
        return jax.tree.map(lambda leaf, dtype: leaf.astype(dtype), new, dtypes), outputs

    def body(state: PyTree, now: object) -> tuple[PyTree, PyTree]:
        inputs, starts = jax.tree.map(lambda x: x[:, None], now)
        state, outputs = one(state, inputs, starts)
        return state, jax.tree.map(lambda y: y[:, 0], outputs)

    def run(
        state: PyTree, inputs: PyTree, begun: Int[Array, "q c"] | None
    ) -> tuple[PyTree, PyTree]:
        if jax.tree.leaves(inputs)[0].shape[1] == 1:
            return one(state, inputs, begun)
        starts = None if begun is None else jnp.diff(begun, axis=1, prepend=0)
        tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (inputs, starts))
        state, outputs = jax.lax.scan(body, state, tokens)
        return state, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), outputs)

    return run


def reach(begun: Int[Array, "q c"] | None, columns: int) -> Bool[Array, "q c c"]:
    """Return whether the second token contributes to the first token: the second token is not
    later, and no sequence begins between them. [1, c, c] if `begun` is None."""
    causal = jnp.tril(jnp.ones((columns, columns), bool))[None]
    return causal if begun is None else causal & (begun[:, :, None] == begun[:, None])


def _build_token_rows(ctx: Ctx, ragged: RaggedBatch) -> Rows:
    """Create rows with one column: each sequence has at most one token."""
    return Rows(
        ctx,
        (ragged.q_lens > 0)[:, None],
        take=ragged.cu_q_lens[:-1, None],
        back=ragged.seq_of_token[None],
    )


def _build_chunk_rows(ctx: Ctx, ragged: RaggedBatch, chunk: int) -> Rows:
    """Create separate rows for each sequence, as many as its tokens fill."""
    tokens, n = ragged.seq_of_token.shape[0], ragged.q_lens.shape[0]
    rows = jnp.arange(tokens // chunk + n, dtype=jnp.int32)
    ends = jnp.cumsum(-(-ragged.q_lens // chunk))
    begins = ends - (-(-ragged.q_lens // chunk))
    owner = jnp.searchsorted(ends, rows, side="right", method="compare_all")
    owner = jnp.minimum(owner, n - 1).astype(jnp.int32)
    place = (rows - begins[owner])[:, None] * chunk + jnp.arange(chunk)
    real = (place < ragged.q_lens[owner][:, None]) & (rows < ends[-1])[:, None]
    token_seqs = jnp.minimum(ragged.seq_of_token, n - 1)
    at = jnp.arange(tokens) - ragged.cu_q_lens[token_seqs]
    return Rows(
        ctx,
        real,
        chunk=chunk,
        take=ragged.cu_q_lens[owner][:, None] + place,
        back=(begins[token_seqs] * chunk + at)[None],
        owner=owner,
        last=jnp.maximum(ends - 1, 0),
    )


def _spread(x: jax.Array, ndim: int) -> jax.Array:
    """Append dimensions of size 1."""
    return x.reshape(*x.shape, *(1,) * (ndim - x.ndim))
