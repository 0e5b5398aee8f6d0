"""The compiled functions: a step of each shape and its companions, created once.

`ed_esurge.runner.uncompiled` contains their code. Legend: n rows, v vocabulary, w words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.compilation.cache import compiled_afresh, programs_folder
from ed_infra.compilation.programs import Programs
from ed_layers.cache import Cache
from ed_layers.programs import open_programs
from tqdm import tqdm

from ed_esurge.core.plan import StateCopies
from ed_esurge.model import get_platform
from ed_esurge.runner import filters
from ed_esurge.runner.background import COMPILERS, BackgroundCompilation
from ed_esurge.runner.buckets import StepShape
from ed_esurge.runner.host_pages import PAGES_AT_ONCE
from ed_esurge.runner.sampler_rows import SamplerState
from ed_esurge.runner.uncompiled import (
    COPY,
    FILTER,
    PLACE,
    PUT,
    STATES,
    ProgramKey,
    UncompiledFunctions,
)

#: Options of XLA for functions that are replaced soon: half the time of the default level.
FIRST_OPTIONS = {"xla_backend_optimization_level": 0}
#: Packages whose sources determine the functions.
SERVING_PACKAGES = ("ed_infra", "ed_layers", "ed_models", "ed_esurge")
#: Number of arrays [n, v] of the sampler at the same time.
SAMPLER_ARRAYS = 6


class Functions:
    """Table of compiled functions by name. Missing functions are created on access.

    Args:
        uncompiled: the functions before they are compiled.
        ahead_of_time: whether to call compiled executables, which accept exactly one shape. False
            calls through `jax.jit`.
    """

    def __init__(self, uncompiled: UncompiledFunctions, *, ahead_of_time: bool) -> None:
        self._uncompiled, self._ahead_of_time = uncompiled, ahead_of_time
        self._weights, self._memory = uncompiled.weights, uncompiled.memory
        self._buckets = uncompiled.buckets
        self._made: dict[ProgramKey, Callable[..., Any]] = {}
        self.background: BackgroundCompilation[ProgramKey] | None = None
        # Functions of an earlier process are loaded while memory is allocated.
        self._kept = self._programs()
        stored = self._kept.filter_stored(self._by_use()) if self._kept else []
        self._loading = self._kept.loading(stored) if self._kept and stored else None

    def __getitem__(self, name: ProgramKey) -> Callable[..., Any]:
        if name not in self._made:
            coming = self.background.take(name) if self.background is not None else None
            if name not in self._made:  # the thread may have compiled the function just now
                self._made[name] = coming or self._load_function(name) or self._make(name)
        return self._made[name]

    def lower(self, name: ProgramKey) -> Any:
        """Trace a function and return it, ready to compile."""
        return self._uncompiled.lower(name)

    @property
    def num_traces(self) -> int:
        """Number of traces outside the background thread, which is constant after the engine is
        ready."""
        return self._uncompiled.num_traces

    def missing(self) -> list[ProgramKey]:
        """Return the names of the missing functions, in the order in which they are needed."""
        buckets = self._buckets
        first = buckets.prefill[0]
        names: list[ProgramKey] = [first, *(shape for shape in buckets.shapes if shape != first)]
        names += [PUT, PLACE, FILTER] if self._weights.places else [PUT, FILTER]
        names += [COPY] if self._memory.num_pages else []
        names += [STATES] if self._memory.num_states is not None else []
        for rows in sorted({shape.seqs for shape in buckets.shapes}):
            names += [("sample", rows), ("take", rows), ("merge", rows)]
        if buckets.steps > 1:
            names += [("decode", shape.seqs) for shape in buckets.decode]
        if self._uncompiled.most_drafts:
            names += [("draft", shape.seqs) for shape in buckets.decode]
        for tokens in buckets.prefill_tokens:
            names += [("score", tokens), ("pool", tokens)]
        return [name for name in names if name not in self._made]

    def _by_use(self) -> list[ProgramKey]:
        """Return the missing functions in the order in which requests probably use them: a short
        prompt, a single sequence, and larger steps."""
        first = self._buckets.prefill[0]
        order: list[ProgramKey] = []
        for shape in (first, *self._buckets.shapes):
            order += [shape, ("sample", shape.seqs)]
        missing = self.missing()
        missing_set = set(missing)
        return [*dict.fromkeys(name for name in (*order, *missing) if name in missing_set)]

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all functions for serving and update the progress bar. Functions of an earlier
        process are loaded instead, each before its first use."""
        names = self._new(self.missing())
        progress.reset(len(names))
        if not self._ahead_of_time:
            for name in names:
                self._warm(name)
                progress.update()
            return
        self._made |= (compiled_functions := self._compile(names, progress))
        if self._kept and compiled_functions:
            self._kept.write(compiled_functions)

    def compile_first(self, progress: tqdm[NoReturn]) -> None:
        """Compile the functions of the generic shape, and the others in a background thread.

        Functions of an earlier process are loaded instead. An engine whose results must not depend
        on time (`batch_invariant`) compiles all functions.
        """
        names = self._new(self._by_need())
        if not names or not self._ahead_of_time or self._buckets.invariant:
            self.compile_all(progress)
            return
        generic = self._buckets.generic
        first = self._new([generic, ("sample", generic.seqs)])
        # The functions that the background has not compiled when they are used.
        stored = self._kept.quickly_compiled if self._kept else None
        quick = self._quickly_loaded(stored, first, progress)
        options = FIRST_OPTIONS if get_platform(self._weights.model) == "cpu" else None
        compiled_functions = {} if quick else self._compile(first, progress, options)
        self._made |= quick or compiled_functions

        @contextmanager
        def background_work() -> Iterator[None]:
            # The engine is ready before its functions are written.
            if stored and compiled_functions:
                stored.write(compiled_functions)
            with compiled_afresh() if self._kept else nullcontext():
                yield

        background = BackgroundCompilation(names, self._compile_one, background_work)
        self.background, self._uncompiled.uncounted = background, lambda: background.here

    def _new(self, names: list[ProgramKey]) -> list[ProgramKey]:
        """Return the names of the functions that no earlier process has stored."""
        loading = self._loading
        return [name for name in names if loading is None or name not in loading]

    @staticmethod
    def _quickly_loaded(
        stored: Programs[ProgramKey] | None, names: list[ProgramKey], progress: tqdm[NoReturn]
    ) -> dict[ProgramKey, Callable[..., Any]]:
        """Return the functions that an earlier process compiled quickly; {} if one is missing."""
        progress.reset(len(names))
        loading = stored.loading(names) if stored else None
        if loading is not None:
            with suppress(Exception):  # the backend reads less than it writes
                return {name: loading.take(name) for name in names}
        return {}

    def _by_need(self) -> list[ProgramKey]:
        """Return all functions: the small ones that the generic shape may need, the shape of one
        sequence, and the other shapes."""
        generic, names = self._buckets.generic, self.missing()
        small: list[ProgramKey] = [(kind, generic.seqs) for kind in ("take", "merge")]
        small += [(kind, generic.tokens) for kind in ("score", "pool")]
        first, *remaining_shapes = self._buckets.shapes
        order = [PUT, PLACE, COPY, STATES, *small, first, ("sample", first.seqs), FILTER]
        for shape in remaining_shapes:
            order += [shape, ("sample", shape.seqs)]
        missing_set = set(names)
        return [*dict.fromkeys(name for name in (*order, *names) if name in missing_set)]

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
        compiled_functions: dict[ProgramKey, Callable[..., Any]] = {}
        afresh = compiled_afresh() if self._kept else nullcontext()
        with afresh, ThreadPoolExecutor(COMPILERS) as threads:
            pending = {
                threads.submit(self._uncompiled.lower(name).compile, compiler_options=options): name
                for name in names
            }
            for future in as_completed(pending):
                compiled_functions[pending[future]] = future.result()
                progress.update()
        return compiled_functions

    def _compile_one(self, name: ProgramKey) -> Callable[..., Any]:
        if self._kept and self._kept.filter_stored([name]):  # another engine was faster
            loading = self._kept.loading([name])
            if loading is not None:
                function = self._made[name] = loading.take(name)
                return function
        function = self._made[name] = self._uncompiled.lower(name).compile()
        if self._kept:
            self._kept.write({name: function})
        return function

    def with_copies(self, cache: Cache, copies: Mapping[str, Sequence[tuple[int, int]]]) -> Cache:
        """Return the cache with copies of pages.

        Args:
            cache: the cache, which is donated.
            copies: group -> (source, target) of each copy.
        """
        most = max(map(len, copies.values()))
        for start in range(0, most, PAGES_AT_ONCE):
            numbers = self._uncompiled.numbers_of_copies()
            for group, pairs in copies.items():
                part = [*pairs[start : start + PAGES_AT_ONCE]]
                if part:
                    part += part[:1] * (PAGES_AT_ONCE - len(part))
                    numbers[group] = np.array(part, np.int32).T.copy()
            cache = self[COPY](cache, numbers)
        return cache

    def with_state_copies(self, cache: Cache, copies: StateCopies) -> Cache:
        """Return the cache with copies of recurrent states, which are executed in their order.

        Args:
            cache: the cache, which is donated.
            copies: (source, target) of each copy, at most one for each slot of a sequence.
        """
        return self[STATES](cache, *self._uncompiled.numbers_of_state_copies(copies))

    def filter_masks(
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
            index, numbers: rows with filters; see `SlotTables.filter_masks`.
            state: state of the sampler.
        """
        rows = len(logits)
        masks = self._memory.replicate_arrays(jnp.asarray(allowed))
        for start in range(0, len(index), filters.FILTER_ROWS):
            padding = max(start + filters.FILTER_ROWS - len(index), 0)
            places = np.pad(
                index[start : start + filters.FILTER_ROWS], (0, padding), constant_values=rows
            )
            part = np.pad(numbers[:, start : start + filters.FILTER_ROWS], ((0, 0), (0, padding)))
            few = self["take", rows](logits, masks, places)
            masks = self["merge", rows](masks, places, self[FILTER](few[0], part, state, few[1]))
        return masks

    def load_all(self) -> None:
        """Wait until every function of an earlier process is loaded."""
        for name in self.missing():
            if self._loading is not None and name in self._loading:
                self[name]

    def workspace_bytes(self) -> int:
        """Return the bytes that the largest step needs in addition to weights, pages and state."""
        largest = self._buckets.shapes[-1]
        analysis = self._uncompiled.lower(largest).compile().memory_analysis()
        if analysis is None:
            return 0
        logits = self._uncompiled.logits[largest.seqs]
        # The sampler has several arrays of float32 numbers for all tokens of the vocabulary.
        sampler = SAMPLER_ARRAYS * logits.size * 4
        logits_bytes = logits.size * logits.dtype.itemsize
        return logits_bytes + max(int(analysis.temp_size_in_bytes), sampler)

    # ---- functions of an earlier process

    def _programs(self) -> Programs[ProgramKey] | None:
        """Return the files of compiled functions that processes share."""
        if not self._ahead_of_time or jax.process_count() > 1:
            return None
        memory, weights = self._memory, self._weights
        sizes = (memory.page_size, memory.num_pages, memory.max_num_seqs)
        sizes = (*sizes, self._uncompiled.max_logprobs)
        sizes = (*sizes, self._uncompiled.records) if any(self._uncompiled.records) else sizes
        sizes = sizes if memory.num_states is None else (*sizes, ("states", memory.num_states))
        sizes = (*sizes, "second states") if memory.second_states else sizes
        drafts = self._uncompiled.most_drafts
        sizes = (*sizes, ("drafts", drafts)) if drafts else sizes
        encoder = memory.encoder_rows or memory.encoder_length
        sizes = (*sizes, encoder) if encoder else sizes
        parts = (weights.graphdefs, weights.like, self._buckets, sizes)
        home = programs_folder("engines")
        return open_programs(weights.model.config, home, parts, SERVING_PACKAGES)

    def _load_function(self, name: ProgramKey) -> Callable[..., Any] | None:
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
        if self._ahead_of_time:
            return self._uncompiled.lower(name).compile()
        return self._uncompiled.jit_function(name)

    def _warm(self, name: ProgramKey) -> None:
        """Call a function with empty inputs, so that `jax.jit` compiles the function."""
        function, leaves, memory = self[name], self._weights.leaves, self._memory
        assert memory.state is not None, "functions are compiled with memory"
        arguments = self._uncompiled.arguments(name)
        if isinstance(name, StepShape):
            encoded = memory.get_encoder_outputs(self._uncompiled.builder.fields(name).featured)
            out = function(leaves, memory.cache, memory.state.last, arguments[3], *encoded)
            memory.cache = out[3]
        elif name == PUT:
            memory.state = function(memory.state, *arguments[1:])
        elif name in (COPY, STATES):
            memory.cache = function(memory.cache, *arguments[1:])
        elif name == PLACE:
            self._weights.put(function(self._weights.places, *arguments[1:]))
        elif name[0] == "decode":
            last = memory.state.last
            _, memory.cache, last = function(leaves, memory.cache, last, arguments[3])
            memory.state = replace(memory.state, last=last)
        elif name[0] == "draft":
            shape = self._buckets.get_decode_shape(name[1])
            encoded = memory.get_encoder_outputs(self._uncompiled.builder.fields(shape).featured)
            _, memory.cache = function(leaves, memory.cache, *arguments[2:4], *encoded)
        elif name[0] == "sample":
            _, memory.state, _ = function(memory.state, *self._zeros(arguments[1:]))
        elif name == FILTER:
            few, numbers, _, allowed = arguments
            function(*self._zeros((few, numbers)), memory.state, self._zeros(allowed))
        elif name[0] in ("take", "merge"):
            function(*self._zeros(arguments))
        elif name[0] == "score":
            function(leaves, *self._zeros(arguments[1:]))
        else:
            function(*self._zeros(arguments[:3]), memory.sums)

    def _zeros(self, like: object) -> Any:
        """Return arrays of zeros for abstract arrays. Arrays of numpy stay as they are."""
        place = self._memory.replicate_arrays
        return jax.tree.map(
            lambda x: x if isinstance(x, np.ndarray) else place(jnp.zeros(x.shape, x.dtype)), like
        )
