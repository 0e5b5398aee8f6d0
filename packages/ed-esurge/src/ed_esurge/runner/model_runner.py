"""The model on the device: one jitted step per shape, over flat leaves, with the pages donated.

Legend: T flat tokens, n rows, m slots, l alternatives, d hidden, v vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.compile_cache import compiled_afresh
from ed_layers.cache import Cache, HybridCache, PagedCache
from ed_models.adapter_slots import slot_values
from ed_models.adapter_values import Adapter
from ed_models.protocol import LanguageModel
from flax import nnx
from tqdm import tqdm

from ed_esurge.core.plan import StepPlan
from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, Shape
from ed_esurge.runner.guides import Grammars, Guides
from ed_esurge.runner.hidden import pool, score
from ed_esurge.runner.host_pages import HostMemory
from ed_esurge.runner.programs import Programs
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.sampler import SamplerState, sample
from ed_esurge.runner.slots import Slots
from ed_esurge.runner.weights import Weights, abstract, with_adapter

Tree = TypeVar("Tree")

# A function of the device: the step of a shape; ("score", T) and ("pool", T), which read a step's
# hidden states; ("put", 0), which writes a line of the sampler's state; ("place", 0), an adapter.
Name = Shape | tuple[str, int]
PUT: Name = ("put", 0)
PLACE: Name = ("place", 0)


class ModelRunner:
    """Runs `StepPlan`s: all that it needs to know comes with them.

    Args:
        model: its leaves are used as they are (the caller chose the layout).
        buckets: the shapes.
        page_size: tokens of a page.
        num_pages: pages of each group's pool.
        max_num_seqs: sequences that run at once: slots of the sampler's state and of recurrent
            states.
        max_logprobs: alternatives that a step returns.
        ahead_of_time: call compiled executables, which take exactly one shape; False: call through
            `jax.jit`.
        grammars: of structured outputs; None: there are none.
        host_places: pages of each group that host memory holds.
    """

    def __init__(
        self,
        model: LanguageModel,
        buckets: Buckets,
        *,
        page_size: int,
        num_pages: dict[str, int],
        max_num_seqs: int,
        max_logprobs: int,
        ahead_of_time: bool = True,
        grammars: Grammars | None = None,
        host_places: int = 0,
    ) -> None:
        self.buckets = buckets
        self.vocab_size = cast(int, model.config.vocab_size)
        self.page_size, self.num_pages = page_size, num_pages
        self.max_num_seqs = max_num_seqs
        self.max_logprobs = min(max_logprobs, self.vocab_size)
        self.ahead_of_time = ahead_of_time
        self.num_traces = 0
        """How often a function of the device was traced: constant once everything is compiled."""
        self.weights = Weights(model)
        self.model = self.weights.model
        self._mesh = model.config.mesh
        self._slots = Slots(
            max_num_seqs,
            tuple(num_pages),
            pages=buckets.shapes[-1].pages,
            vocab_size=self.vocab_size,
            guides=Guides(grammars, max_num_seqs, self.vocab_size, self._replicated),
        )
        self._builder = BatchBuilder(
            self._slots, page_size=page_size, num_pages=num_pages, apart=buckets.invariant
        )
        self._functions: dict[Name, Callable[..., Any]] = {}
        # Functions of an earlier process are loaded while memory is made here.
        self._kept = self._programs()
        self._loading = self._kept.loading(self._names()) if self._kept else None
        self._hidden: dict[int, jax.ShapeDtypeStruct] = {}  # by T
        self._cache: Cache | None = None
        self._state: SamplerState | None = None
        self._sums: jax.Array | None = None
        cache = self.allocate()
        self.host = HostMemory(cache, host_places, self._traced) if host_places else None

    # ---- memory

    def allocate(self) -> Cache:
        """Make empty pages and states."""
        sizes = [*self.num_pages.values()]
        # One pool needs no names: a cache of one kind is simpler than a hybrid one.
        pages = sizes[0] if len(sizes) == 1 else self.num_pages
        # A mesh of one device does not say where its arrays lie.
        with jax.default_device(self._mesh.local_devices[0]):
            cache = self.model.init_paged_cache(pages, self.page_size, num_states=self.max_num_seqs)
        # Committed there, as a step's outputs are: jit traces again for one that is not.
        self._cache = cache if self._mesh.size > 1 else self._replicated(cache)
        self._state = self._replicated(SamplerState.create(self.max_num_seqs, self.vocab_size))
        width = cast(int, self.model.config.hidden_size)
        self._sums = self._replicated(jnp.zeros((self.max_num_seqs, width), jnp.float32))
        self._slots.forget_lines()
        return self._cache

    def free(self) -> None:
        """Give the pages and states back to the device."""
        for leaf in jax.tree.leaves((self._cache, self._state, self._sums)):
            leaf.delete()
        self._cache = self._state = self._sums = None

    def cache_bytes(self) -> int:
        """Bytes of all pages and recurrent states, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    def state_bytes(self) -> int:
        """Bytes that sequences take besides pages, on each device."""
        parts = list(self._cache.caches.values()) if isinstance(self._cache, HybridCache) else []
        recurrent = [part for part in parts if not isinstance(part, PagedCache)]
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self._state, self._sums, recurrent)))

    @property
    def allocated(self) -> bool:
        return self._cache is not None

    # ---- one step

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step; the device works on while the caller goes on.

        Args:
            plan: the one after the last that was run.

        Raises:
            EasyDeLError: there are no weights to run with.
            RequestError: one sequence cannot be prepared; nothing was computed, and all of the
                plan's sequences must start anew.
        """
        leaves, slots = self.weights.leaves, self._slots
        adjusted = slots.take(plan)
        if self.host is not None and self._cache is not None:
            self._cache = self.host.move(self._cache, plan.moves)
        for _, _, line in adjusted:
            if line is not None:
                self._state = self._function(PUT)(self._state, *line)
        scored = True in [row.scores for row in plan.rows]
        pooled = True in [row.pools for row in plan.rows]
        lines = plan.total if self.buckets.invariant else plan.lines
        shape = self.buckets.pick(plan.total, lines, prefill=scored or pooled)
        buffer, places = self._builder.build(plan, shape)
        packed, hidden, self._cache, self._state = self._function(shape)(
            leaves, self._cache, self._state, buffer, slots.guides.allowed(plan, places, shape.seqs)
        )
        for adjustment, count, _ in adjusted:
            adjustment.sampled(count)
        scores = vectors = None
        if scored:
            targets = np.zeros(shape.tokens, np.int32)
            at = 0
            for row in plan.rows:
                if row.scores:
                    following = slots.following(row)
                    targets[at : at + len(following)] = following
                at += len(row.token_ids)
            scores = self._function(("score", shape.tokens))(leaves, hidden, targets)
        if pooled:
            vectors, self._sums = self._function(("pool", shape.tokens))(
                hidden, *slots.pooling(plan.rows, shape.tokens), self._sums
            )
        return StepResult(plan, packed, places, scores, vectors)

    # ---- adapters

    def load_adapter(self, number: int, place: int, adapter: Adapter) -> None:
        """Write a LoRA adapter to its place; sequences that begin with its number use it.

        Raises:
            ConfigError: it does not fit the places; nothing was written.
        """
        values = jax.tree.leaves(slot_values(cast(nnx.Module, self.model), adapter))
        write = self._function(PLACE)
        self.weights.put(write(self.weights.places, np.int32(place), values))
        self._slots.adapter_places[number] = place

    # ---- compilation

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile every function that serving can need, and show how many are ready."""
        names = self._names()
        progress.reset(len(names))
        if self.host is not None:
            self.host.compile()
        if not self.ahead_of_time:
            for name in names:
                self._warm(name)
                progress.update()
            return
        if self._loading is not None:  # each is there when a step first wants it
            progress.update(len(names))
            return
        # XLA compiles without holding the interpreter; tracing does not profit from threads.
        count, kept = max(1, min(4, os.cpu_count() or 1)), self._kept
        with compiled_afresh() if kept else nullcontext(), ThreadPoolExecutor(count) as threads:
            pending = {threads.submit(self._lower(name).compile): name for name in names}
            for future in as_completed(pending):
                self._functions[pending[future]] = future.result()
                progress.update()
        if kept:
            kept.write({name: self._functions[name] for name in names})

    def load_all(self) -> None:
        """Wait until every function of an earlier process is loaded."""
        for name in self._names() if self._loading is not None else ():
            self._function(name)

    def _names(self) -> list[Name]:
        """Every function that is not there yet, those that are needed first in front."""
        first = self.buckets.prefill[0]
        names: list[Name] = [first, *(shape for shape in self.buckets.shapes if shape != first)]
        names += [PUT, PLACE] if self.weights.places else [PUT]
        for tokens in self.buckets.prefill_tokens:
            names += [("score", tokens), ("pool", tokens)]
        return [name for name in names if name not in self._functions]

    def _programs(self) -> Programs[Name] | None:
        """What an earlier process has compiled, or a later one will want."""
        if not self.ahead_of_time:
            return None
        sizes = (self.page_size, self.num_pages, self.max_num_seqs, self.max_logprobs)
        parts = (self.weights.graphdefs, self.weights.like, self.buckets, sizes)
        return Programs.of(self.model, *parts)

    def workspace_bytes(self) -> int:
        """Device memory that the largest step needs besides weights, pages and state."""
        compiled = self._lower(self.buckets.shapes[-1]).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            return 0
        return int(analysis.temp_size_in_bytes)

    def _function(self, name: Name) -> Callable[..., Any]:
        if name not in self._functions:
            self._functions[name] = self._loaded(name) or self._made(name)
        return self._functions[name]

    def _loaded(self, name: Name) -> Callable[..., Any] | None:
        """The function of an earlier process; None where there is none."""
        if self._loading is None or name not in self._loading:
            return None
        try:
            return self._loading.take(name)
        except Exception as error:  # the backend reads less than it writes
            if self._kept is not None:
                self._kept.give_up(error)
            return None

    def _made(self, name: Name) -> Callable[..., Any]:
        return self._lower(name).compile() if self.ahead_of_time else self._jitted(name)

    def _jitted(self, name: Name) -> Any:
        """The function of that name."""
        everywhere = self._everywhere()
        if name == PUT:
            return jax.jit(self._traced(SamplerState.put), donate_argnums=0)
        if name == PLACE:
            kept = [leaf.sharding for leaf in self.weights.places]
            return jax.jit(self._traced(with_adapter), donate_argnums=0, out_shardings=kept)
        if isinstance(name, Shape):
            # Outputs are sharded like the inputs that they become, or the next step would differ.
            kept = jax.tree.map(lambda x: x.sharding, (self._cache, self._state))
            return jax.jit(
                self._traced(self._make_step(name)),
                donate_argnums=(1, 2),
                out_shardings=(everywhere, everywhere, *kept),
            )
        if name[0] == "pool":
            return jax.jit(self._traced(pool), out_shardings=(everywhere, everywhere))
        return jax.jit(self._traced(self._make_score()))

    def _make_step(self, shape: Shape) -> Callable[..., Any]:
        fields, count = self._builder.fields(shape), self.max_logprobs

        def step(leaves: list[jax.Array], cache: Any, state: Any, buffer: Any, allowed: Any):
            inputs = fields.unpack(buffer)
            token_ids, slots = inputs.token_ids, inputs.ragged.state_slots
            if shape.decodes:
                token_ids = state.read(token_ids[0], slots)[None]
            out = self.weights.merged(leaves)(
                token_ids,
                past_key_values=cache,
                ragged=inputs.ragged,
                logits_at=inputs.logits_at,
            )
            assert out.logits is not None
            assert out.last_hidden_state is not None
            sampled, state = sample(out.logits, inputs.rows, state, count, allowed)
            state = state.note(slots, sampled.tokens)
            return sampled.pack(), out.last_hidden_state[0], out.past_key_values, state

        return step

    def _make_score(self) -> Callable[..., Any]:
        def of_prompt(leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array):
            return score(hidden, self.weights.merged(leaves).head(), targets, self.max_logprobs)

        return of_prompt

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return function(*args)

        return counted

    def _arguments(self, name: Name) -> tuple[Any, ...]:
        """Abstract arguments of a function."""
        cache, state, sums = abstract((self._cache, self._state, self._sums))
        if name == PUT:
            line = np.zeros(self.vocab_size)
            return state, np.int32(0), line.astype(np.float32), line.astype(np.int32)
        if name == PLACE:
            values = jax.tree.leaves(slot_values(cast(nnx.Module, self.model), {}))
            return abstract(self.weights.places), np.int32(1), values
        if isinstance(name, Shape):
            allowed = abstract(self._slots.guides.everything(name.seqs))
            return self.weights.like, cache, state, self._builder.empty(name), allowed
        kind, tokens = name
        if tokens not in self._hidden:
            shape = self.buckets.pick(tokens, 1, prefill=True)
            step = self._make_step(shape)
            self._keep_hidden(shape, jax.eval_shape(step, *self._arguments(shape)))
        hidden, of_token = self._hidden[tokens], np.zeros(tokens, np.int32)
        if kind == "score":
            return self.weights.like, hidden, of_token
        return hidden, of_token, np.zeros((self.max_num_seqs, 4), np.int32), sums

    def _lower(self, name: Name) -> Any:
        lowered = self._jitted(name).lower(*self._arguments(name))
        if isinstance(name, Shape):
            self._keep_hidden(name, lowered.out_info)
        return lowered

    def _keep_hidden(self, shape: Shape, outputs: Any) -> None:
        """Note what a step hands to `score` and `pool`: tracing a step costs a second."""
        hidden = outputs[1]
        self._hidden[shape.tokens] = jax.ShapeDtypeStruct(
            hidden.shape, hidden.dtype, sharding=self._everywhere()
        )

    def _warm(self, name: Name) -> None:
        """Run a function on nothing, so that `jax.jit` has compiled it."""
        function, leaves = self._function(name), self.weights.leaves
        if isinstance(name, Shape):
            allowed = self._slots.guides.everything(name.seqs)
            empty = self._builder.empty(name)
            out = function(leaves, self._cache, self._state, empty, allowed)
            self._cache, self._state = out[2:]
        elif name == PUT:
            self._state = function(self._state, *self._arguments(name)[1:])
        elif name == PLACE:
            self.weights.put(function(self.weights.places, *self._arguments(name)[1:]))
        elif name[0] == "score":
            _, hidden, targets = self._arguments(name)
            function(leaves, self._zeros(hidden), targets)
        else:
            hidden, of_token, rows, _ = self._arguments(name)
            function(self._zeros(hidden), of_token, rows, self._sums)

    def _zeros(self, like: jax.ShapeDtypeStruct) -> jax.Array:
        return self._replicated(jnp.zeros(like.shape, like.dtype))

    def _everywhere(self) -> jax.sharding.Sharding | None:
        if self._mesh.size == 1:
            return None
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def _replicated(self, tree: Tree) -> Tree:
        return jax.device_put(tree, self._everywhere() or self._mesh.devices.flat[0])
