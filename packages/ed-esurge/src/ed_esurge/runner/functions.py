"""The compiled functions: a step of each shape and its companions, created once.

They accept flat leaves and donate the pages. Legend: T flat tokens, n rows, m slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.compilation.cache import compiled_afresh
from ed_infra.inputs import Features
from ed_models.adapters.slots import slot_values
from flax import nnx
from tqdm import tqdm

from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, StepShape
from ed_esurge.runner.guides import Guides
from ed_esurge.runner.hidden_states import pool, score
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.programs import Programs
from ed_esurge.runner.sampler import SamplerState, sample
from ed_esurge.runner.weights import ServedWeights, abstract, with_adapter

# The step of a shape; ("score", T) and ("pool", T), which read a step's hidden states; ("put", 0),
# which writes a line of the sampler's state; ("place", 0), an adapter.
ProgramKey = StepShape | tuple[str, int]
PUT: ProgramKey = ("put", 0)
PLACE: ProgramKey = ("place", 0)


class Functions:
    """Table of compiled functions by name. Missing functions are created on access.

    Args:
        weights: weights of the model.
        memory: arrays that the functions read and replace; need not be allocated.
        builder: creates the inputs of a step.
        guides: grammars of structured outputs.
        buckets: shapes of the steps.
        max_logprobs: number of alternatives that a step returns.
        ahead_of_time: whether to call compiled executables, which accept exactly one shape. False
            calls through `jax.jit`.
    """

    def __init__(
        self,
        weights: ServedWeights,
        memory: Memory,
        builder: BatchBuilder,
        guides: Guides,
        buckets: Buckets,
        *,
        max_logprobs: int,
        ahead_of_time: bool,
    ) -> None:
        self.num_traces = 0
        """Number of traces, which is constant after all functions are compiled."""
        self._weights, self._memory, self._builder = weights, memory, builder
        self._guides, self._buckets = guides, buckets
        self.max_logprobs, self._ahead_of_time = max_logprobs, ahead_of_time
        self._made: dict[ProgramKey, Callable[..., Any]] = {}
        self._hidden: dict[int, jax.ShapeDtypeStruct] = {}  # by T
        # Functions of an earlier process are loaded while memory is allocated.
        self._kept = self._programs()
        self._loading = self._kept.loading(self.missing()) if self._kept else None

    def __getitem__(self, name: ProgramKey) -> Callable[..., Any]:
        if name not in self._made:
            self._made[name] = self._loaded(name) or self._make(name)
        return self._made[name]

    def missing(self) -> list[ProgramKey]:
        """Return the names of the missing functions, in the order in which they are needed."""
        buckets = self._buckets
        first = buckets.prefill[0]
        names: list[ProgramKey] = [first, *(shape for shape in buckets.shapes if shape != first)]
        names += [PUT, PLACE] if self._weights.places else [PUT]
        for tokens in buckets.prefill_tokens:
            names += [("score", tokens), ("pool", tokens)]
        return [name for name in names if name not in self._made]

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all functions for serving and update the progress bar."""
        names = self.missing()
        progress.reset(len(names))
        if not self._ahead_of_time:
            for name in names:
                self._warm(name)
                progress.update()
            return
        if self._loading is not None:  # each function is loaded before its first use
            progress.update(len(names))
            return
        # XLA releases the GIL while it compiles. Tracing does not benefit from threads.
        count, kept = max(1, min(4, os.cpu_count() or 1)), self._kept
        with compiled_afresh() if kept else nullcontext(), ThreadPoolExecutor(count) as threads:
            pending = {threads.submit(self._lower(name).compile): name for name in names}
            for future in as_completed(pending):
                self._made[pending[future]] = future.result()
                progress.update()
        if kept:
            kept.write({name: self._made[name] for name in names})

    def load_all(self) -> None:
        """Wait until every function of an earlier process is loaded."""
        for name in self.missing() if self._loading is not None else ():
            self[name]

    def workspace_bytes(self) -> int:
        """Return the bytes that the largest step needs in addition to weights, pages and state."""
        compiled = self._lower(self._buckets.shapes[-1]).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            return 0
        return int(analysis.temp_size_in_bytes)

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that `num_traces` counts its traces."""

        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return function(*args)

        return counted

    # ---- functions of an earlier process

    def _programs(self) -> Programs[ProgramKey] | None:
        """Return the files of compiled functions that processes share."""
        if not self._ahead_of_time:
            return None
        memory, weights = self._memory, self._weights
        sizes = (memory.page_size, memory.num_pages, memory.max_num_seqs, self.max_logprobs)
        encoder = memory.encoder_rows or memory.encoder_length
        sizes = (*sizes, encoder) if encoder else sizes
        parts = (weights.graphdefs, weights.like, self._buckets, sizes)
        return Programs.of(weights.model, *parts)

    def _loaded(self, name: ProgramKey) -> Callable[..., Any] | None:
        """Return the function of an earlier process, or None."""
        if self._loading is None or name not in self._loading:
            return None
        try:
            return self._loading.take(name)
        except Exception as error:  # the backend reads less than it writes
            if self._kept is not None:
                self._kept.give_up(error)
            return None

    # ---- new functions

    def _make(self, name: ProgramKey) -> Callable[..., Any]:
        return self._lower(name).compile() if self._ahead_of_time else self._jitted(name)

    def _lower(self, name: ProgramKey) -> Any:
        lowered = self._jitted(name).lower(*self._arguments(name))
        if isinstance(name, StepShape):
            self._keep_hidden(name, lowered.out_info)
        return lowered

    def _jitted(self, name: ProgramKey) -> Any:
        """Return the function with a name."""
        everywhere = self._memory.everywhere
        if name == PUT:
            return jax.jit(self.traced(SamplerState.put), donate_argnums=0)
        if name == PLACE:
            kept = [leaf.sharding for leaf in self._weights.places]
            return jax.jit(self.traced(with_adapter), donate_argnums=0, out_shardings=kept)
        if isinstance(name, StepShape):
            # Outputs that become inputs keep their sharding, so that the next step is not retraced.
            memory = self._memory
            kept = jax.tree.map(lambda x: x.sharding, (memory.cache, memory.state))
            return jax.jit(
                self.traced(self._make_step(name)),
                donate_argnums=(1, 2),
                out_shardings=(everywhere, everywhere, *kept),
            )
        if name[0] == "pool":
            return jax.jit(self.traced(pool), out_shardings=(everywhere, everywhere))
        return jax.jit(self.traced(self._make_score()))

    def _make_step(self, shape: StepShape) -> Callable[..., Any]:
        fields, count = self._builder.fields(shape), self.max_logprobs

        def step(
            leaves: list[jax.Array],
            cache: Any,
            state: Any,
            buffer: Any,
            allowed: Any,
            encoded: jax.Array | None = None,
        ):
            inputs = fields.unpack(buffer)
            token_ids, slots = inputs.token_ids, inputs.ragged.state_slots
            if shape.decodes:
                token_ids = state.read(token_ids[0], slots)[None]
            more: dict[str, Any] = {}
            if encoded is not None and inputs.features is not None:
                more["features"] = Features(encoded[None], inputs.features)
            if inputs.positions is not None:
                more["position_ids"] = inputs.positions
            out = self._weights.merged(leaves).decode(
                token_ids,
                past_key_values=cache,
                ragged=inputs.ragged,
                logits_at=inputs.logits_at,
                **more,
            )
            assert out.logits is not None
            assert out.last_hidden_state is not None
            sampled, state = sample(out.logits, inputs.rows, state, count, allowed)
            state = state.note(slots, sampled.tokens)
            return sampled.pack(), out.last_hidden_state[0], out.past_key_values, state

        return step

    def _make_score(self) -> Callable[..., Any]:
        def of_prompt(leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array):
            return score(hidden, self._weights.merged(leaves).head(), targets, self.max_logprobs)

        return of_prompt

    # ---- arguments of the functions

    def _arguments(self, name: ProgramKey) -> tuple[Any, ...]:
        """Return the abstract arguments of a function."""
        weights, memory = self._weights, self._memory
        cache, state, sums = abstract((memory.cache, memory.state, memory.sums))
        if name == PUT:
            line = np.zeros(self._guides.vocab_size)
            mu = np.float32(0)
            return state, np.int32(0), line.astype(np.float32), line.astype(np.int32), mu
        if name == PLACE:
            values = jax.tree.leaves(slot_values(cast(nnx.Module, weights.model), {}))
            return abstract(weights.places), np.int32(1), values
        if isinstance(name, StepShape):
            allowed = abstract(self._guides.everything(name.seqs))
            encoded = abstract(memory.encoded_of(self._builder.fields(name).featured))
            return weights.like, cache, state, self._builder.empty(name), allowed, *encoded
        kind, tokens = name
        if tokens not in self._hidden:
            shape = self._buckets.pick(tokens, 1, prefill=True)
            step = self._make_step(shape)
            self._keep_hidden(shape, jax.eval_shape(step, *self._arguments(shape)))
        hidden, of_token = self._hidden[tokens], np.zeros(tokens, np.int32)
        if kind == "score":
            return weights.like, hidden, of_token
        return hidden, of_token, np.zeros((memory.max_num_seqs, 4), np.int32), sums

    def _keep_hidden(self, shape: StepShape, outputs: Any) -> None:
        """Store the abstract hidden states for `score` and `pool`, because tracing a step takes a
        second."""
        hidden = outputs[1]
        self._hidden[shape.tokens] = jax.ShapeDtypeStruct(
            hidden.shape, hidden.dtype, sharding=self._memory.everywhere
        )

    def _warm(self, name: ProgramKey) -> None:
        """Call a function with empty inputs, so that `jax.jit` compiles the function."""
        function, leaves, memory = self[name], self._weights.leaves, self._memory
        if isinstance(name, StepShape):
            allowed = self._guides.everything(name.seqs)
            empty = self._builder.empty(name)
            encoded = memory.encoded_of(self._builder.fields(name).featured)
            out = function(leaves, memory.cache, memory.state, empty, allowed, *encoded)
            memory.cache, memory.state = out[2:]
        elif name == PUT:
            memory.state = function(memory.state, *self._arguments(name)[1:])
        elif name == PLACE:
            self._weights.put(function(self._weights.places, *self._arguments(name)[1:]))
        elif name[0] == "score":
            _, hidden, targets = self._arguments(name)
            function(leaves, self._zeros(hidden), targets)
        else:
            hidden, of_token, rows, _ = self._arguments(name)
            function(self._zeros(hidden), of_token, rows, memory.sums)

    def _zeros(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self._memory.replicated(jnp.zeros(like.shape, like.dtype))
