"""The compiled functions: a step of each shape and its companions, created once.

They accept flat leaves and donate the pages. A step computes logits, and a second function samples.
Shapes with the same number of rows share the second function, which takes longer to compile than a
step of most models. Legend: T flat tokens, n rows, m slots, v vocabulary, w words of a mask.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import Any, NoReturn, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.compilation.cache import compiled_afresh
from ed_infra.inputs import Features
from ed_layers import native
from ed_models.adapters.slots import slot_values
from flax import nnx
from tqdm import tqdm

from ed_esurge.model import platform_of
from ed_esurge.runner import filters
from ed_esurge.runner.background import BackgroundCompilation
from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, StepShape
from ed_esurge.runner.guides import Guides, words
from ed_esurge.runner.hidden_states import pool, score
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.programs import Programs
from ed_esurge.runner.row_numbers import OF_FILTERS, OF_SAMPLING, OF_STEP
from ed_esurge.runner.sampler import SamplerRows, SamplerState, read_last, sample
from ed_esurge.runner.weights import ServedWeights, abstract, with_adapter

# - a shape: the step, which computes logits and hidden states;
# - ("sample", n): reads the logits of a step;
# - ("take", n), FILTER, ("merge", n): read, filter and write the masks of a few rows of a step;
# - ("score", T), ("pool", T): read the hidden states of a step;
# - PUT, PLACE: write a line of the sampler's state, or an adapter.
ProgramKey = StepShape | tuple[str, int]
PUT: ProgramKey = ("put", 0)
PLACE: ProgramKey = ("place", 0)
FILTER: ProgramKey = ("filter", filters.ROWS)
#: Options of XLA for functions that are replaced soon: half the time of the default level.
FIRST_OPTIONS = {"xla_backend_optimization_level": 0}
#: Number of arrays [n, v] of the sampler at the same time.
SAMPLER_ARRAYS = 6


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
        """Number of traces outside the background thread, which is constant after the engine is
        ready."""
        self._weights, self._memory, self._builder = weights, memory, builder
        self._guides, self._buckets = guides, buckets
        self.max_logprobs, self._ahead_of_time = max_logprobs, ahead_of_time
        self._made: dict[ProgramKey, Callable[..., Any]] = {}
        self.background: BackgroundCompilation[ProgramKey] | None = None
        self._arrays: tuple[Any, Any, Any] | None = None
        self._hidden: dict[int, jax.ShapeDtypeStruct] = {}  # by T
        self._logits: dict[int, jax.ShapeDtypeStruct] = {}  # by n
        # Functions of an earlier process are loaded while memory is allocated.
        self._kept = self._programs()
        self._loading = self._kept.loading(self.missing()) if self._kept else None

    def __getitem__(self, name: ProgramKey) -> Callable[..., Any]:
        if name not in self._made:
            coming = self.background.take(name) if self.background is not None else None
            if name not in self._made:  # the thread may have compiled the function just now
                self._made[name] = coming or self._loaded(name) or self._make(name)
        return self._made[name]

    def missing(self) -> list[ProgramKey]:
        """Return the names of the missing functions, in the order in which they are needed."""
        buckets = self._buckets
        first = buckets.prefill[0]
        names: list[ProgramKey] = [first, *(shape for shape in buckets.shapes if shape != first)]
        names += [PUT, PLACE, FILTER] if self._weights.places else [PUT, FILTER]
        for rows in sorted({shape.seqs for shape in buckets.shapes}):
            names += [("sample", rows), ("take", rows), ("merge", rows)]
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
        self._made |= (made := self._compile(names, progress))
        if self._kept:
            self._kept.write(made)

    def compile_first(self, progress: tqdm[NoReturn]) -> None:
        """Compile the functions of the generic shape, and the others in a background thread.

        Functions of an earlier process are loaded instead. An engine whose results must not depend
        on time (`batch_invariant`) compiles all functions.
        """
        if self._loading is not None or not self._ahead_of_time or self._buckets.invariant:
            self.compile_all(progress)
            return
        generic = self._buckets.generic
        first: list[ProgramKey] = [generic, ("sample", generic.seqs)]
        names = self._by_need()
        options = FIRST_OPTIONS if platform_of(self._weights.model) == "cpu" else None
        progress.reset(len(first))
        for name, function in self._compile(first, progress, options).items():
            self._made[name] = function  # until the background has compiled a faster one
        context = compiled_afresh if self._kept else nullcontext
        self.background = BackgroundCompilation(names, self._compile_one, context)

    def _by_need(self) -> list[ProgramKey]:
        """Return all functions: the small ones that the generic shape may need, the shape of one
        sequence, and the other shapes."""
        generic, names = self._buckets.generic, self.missing()
        small: list[ProgramKey] = [(kind, generic.seqs) for kind in ("take", "merge")]
        small += [(kind, generic.tokens) for kind in ("score", "pool")]
        first, *others = self._buckets.shapes
        order = [PUT, PLACE, *small, first, ("sample", first.seqs), FILTER]
        for shape in others:
            order += [shape, ("sample", shape.seqs)]
        known = set(names)
        return [*dict.fromkeys(name for name in (*order, *names) if name in known)]

    def usable(self, shape: StepShape) -> bool:
        """Whether a step of this shape needs no function that is still being compiled."""
        coming = self.background
        if coming is None or not coming or shape == self._buckets.generic:
            return True
        return not any(name in coming for name in (shape, ("sample", shape.seqs)))

    def _compile(
        self,
        names: list[ProgramKey],
        progress: tqdm[NoReturn],
        options: Mapping[str, Any] | None = None,
    ) -> dict[ProgramKey, Callable[..., Any]]:
        """Return newly compiled functions.

        Args:
            options: options of the compiler.
        """
        # XLA releases the GIL while it compiles. Tracing does not benefit from threads.
        count = max(1, min(4, os.cpu_count() or 1))
        made: dict[ProgramKey, Callable[..., Any]] = {}
        afresh = compiled_afresh() if self._kept else nullcontext()
        with afresh, ThreadPoolExecutor(count) as threads:
            pending = {
                threads.submit(self._lower(name).compile, compiler_options=options): name
                for name in names
            }
            for future in as_completed(pending):
                made[pending[future]] = future.result()
                progress.update()
        return made

    def _compile_one(self, name: ProgramKey) -> Callable[..., Any]:
        function = self._made[name] = self._lower(name).compile()
        if self._kept:
            self._kept.write({name: function})
        return function

    def filtered(
        self,
        logits: jax.Array,
        allowed: np.ndarray | jax.Array,
        index: np.ndarray,
        numbers: np.ndarray,
        state: SamplerState,
    ) -> jax.Array:
        """Return the masks of a step without the tokens that filters remove.

        Args:
            logits: logits of the model [n, v].
            allowed: masks of the grammars [n, w].
            index, numbers: rows with filters; see `SlotTables.filtered`.
            state: state of the sampler.
        """
        rows = len(logits)
        masks = self._memory.replicated(jnp.asarray(allowed))
        for start in range(0, len(index), filters.ROWS):
            spare = max(start + filters.ROWS - len(index), 0)
            places = np.pad(index[start : start + filters.ROWS], (0, spare), constant_values=rows)
            part = np.pad(numbers[:, start : start + filters.ROWS], ((0, 0), (0, spare)))
            few = self["take", rows](logits, masks, places)
            masks = self["merge", rows](masks, places, self[FILTER](few[0], part, state, few[1]))
        return masks

    def load_all(self) -> None:
        """Wait until every function of an earlier process is loaded."""
        for name in self.missing() if self._loading is not None else ():
            self[name]

    def workspace_bytes(self) -> int:
        """Return the bytes that the largest step needs in addition to weights, pages and state."""
        largest = self._buckets.shapes[-1]
        analysis = self._lower(largest).compile().memory_analysis()
        if analysis is None:
            return 0
        logits = self._logits[largest.seqs]
        # The sampler has several arrays of float32 numbers for all tokens of the vocabulary.
        sampler = SAMPLER_ARRAYS * logits.size * 4
        kept = logits.size * logits.dtype.itemsize
        return kept + max(int(analysis.temp_size_in_bytes), sampler)

    def traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that `num_traces` counts its traces, with the kernels of the model."""

        def counted(*args: Any) -> Any:
            if self.background is None or not self.background.here:
                self.num_traces += 1
            with native.chosen_by(self._weights.model.config):
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
            self._keep_outputs(name, lowered.out_info)
        return lowered

    def _jitted(self, name: ProgramKey) -> Any:
        """Return the function with a name."""
        everywhere = self._memory.everywhere
        # Outputs that become inputs keep their sharding, so that the next step is not retraced.
        cache, state = jax.tree.map(lambda x: x.sharding, self._abstract_arrays()[:2])
        if isinstance(name, StepShape):
            return jax.jit(
                self.traced(self._make_step(name)),
                donate_argnums=1,
                out_shardings=(everywhere, everywhere, everywhere, cache),
            )
        if name == PUT:
            return jax.jit(self.traced(SamplerState.put), donate_argnums=0)
        if name == PLACE:
            kept = [leaf.sharding for leaf in self._weights.places]
            return jax.jit(self.traced(with_adapter), donate_argnums=0, out_shardings=kept)
        if name[0] == "sample":
            return jax.jit(
                self.traced(self._make_sample()),
                donate_argnums=0,
                out_shardings=(everywhere, state),
            )
        if name[0] == "pool":
            return jax.jit(self.traced(pool), out_shardings=(everywhere, everywhere))
        if name[0] == "score":
            return jax.jit(self.traced(self._make_score()))
        function = {"take": filters.take, "filter": filters.permitted, "merge": filters.merge}[
            name[0]
        ]
        return jax.jit(self.traced(function), out_shardings=everywhere)

    def _make_step(self, shape: StepShape) -> Callable[..., Any]:
        fields, generic = self._builder.fields(shape), self._buckets.generic

        def step(
            leaves: list[jax.Array],
            cache: Any,
            last: jax.Array,
            buffer: Any,
            encoded: jax.Array | None = None,
        ):
            inputs = fields.unpack(buffer)
            token_ids = inputs.token_ids
            slots = inputs.ragged.state_slots
            if shape.decodes:
                token_ids = read_last(last, token_ids[0], slots)[None]
            elif shape == generic:  # computes decode steps until their shapes are compiled
                of_token = slots.at[inputs.ragged.seq_of_token].get(mode="clip")
                token_ids = read_last(last, token_ids[0], of_token)[None]
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
            return out.logits, inputs.rows, out.last_hidden_state[0], out.past_key_values

        return step

    def _make_sample(self) -> Callable[..., Any]:
        def of_logits(state: SamplerState, logits: jax.Array, rows: jax.Array, allowed: jax.Array):
            sampled, state = sample(logits, SamplerRows.of(rows), state, self.max_logprobs, allowed)
            slots = rows[OF_STEP.index("state_slots")]
            return sampled.pack(), state.note(slots, sampled.tokens)

        return of_logits

    def _make_score(self) -> Callable[..., Any]:
        def of_prompt(leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array):
            return score(hidden, self._weights.merged(leaves).head(), targets, self.max_logprobs)

        return of_prompt

    # ---- arguments of the functions

    def _arguments(self, name: ProgramKey) -> tuple[Any, ...]:
        """Return the abstract arguments of a function."""
        weights, memory = self._weights, self._memory
        cache, state, sums = self._abstract_arrays()
        if name == PUT:
            line = np.zeros(self._guides.vocab_size)
            mu = np.float32(0)
            return state, np.int32(0), line.astype(np.float32), line.astype(np.int32), mu
        if name == PLACE:
            values = jax.tree.leaves(slot_values(cast(nnx.Module, weights.model), {}))
            return abstract(weights.places), np.int32(1), values
        if isinstance(name, StepShape):
            encoded = abstract(memory.encoded_of(self._builder.fields(name).featured))
            return weights.like, cache, state.last, self._builder.empty(name), *encoded
        kind, size = name
        if kind in ("sample", "take", "merge", "filter"):
            return self._arguments_of_sampling(kind, size, state)
        if size not in self._hidden:
            self._keep_outputs(self._buckets.pick(size, 1, prefill=True))
        hidden, of_token = self._hidden[size], np.zeros(size, np.int32)
        if kind == "score":
            return weights.like, hidden, of_token
        return hidden, of_token, np.zeros((memory.max_num_seqs, 4), np.int32), sums

    def _abstract_arrays(self) -> tuple[Any, Any, Any]:
        """Return the abstract pages, state and sums. The memory may be freed later."""
        if self._arrays is None:
            memory = self._memory
            assert memory.state is not None, "functions are compiled with memory"
            self._arrays = abstract((memory.cache, memory.state, memory.sums))
        return self._arrays

    def _arguments_of_sampling(self, kind: str, rows: int, state: SamplerState) -> tuple[Any, ...]:
        everywhere = self._memory.placement
        word = (words(self._guides.vocab_size),)

        def array(shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        if kind == "filter":
            logits = self._logits_of(self._buckets.shapes[0].seqs)
            few = array((rows, *logits.shape[1:]), logits.dtype)
            numbers = np.zeros((1 + len(OF_SAMPLING) + len(OF_FILTERS), rows), np.int32)
            return few, numbers, state, array((rows, *word))
        logits, allowed = self._logits_of(rows), abstract(self._guides.everything(rows))
        index = np.zeros(filters.ROWS, np.int32)
        if kind == "take":
            return logits, allowed, index
        if kind == "merge":
            return allowed, index, array((filters.ROWS, *word))
        return state, logits, array((len(OF_STEP), rows)), allowed

    def _logits_of(self, rows: int) -> jax.ShapeDtypeStruct:
        if rows not in self._logits:
            shape = next(shape for shape in self._buckets.shapes if shape.seqs == rows)
            self._keep_outputs(shape)
        return self._logits[rows]

    def _keep_outputs(self, shape: StepShape, outputs: Any = None) -> None:
        """Store the abstract outputs of a step for the functions that read them, because tracing a
        step takes a second."""
        if outputs is None:
            outputs = jax.eval_shape(self._make_step(shape), *self._arguments(shape))
        place = self._memory.placement
        logits, _, hidden = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in outputs[:3]
        )
        self._logits[shape.seqs], self._hidden[shape.tokens] = logits, hidden

    def _warm(self, name: ProgramKey) -> None:
        """Call a function with empty inputs, so that `jax.jit` compiles the function."""
        function, leaves, memory = self[name], self._weights.leaves, self._memory
        assert memory.state is not None, "functions are compiled with memory"
        arguments = self._arguments(name)
        if isinstance(name, StepShape):
            encoded = memory.encoded_of(self._builder.fields(name).featured)
            out = function(leaves, memory.cache, memory.state.last, arguments[3], *encoded)
            memory.cache = out[3]
        elif name == PUT:
            memory.state = function(memory.state, *arguments[1:])
        elif name == PLACE:
            self._weights.put(function(self._weights.places, *arguments[1:]))
        elif name[0] == "sample":
            _, memory.state = function(memory.state, *self._zeros(arguments[1:]))
        elif name == FILTER:
            few, numbers, _, allowed = arguments
            function(*self._zeros((few, numbers)), memory.state, self._zeros(allowed))
        elif name[0] in ("take", "merge"):
            function(*self._zeros(arguments))
        elif name[0] == "score":
            function(leaves, *self._zeros(arguments[1:]))
        else:
            function(*self._zeros(arguments[:3]), memory.sums)

    def _zeros(self, like: Any) -> Any:
        """Return arrays of zeros for abstract arrays. Arrays of numpy stay as they are."""
        place = self._memory.replicated
        return jax.tree.map(
            lambda x: x if isinstance(x, np.ndarray) else place(jnp.zeros(x.shape, x.dtype)), like
        )
