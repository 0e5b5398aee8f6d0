"""The functions of an engine before they are compiled: code, shardings, abstract arguments.

They accept flat leaves and donate the pages. A step computes logits, and a second function samples.
Shapes with the same number of rows share the second function, which needs longer to compile than a
step of most models. Legend: T flat tokens, n rows, m slots, v vocabulary, w words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.inputs import Features
from ed_layers import native
from ed_layers.cache.protocol import Cache
from ed_models.adapters.slots import slot_values
from flax import nnx

from ed_esurge.config import NOTHING, Records
from ed_esurge.core.plan import StateCopies
from ed_esurge.model import get_platform
from ed_esurge.runner import filters
from ed_esurge.runner.batch import BatchBuilder, StepInput
from ed_esurge.runner.buckets import Buckets, StepShape
from ed_esurge.runner.guides import Guides, words
from ed_esurge.runner.hidden_states import pool_states, score_states
from ed_esurge.runner.host_pages import PAGES_AT_ONCE, copy_pages, groups
from ed_esurge.runner.memory import Memory, copy_states
from ed_esurge.runner.row_numbers import OF_FILTERS, OF_SAMPLING, OF_STEP
from ed_esurge.runner.sampler import read_last, sample_plain, sample_with_mask
from ed_esurge.runner.sampler_rows import SamplerRows, SamplerState
from ed_esurge.runner.several_steps import draft_steps, several_steps
from ed_esurge.runner.weights import ServedWeights, abstract, with_adapter

# - a shape: the step, which computes logits and hidden states;
# - ("sample", n): reads the logits of a step;
# - ("decode", n): several decode steps of n rows, with their sampling;
# - ("draft", n): known tokens in n rows, and several steps that draft further tokens;
# - ("take", n), FILTER, ("merge", n): read, filter and write the masks of a few rows of a step;
# - ("score", T), ("pool", T): read the hidden states of a step;
# - PUT, PLACE: write a line of the sampler's state, or an adapter;
# - COPY: copies a few pages;
# - STATES: copies recurrent states.
ProgramKey = StepShape | tuple[str, int]
PUT: ProgramKey = ("put", 0)
PLACE: ProgramKey = ("place", 0)
FILTER: ProgramKey = ("filter", filters.FILTER_ROWS)
COPY: ProgramKey = ("copy", PAGES_AT_ONCE)
STATES: ProgramKey = ("states", 0)


class UncompiledFunctions:
    """The functions by name.

    Args:
        weights: weights of the model.
        memory: arrays that the functions read and replace; need not be allocated.
        builder: creates the inputs of a step.
        guides: grammars of structured outputs.
        buckets: shapes of the steps.
        max_logprobs: number of alternatives that a step returns.
        records: what a step returns in addition.
        lookahead: number of tokens between the last token of a row and the sampled token.
        most_drafts: maximum number of tokens that the model drafts at once; 0 = no drafts.

    Attributes:
        num_traces: number of traces, without those for which `uncounted` returned True.
        uncounted: returns whether the calling thread prepares functions ahead of their use.
        logits: number of rows -> abstract logits of a step, for known steps.
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
        records: Records = NOTHING,
        lookahead: int = 0,
        most_drafts: int = 0,
    ) -> None:
        self.num_traces, self._lookahead, self.most_drafts = 0, lookahead, most_drafts
        self.uncounted: Callable[[], bool] = lambda: False
        self.weights, self.memory, self.builder = weights, memory, builder
        self.buckets, self.max_logprobs, self._guides = buckets, max_logprobs, guides
        self.records = records
        self._arrays: tuple[Any, Any, Any] | None = None
        self._hidden: dict[int, jax.ShapeDtypeStruct] = {}  # by T
        self.logits: dict[int, jax.ShapeDtypeStruct] = {}  # by n

    @property
    def _is_switched(self) -> bool:
        """Whether a sampler has one branch: see `sample_with_mask`."""
        return get_platform(self.weights.model) == "gpu"

    def count_traces(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that `num_traces` counts its traces, with the kernels of the model."""

        def call_function(*args: object) -> Any:
            if not self.uncounted():
                self.num_traces += 1
            with native.chosen_by(self.weights.model.config):
                return function(*args)

        return call_function

    def lower(self, name: ProgramKey) -> Any:
        """Trace a function and return it, ready to compile."""
        lowered = self.jit_function(name).lower(*self.arguments(name))
        if isinstance(name, StepShape):
            self._keep_outputs(name, lowered.out_info)
        return lowered

    def jit_function(self, name: ProgramKey) -> Any:
        """Return a function that `jax.jit` compiles."""
        # Outputs that become inputs have the sharding that warm-up and lowered arguments have, so
        # that no function is traced again.
        everywhere = self.memory.placement
        cache, state = jax.tree.map(lambda x: x.sharding, self._abstract_arrays()[:2])
        if isinstance(name, StepShape):
            return jax.jit(
                self.count_traces(self._make_step(name)),
                donate_argnums=1,
                out_shardings=(everywhere, everywhere, everywhere, cache, everywhere),
            )
        if name == PUT:
            return jax.jit(self.count_traces(SamplerState.put), donate_argnums=0)
        if name == COPY:
            return jax.jit(self.count_traces(copy_pages), donate_argnums=0, out_shardings=cache)
        if name == STATES:
            return jax.jit(self.count_traces(copy_states), donate_argnums=0, out_shardings=cache)
        if name == PLACE:
            place_shardings = [leaf.sharding for leaf in self.weights.places]
            return jax.jit(
                self.count_traces(with_adapter), donate_argnums=0, out_shardings=place_shardings
            )
        if name[0] == "decode":
            return jax.jit(
                self.count_traces(self._make_decode(name[1])),
                donate_argnums=(1, 2),
                out_shardings=(everywhere, cache, everywhere),
            )
        if name[0] == "draft":
            return jax.jit(
                self.count_traces(self._make_draft(name[1])),
                donate_argnums=1,
                out_shardings=(everywhere, cache),
            )
        if name[0] == "sample":
            return jax.jit(
                self.count_traces(self._make_sample()),
                donate_argnums=0,
                out_shardings=(everywhere, state, everywhere),
            )
        if name[0] == "pool":
            return jax.jit(self.count_traces(pool_states), out_shardings=(everywhere, everywhere))
        if name[0] == "score":
            return jax.jit(self.count_traces(self._make_score()))
        function = {
            "take": filters.take_filter_rows,
            "filter": filters.get_allowed_bits,
            "merge": filters.merge_rows,
        }[name[0]]
        return jax.jit(self.count_traces(function), out_shardings=everywhere)

    def _make_step(self, shape: StepShape) -> Callable[..., Any]:
        fields, generic = self.builder.fields(shape), self.buckets.generic

        def step(
            leaves: list[jax.Array],
            cache: Cache,
            last: jax.Array,
            buffer: jax.Array,
            encoded: jax.Array | None = None,
        ):
            inputs = fields.unpack(buffer)
            token_ids = inputs.token_ids
            slots = inputs.ragged.state_slots
            if shape.decodes:
                token_ids = read_last(last, token_ids[0], slots)[None]
            elif shape == generic:  # computes decode steps until their shapes are compiled
                token_slots = slots.at[inputs.ragged.seq_of_token].get(mode="clip")
                token_ids = read_last(last, token_ids[0], token_slots)[None]
            more: dict[str, Any] = {"output_routed_experts": True} if self.records.experts else {}
            if encoded is not None and inputs.features is not None:
                more["features"] = Features(encoded[None], inputs.features)
            out = self._run_model(leaves, cache, inputs, token_ids, **more)
            assert out.last_hidden_state is not None
            experts = None if out.routed_experts is None else out.routed_experts[0]
            return out.logits, inputs.rows, out.last_hidden_state[0], out.past_key_values, experts

        return step

    def _run_model(
        self,
        leaves: list[jax.Array],
        cache: Cache,
        inputs: StepInput,
        token_ids: jax.Array,
        **more: Any,
    ) -> Any:
        """Return the output of the model for the tokens of a step."""
        if inputs.positions is not None:
            more["position_ids"] = inputs.positions
        out = self.weights.merge_leaves(leaves).decode(
            token_ids,
            past_key_values=cache,
            ragged=inputs.ragged,
            logits_at=inputs.logits_at,
            **more,
        )
        assert out.logits is not None
        return out

    def _make_decode(self, rows: int) -> Callable[..., Any]:
        fields, builder = self.builder.fields(self.buckets.get_decode_shape(rows)), self.builder
        is_switched = self._is_switched

        def decode(leaves: list[jax.Array], cache: Cache, last: jax.Array, buffer: jax.Array):
            def step(inputs: StepInput, cache: Cache, last: jax.Array):
                slots = inputs.ragged.state_slots
                token_ids = read_last(last, inputs.token_ids[0], slots)[None]
                out = self._run_model(leaves, cache, inputs, token_ids)
                sampled = sample_plain(
                    *(out.logits, SamplerRows.of(inputs.rows), self.max_logprobs),
                    is_switched=is_switched,
                )
                last = last.at[slots].set(sampled.tokens, mode="drop")
                return sampled.pack(), out.past_key_values, last

            inputs = fields.unpack(buffer)
            return several_steps(
                *(step, inputs, cache, last),
                most=self.buckets.steps,
                page_size=builder.page_size,
                nowhere=builder.nowhere,
            )

        return decode

    def _make_draft(self, rows: int) -> Callable[..., Any]:
        fields, builder = self.builder.fields(self.buckets.get_decode_shape(rows)), self.builder

        def draft(
            leaves: list[jax.Array],
            cache: Cache,
            buffer: jax.Array,
            chains: jax.Array,
            encoded: jax.Array | None = None,
        ):
            def step(inputs: StepInput, cache: Cache, hidden: jax.Array | None):
                more: dict[str, Any] = {}
                if encoded is not None:
                    values, index = encoded, inputs.features
                    if hidden is not None:
                        values, index = hidden, jnp.arange(rows)[None]
                    assert index is not None, "shapes of drafts have features"
                    more["features"] = Features(values[None], index)
                out = self._run_model(leaves, cache, inputs, inputs.token_ids, **more)
                sampler_rows = SamplerRows.of(inputs.rows)
                position = sampler_rows.position + self._lookahead
                sampled = sample_plain(
                    *(out.logits, replace(sampler_rows, position=position), self.max_logprobs),
                    is_switched=self._is_switched,
                )
                return sampled.tokens, out.last_hidden_state[0], out.past_key_values

            return draft_steps(
                *(step, fields.unpack(buffer), cache, chains),
                most=self.most_drafts,
                page_size=builder.page_size,
                nowhere=builder.nowhere,
            )

        return draft

    def _make_sample(self) -> Callable[..., Any]:
        def sample_logits(
            state: SamplerState, logits: jax.Array, rows: jax.Array, allowed: jax.Array
        ):
            sampler_rows = SamplerRows.of(rows)
            sampler_rows = replace(sampler_rows, position=sampler_rows.position + self._lookahead)
            sampled, state, masks = sample_with_mask(
                *(logits, sampler_rows, state, self.max_logprobs, allowed),
                masks=self.records.masks,
                is_switched=self._is_switched,
            )
            slots = rows[OF_STEP.index("state_slots")]
            return sampled.pack(), state.note(slots, sampled.tokens), masks

        return sample_logits

    def _make_score(self) -> Callable[..., Any]:
        def score_prompt(leaves: list[jax.Array], hidden: jax.Array, targets: jax.Array):
            return score_states(
                hidden, self.weights.merge_leaves(leaves).head(), targets, self.max_logprobs
            )

        return score_prompt

    # ---- arguments of the functions

    def numbers_of_copies(self) -> dict[str, np.ndarray]:
        """Return the second argument of `copy_pages`, for copies of page 0 to itself."""
        page_groups = groups(self._abstract_arrays()[0])  # without those of a draft model
        return {group: np.zeros((2, PAGES_AT_ONCE), np.int32) for group in page_groups}

    def numbers_of_state_copies(self, copies: StateCopies) -> tuple[np.ndarray, np.int32]:
        """Return the arguments of `copy_states` after the cache."""
        numbers = np.zeros((2, self.memory.max_num_seqs), np.int32)
        numbers[:, : len(copies)] = np.array(copies, np.int32).reshape(-1, 2).T
        return numbers, np.int32(len(copies))

    def arguments(self, name: ProgramKey) -> tuple[Any, ...]:
        """Return the abstract arguments of a function."""
        weights, memory = self.weights, self.memory
        cache, state, sums = self._abstract_arrays()
        if name == PUT:
            line = np.zeros(self._guides.vocab_size)
            mu = np.float32(0)
            return state, np.int32(0), line.astype(np.float32), line.astype(np.int32), mu
        if name == COPY:
            return cache, self.numbers_of_copies()
        if name == STATES:
            return cache, *self.numbers_of_state_copies(())
        if name == PLACE:
            values = jax.tree.leaves(slot_values(cast(nnx.Module, weights.model), {}))
            return abstract(weights.places), np.int32(1), values
        if isinstance(name, StepShape):
            encoded = abstract(memory.get_encoder_outputs(self.builder.fields(name).featured))
            return weights.like, cache, state.last, self.builder.empty(name), *encoded
        kind, size = name
        if kind == "decode":
            shape = self.buckets.get_decode_shape(size)
            return weights.like, cache, state.last, self.builder.empty(shape)
        if kind == "draft":
            shape = self.buckets.get_decode_shape(size)
            encoded = abstract(memory.get_encoder_outputs(self.builder.fields(shape).featured))
            chains = np.zeros((3, size), np.int32)
            return weights.like, cache, self.builder.empty(shape), chains, *encoded
        if kind in ("sample", "take", "merge", "filter"):
            return self._arguments_of_sampling(kind, size, state)
        if size not in self._hidden:
            self._keep_outputs(self.buckets.pick(size, 1, prefill=True))
        hidden, token_indices = self._hidden[size], np.zeros(size, np.int32)
        if kind == "score":
            return weights.like, hidden, token_indices
        return hidden, token_indices, np.zeros((memory.max_num_seqs, 4), np.int32), sums

    def _abstract_arrays(self) -> tuple[Any, Any, Any]:
        """Return the abstract pages, state and sums. The memory may be freed later."""
        if self._arrays is None:
            memory = self.memory
            assert memory.state is not None, "functions are compiled with memory"
            self._arrays = abstract((memory.cache, memory.state, memory.sums))
        return self._arrays

    def _arguments_of_sampling(self, kind: str, rows: int, state: SamplerState) -> tuple[Any, ...]:
        everywhere = self.memory.placement
        word = (words(self._guides.vocab_size),)

        def array(shape: tuple[int, ...], dtype: object = jnp.int32) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

        if kind == "filter":
            logits = self._get_logits(self.buckets.shapes[0].seqs)
            few = array((rows, *logits.shape[1:]), logits.dtype)
            numbers = np.zeros((1 + len(OF_SAMPLING) + len(OF_FILTERS), rows), np.int32)
            return few, numbers, state, array((rows, *word))
        logits, allowed = self._get_logits(rows), abstract(self._guides.everything(rows))
        index = np.zeros(filters.FILTER_ROWS, np.int32)
        if kind == "take":
            return logits, allowed, index
        if kind == "merge":
            return allowed, index, array((filters.FILTER_ROWS, *word))
        return state, logits, array((len(OF_STEP), rows)), allowed

    def _get_logits(self, rows: int) -> jax.ShapeDtypeStruct:
        if rows not in self.logits:
            shape = next(shape for shape in self.buckets.shapes if shape.seqs == rows)
            self._keep_outputs(shape)
        return self.logits[rows]

    def _keep_outputs(self, shape: StepShape, outputs: Any = None) -> None:
        """Store the abstract outputs of a step for the functions that read them, because tracing a
        step takes a second."""
        if outputs is None:
            outputs = jax.eval_shape(self._make_step(shape), *self.arguments(shape))
        place = self.memory.placement
        logits, _, hidden = (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in outputs[:3]
        )
        self.logits[shape.seqs], self._hidden[shape.tokens] = logits, hidden
