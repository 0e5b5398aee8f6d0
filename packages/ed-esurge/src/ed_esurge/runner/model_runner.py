"""The model on the device: one jitted step per shape, over flat leaves, with the pages donated.

Legend: T flat tokens, n sequence slots, l alternatives, d hidden, v vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from flax import nnx

from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import Request
from ed_esurge.runner.adjust import RowKeeper
from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, Shape
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.sampler import SamplerState, sample
from ed_esurge.runner.scoring import score

Progress = Callable[[int, int], None]


class ModelRunner:
    """Runs `StepPlan`s.

    Args:
        model: a causal language model; its leaves are used as they are (the caller chose the
            layout).
        buckets: the shapes.
        page_size, num_pages: of the pool.
        max_num_seqs: rows of the sampler's state.
        max_logprobs: alternatives that a step returns.
        ahead_of_time: call compiled executables, which take exactly one shape; False: call through
            `jax.jit`.
    """

    def __init__(
        self,
        model: Any,
        buckets: Buckets,
        *,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        max_logprobs: int,
        ahead_of_time: bool = True,
    ) -> None:
        self.buckets = buckets
        self.vocab_size = int(model.config.vocab_size)
        self.page_size, self.num_pages = page_size, num_pages
        self.max_num_seqs = max_num_seqs
        self.max_logprobs = min(max_logprobs, self.vocab_size)
        self.ahead_of_time = ahead_of_time
        self.num_traces = 0
        """How often a function of the device was traced: constant once everything is compiled."""
        self._model = model
        self._graphdef, state = nnx.split(model)
        self._leaves, self._treedef = jax.tree.flatten(state)
        self._mesh = model.mesh
        self._builder = BatchBuilder(
            page_size=page_size, num_pages=num_pages, num_slots=max_num_seqs
        )
        self._keeper = RowKeeper(self.vocab_size)
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._cache: Any = None
        self._state: Any = None
        self.allocate()

    # ---- memory

    def allocate(self) -> None:
        """Make empty pages and an empty sampler state."""
        self._cache = self._model.init_paged_cache(self.num_pages, self.page_size)
        self._state = self._replicated(SamplerState.create(self.max_num_seqs, self.vocab_size))
        self._keeper.forget()

    def free(self) -> None:
        """Give the pages and the sampler state back to the device."""
        for leaf in jax.tree.leaves((self._cache, self._state)):
            leaf.delete()
        self._cache = self._state = None

    def cache_bytes(self) -> int:
        """Bytes of all pages, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._cache))

    def state_bytes(self) -> int:
        """Bytes of the sampler's state on each device."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self._state))

    @property
    def allocated(self) -> bool:
        return self._cache is not None

    # ---- one step

    def run(self, plan: StepPlan, requests: Mapping[str, Request]) -> StepResult:
        """Start a step; the device works on while the caller goes on.

        Args:
            plan: its requests' pages hold all its tokens.
            requests: by id.
        """
        rows = [(row, requests[row.request_id]) for row in plan.rows]
        scored = any(wants_scores(request, row.start) for row, request in rows)
        shape = self.buckets.pick(plan.total, len(rows), prefill=scored)
        adjusted = set()
        for row, request in rows:
            if row.samples and self._keeper.applies(request):
                adjusted.add(row.request_id)
                update = self._keeper.update(request)
                if update is not None:
                    self._state = self._function("put")(self._state, *update)
        buffer = self._builder.build(plan, requests, shape, frozenset(adjusted))
        packed, hidden, self._cache, self._state = self._function(shape)(
            self._leaves, self._cache, self._state, buffer
        )
        scores = None
        if scored:
            targets = np.zeros(shape.tokens, np.int32)
            at = 0
            for row, request in rows:
                following = request.prompt[row.start + 1 : row.start + 1 + row.count]
                targets[at : at + len(following)] = following
                at += row.count
            scores = self._function(("score", shape.tokens))(self._leaves, hidden, targets)
        for row, request in rows:
            if row.request_id in adjusted:
                self._keeper.sampled(request)
        return StepResult(plan, packed, scores)

    # ---- weights

    def replace_weights(self, new: Any) -> None:
        """Serve other weights of the same architecture, without compiling anything.

        Args:
            new: a module (in any layout), or a state with the leaves of this one.

        Raises:
            ConfigError: structure or a shape differs.
        """
        if isinstance(new, nnx.Module):
            layout: Any = self._model.layout
            module: Any = new
            new = nnx.state(module if module.layout == layout else module.to_layout(layout))
        leaves, treedef = jax.tree.flatten(new)
        if treedef != self._treedef:
            raise ConfigError(
                "the new weights have another structure than the served model: give a module of "
                f"the same config, or a state with its {len(self._leaves)} leaves "
                f"(got {len(leaves)})"
            )
        for old, leaf in zip(self._leaves, leaves, strict=True):
            if old.shape != leaf.shape:
                raise ConfigError(f"a new weight has shape {leaf.shape}, the served {old.shape}")
        self._leaves = [
            jax.device_put(jnp.asarray(leaf, old.dtype), old.sharding)
            for old, leaf in zip(self._leaves, leaves, strict=True)
        ]

    # ---- compilation

    def compile_all(self, progress: Progress | None = None) -> None:
        """Compile every function that serving can need.

        Args:
            progress: called with how many are ready, and how many there are.
        """
        names: list[Any] = [*self.buckets.shapes, "put"]
        names += [("score", tokens) for tokens in self.buckets.prefill_tokens]
        names = [name for name in names if name not in self._functions]
        report = progress or (lambda done, of: None)
        if not self.ahead_of_time:
            for done, name in enumerate(names):
                report(done, len(names))
                self._warm(name)
            report(len(names), len(names))
            return
        # XLA compiles without holding the interpreter; tracing does not profit from threads.
        with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
            report(0, len(names))
            pending = {pool.submit(self._lower(name).compile): name for name in names}
            for done, future in enumerate(as_completed(pending)):
                self._functions[pending[future]] = future.result()
                report(done + 1, len(names))

    def workspace_bytes(self) -> int:
        """Device memory that the largest step needs besides weights, pages and state."""
        compiled = self._lower(self.buckets.shapes[-1]).compile()
        analysis = compiled.memory_analysis()
        if analysis is None:
            return 0
        return int(analysis.temp_size_in_bytes)

    def _function(self, name: Any) -> Callable[..., Any]:
        if name not in self._functions:
            lowered = self._lower(name) if self.ahead_of_time else None
            self._functions[name] = lowered.compile() if lowered else self._jitted(name)
        return self._functions[name]

    def _jitted(self, name: Any) -> Any:
        """The function called `name`: a shape's step, ("score", T), or "put"."""
        if name == "put":
            return jax.jit(self._traced(SamplerState.put), donate_argnums=0)
        if isinstance(name, Shape):
            # Outputs lie like the inputs they become, else the next step would not be the same.
            kept = jax.tree.map(lambda x: x.sharding, (self._cache, self._state))
            everywhere = self._everywhere()
            return jax.jit(
                self._traced(self._make_step(name)),
                donate_argnums=(1, 2),
                out_shardings=(everywhere, everywhere, *kept),
            )
        return jax.jit(self._traced(self._make_score()))

    def _make_step(self, shape: Shape) -> Callable[..., Any]:
        graphdef, treedef, count = self._graphdef, self._treedef, self.max_logprobs
        fields = self._builder.fields(shape)

        def step(leaves: list[jax.Array], cache: Any, state: SamplerState, buffer: jax.Array):
            model: Any = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            given = fields.unpack(buffer)
            out = model(
                given.token_ids,
                past_key_values=cache,
                ragged=given.ragged,
                logits_at=given.logits_at,
            )
            sampled, state = sample(out.logits, given.rows, state, count)
            return sampled.pack(), out.last_hidden_state[0], out.past_key_values, state

        return step

    def _make_score(self) -> Callable[..., Any]:
        graphdef, treedef, count = self._graphdef, self._treedef, self.max_logprobs

        def of_prompt(leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array):
            model: Any = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
            return score(hidden, model.lm_head_weight(), targets, count)

        return of_prompt

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return function(*args)

        return counted

    def _arguments(self, name: Any) -> tuple[Any, ...]:
        """Abstract arguments of a function."""
        cache, state = abstract((self._cache, self._state))
        leaves = abstract(self._leaves)
        if name == "put":
            row = np.zeros(self.vocab_size)
            return state, np.int32(0), row.astype(np.float32), row.astype(np.int32)
        if isinstance(name, Shape):
            return leaves, cache, state, self._builder.empty(name)
        tokens = name[1]
        shape = self.buckets.pick(tokens, 1, prefill=True)
        step = jax.eval_shape(self._make_step(shape), *self._arguments(shape))
        hidden = jax.ShapeDtypeStruct(step[1].shape, step[1].dtype, sharding=self._everywhere())
        return leaves, hidden, np.zeros(tokens, np.int32)

    def _lower(self, name: Any) -> Any:
        return self._jitted(name).lower(*self._arguments(name))

    def _warm(self, name: Any) -> None:
        """Run a function on nothing, so that `jax.jit` has compiled it."""
        function = self._function(name)
        if name == "put":
            self._state = function(self._state, *self._arguments(name)[1:])
        elif isinstance(name, Shape):
            out = function(self._leaves, self._cache, self._state, self._builder.empty(name))
            self._cache, self._state = out[2:]
        else:
            _, hidden, targets = self._arguments(name)
            empty = self._replicated(jnp.zeros(hidden.shape, hidden.dtype))
            function(self._leaves, empty, targets)

    def _everywhere(self) -> jax.sharding.Sharding | None:
        if self._mesh.size == 1:
            return None
        return jax.sharding.NamedSharding(self._mesh, jax.sharding.PartitionSpec())

    def _replicated(self, tree: Any) -> Any:
        sharding = self._everywhere()
        return tree if sharding is None else jax.device_put(tree, sharding)


def wants_scores(request: Request, start: int) -> bool:
    """Whether a step from position `start` on passes prompt tokens that want log-probabilities."""
    return request.params.prompt_logprobs is not None and start < len(request.prompt) - 1


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and shardings of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
