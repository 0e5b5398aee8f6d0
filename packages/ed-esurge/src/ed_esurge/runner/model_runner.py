"""`ModelRunner`: executes the scheduler's plans on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import ClassVar, NoReturn, cast

import jax
import numpy as np
from ed_models.adapters.slots import slot_values
from ed_models.adapters.values import Adapter, uses_dora
from ed_models.modalities.items import EncoderItems
from ed_models.protocol import LanguageModel
from flax import nnx
from tqdm import tqdm

from ed_esurge.config import NOTHING, Records
from ed_esurge.core.plan import Moves, StepPlan
from ed_esurge.grammars.store import Grammar, Grammars
from ed_esurge.model import get_platform, get_vocab_size
from ed_esurge.runner.adjustment import Adjustment, Line
from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, StepShape
from ed_esurge.runner.encoder import AT_ONCE, ItemEncoder, SlotEncoder
from ed_esurge.runner.functions import Functions
from ed_esurge.runner.guides import Guides
from ed_esurge.runner.host_pages import HostMemory
from ed_esurge.runner.memory import Memory
from ed_esurge.runner.result import StepResult
from ed_esurge.runner.slots import SlotTables
from ed_esurge.runner.uncompiled import PLACE, PUT, UncompiledFunctions
from ed_esurge.runner.weights import ServedWeights
from ed_esurge.sampling import PoolingParams, SamplingParams


class ModelRunner:
    """Runs `StepPlan`s. The plans contain all data of the sequences.

    Args:
        model: the model, in the layout that the caller chose. Its arrays are not copied.
        buckets: shapes of the steps.
        page_size: number of tokens in a page.
        num_pages: number of pages of each group's pool.
        max_num_seqs: maximum number of running sequences: the slots of the sampler's state and of
            the recurrent states.
        max_logprobs: number of alternatives that a step returns.
        ahead_of_time: whether to call compiled executables, which accept exactly one shape. False
            calls through `jax.jit`.
        grammars: compiler of structured outputs; None = not supported.
        host_places: number of pages of each group in host memory.
        encoder_rows: number of rows of the table of encoder outputs; 0 = no table.
        items: the items of the encoder whose outputs are in the table.
        encoder_length: encoder positions of a sequence of an encoder-decoder; None for others.
        num_states: number of saved recurrent states; None = states are not copied.
        second_states: whether each sequence has a second slot for its recurrent state, so that
            drafts can be verified.
        hidden_rows: number of rows of the table of hidden states that the model reads as features;
            0 = no table. A model with a table predicts the token after the next one.
        most_drafts: maximum number of tokens that `draft` returns for a sequence.
        records: what results contain in addition.

    Attributes:
        keeps_hidden: whether to store the hidden states of each step.
        hidden: hidden states of the flat tokens of the last step [T, d], if they are stored.
    """

    #: Arrays that persist between steps.
    memory_type: ClassVar[type[Memory]] = Memory

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
        encoder_rows: int = 0,
        items: EncoderItems | None = None,
        encoder_length: int | None = None,
        num_states: int | None = None,
        second_states: bool = False,
        hidden_rows: int = 0,
        most_drafts: int = 0,
        records: Records = NOTHING,
    ) -> None:
        self.buckets, self.items = buckets, items
        self.keeps_hidden, self.hidden = False, cast("jax.Array | None", None)
        self.page_size, self.num_pages = page_size, num_pages
        self.num_states = num_states
        self.vocab_size = get_vocab_size(model)
        self.weights = ServedWeights(model)
        self.model = self.weights.model
        self.memory = self.memory_type(
            self.model,
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            encoder_rows=encoder_rows or hidden_rows,
            encoder_features=None if items is None else items.features,
            encoder_length=encoder_length,
            num_states=num_states,
            second_states=second_states,
        )
        guides = Guides(grammars, max_num_seqs, self.vocab_size, self.memory.replicate_arrays)
        self._slots = SlotTables(
            max_num_seqs,
            tuple(num_pages),
            pages=buckets.shapes[-1].pages,
            vocab_size=self.vocab_size,
            guides=guides,
        )
        self._builder = BatchBuilder(
            self._slots,
            page_size=page_size,
            num_pages=num_pages,
            separate_rows=buckets.invariant,
            featured=buckets.shapes if hidden_rows else buckets.prefill if encoder_rows else (),
            has_axes=items is not None and items.has_axes,
            drafts=second_states,
        )
        self.max_logprobs = min(max_logprobs, self.vocab_size)
        """Number of alternatives that a step returns."""
        uncompiled = UncompiledFunctions(
            self.weights,
            self.memory,
            self._builder,
            guides,
            buckets,
            max_logprobs=self.max_logprobs,
            records=records,
            lookahead=int(hidden_rows > 0),
            most_drafts=most_drafts,
        )
        self.functions = Functions(uncompiled, ahead_of_time=ahead_of_time)
        self._encoder: ItemEncoder | SlotEncoder | None = None
        if items is not None:
            self._encoder = ItemEncoder(
                self.weights,
                self.memory,
                uncompiled.count_traces,
                items,
                at_once=() if get_platform(model) == "cpu" or buckets.invariant else AT_ONCE,
                ahead_of_time=ahead_of_time,
            )
        elif encoder_length is not None:
            self._encoder = SlotEncoder(self.weights, self.memory, uncompiled.count_traces)
        cache = self.memory.allocate()
        self.host = HostMemory(cache, host_places, uncompiled.count_traces) if host_places else None
        if self.host is not None:
            self.host.device = lambda: self.memory.cache

    # ---- memory

    @property
    def allocated(self) -> bool:
        """Whether the pages are allocated."""
        return self.memory.allocated

    def allocate(self) -> None:
        """Allocate empty pages and states."""
        self.memory.allocate()
        self._slots.forget_lines()

    def free(self) -> None:
        """Free the device memory of the pages and states."""
        self.memory.free()

    def memory_bytes(self) -> int:
        """See `Runner`."""
        weights = self.weights.leaves if self.weights.there else []
        return sum(leaf.nbytes for leaf in weights) + self.memory.bytes()

    def describe(self) -> str:
        """Return the sizes of the memory and the number of shapes, for the log."""
        counts = self.num_pages.items()
        pages = [
            f"{count} pages" + f" of group {group}" * (group != "full") for group, count in counts
        ]
        states = ""
        if self.num_states:
            mib = self.memory.saved_state_bytes() / 2**20
            states = f"{self.num_states} saved states ({mib:.1f} MiB), "
        return (
            f"{' and '.join(pages) or 'no pages'} of {self.page_size} tokens "
            f"({self.memory.cache_bytes() / 2**30:.2f} GiB), {states}"
            f"{len(self.buckets.shapes)} shapes"
        )

    # ---- compiled functions

    @property
    def num_traces(self) -> int:
        """Number of traces, which is constant after all functions are compiled."""
        return self.functions.num_traces

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """Compile all functions for serving and update the progress bar."""
        if self.host is not None:
            self.host.compile()
        self.functions.compile_all(progress)
        if self._encoder is not None:
            self._encoder.compile()

    def compile_first(self, progress: tqdm[NoReturn]) -> StepShape | None:
        """See `Runner`. The output of an encoder must not depend on time, so a runner with an
        encoder compiles all functions."""
        if self._encoder is not None:
            self.compile_all(progress)
            return None
        if self.host is not None:
            self.host.compile()
        self.functions.compile_first(progress)
        return self.buckets.generic if self.num_pending else None

    @property
    def num_pending(self) -> int:
        """See `Runner`."""
        return len(self.functions.background or ())

    def stop_compiling(self, *, wait: bool = True) -> None:
        """See `Runner`."""
        if self.functions.background is not None:
            self.functions.background.stop(wait=wait)

    # ---- grammars

    def hold(self, params: SamplingParams | PoolingParams) -> Grammar | None:
        """See `Guides.hold`."""
        return self._slots.guides.hold(params)

    # ---- one step

    def move(self, moves: Moves) -> None:
        """Copy pages between the device and host memory."""
        if self.host is not None and self.memory.cache is not None:
            self.memory.cache = self.host.move(self.memory.cache, moves)

    def run(self, plan: StepPlan) -> StepResult:
        """Start a step and return without waiting for the device.

        Args:
            plan: the plan that follows the last run plan.

        Raises:
            EasyDeLError: the weights were dropped.
            RequestError: a sequence cannot be prepared. Nothing was computed, and all sequences of
                the plan must start again.
        """
        leaves, slots = self.weights.leaves, self._slots
        functions, memory = self.functions, self.memory
        if plan.items:
            assert self._encoder is not None, "the scheduler plans encoder outputs"
            self._encoder.run(plan.items)
        adjusted = slots.take(plan)
        self.move(plan.moves)
        if plan.copies and memory.cache is not None:
            memory.cache = functions.with_copies(memory.cache, plan.copies)
        if plan.restores and memory.cache is not None:
            memory.cache = functions.with_state_copies(memory.cache, plan.restores)
        for _, _, line in adjusted:
            if line is not None:
                memory.state = functions[PUT](memory.state, *line)
        result = (
            self._run_several(plan) if plan.steps > 1 else self._run_one(plan, leaves, adjusted)
        )
        if plan.saves and memory.cache is not None:
            memory.cache = functions.with_state_copies(memory.cache, plan.saves)
        return result

    def _run_one(
        self,
        plan: StepPlan,
        leaves: list[jax.Array],
        adjusted: Sequence[tuple[Adjustment, int, Line | None]],
    ) -> StepResult:
        """Start a step with a program of its own."""
        slots, functions, memory = self._slots, self.functions, self.memory
        scored = True in [row.scores for row in plan.rows]
        pooled = True in [row.pools for row in plan.rows]
        lines = plan.total if self.buckets.invariant else plan.lines
        featured = self._encoder is not None and any(row.features for row in plan.rows)
        pick = self.buckets.pick_drafts if plan.has_prompts else self.buckets.pick
        shape = pick(plan.total, lines, prefill=scored or pooled or featured)
        if not functions.usable(shape):
            shape = self.buckets.generic
        buffer, places = self._builder.build(plan, shape)
        allowed = slots.guides.get_allowed_tokens(plan, places, shape.seqs)
        assert memory.state is not None, "allocated with the pages"
        logits, rows, hidden, memory.cache, experts = functions[shape](
            leaves,
            memory.cache,
            memory.state.last,
            buffer,
            *memory.get_encoder_outputs(self._builder.fields(shape).featured),
        )
        self.hidden = hidden if self.keeps_hidden else None
        index, numbers = slots.get_filtered_rows(self._builder.fields(shape).view(buffer, "rows"))
        if len(index):
            allowed = functions.filter_masks(logits, allowed, index, numbers, memory.state)
        sampled = functions["sample", shape.seqs](memory.state, logits, rows, allowed)
        packed, memory.state, masks = sampled
        for adjustment, count, _ in adjusted:
            adjustment.record_samples(count)
        scores = vectors = None
        if scored:
            targets = np.zeros(shape.tokens, np.int32)
            at = 0
            for row in plan.rows:
                if row.scores:
                    following = slots.following(row)
                    targets[at : at + len(following)] = following
                at += len(row.token_ids)
            scores = functions["score", shape.tokens](leaves, hidden, targets)
        if pooled:
            vectors, memory.sums = functions["pool", shape.tokens](
                hidden, *slots.pooling(plan.rows, shape.tokens), memory.sums
            )
        failures = slots.guides.failures(plan)
        return StepResult(
            *(plan, packed, places, scores, vectors, failures), experts=experts, masks=masks
        )

    def _run_several(self, plan: StepPlan) -> StepResult:
        """Start several decode steps of sequences whose logits are not adjusted or filtered."""
        memory, most = self.memory, self.buckets.steps
        shape = self.buckets.pick(len(plan.rows), len(plan.rows))
        buffer, _ = self._builder.build(plan, shape)
        assert memory.state is not None, "allocated with the pages"
        packed, memory.cache, last = self.functions["decode", shape.seqs](
            self.weights.leaves, memory.cache, memory.state.last, buffer
        )
        memory.state = replace(memory.state, last=last)
        return StepResult(plan, packed, range(0, most * len(plan.rows), most))

    def draft(self, plan: StepPlan, limits: Sequence[int]) -> list[list[int]]:
        """Compute known tokens, and draft `plan.steps` tokens for each sequence that samples.

        Args:
            plan: rows of one token each; the last row of a sequence samples.
            limits: number of positions in the pages of each of these sequences.

        Returns:
            the drafts of each of these sequences: valid tokens, at most one more than positions are
            left.
        """
        memory = self.memory
        self._slots.take(plan)
        shape = self.buckets.pick(len(plan.rows), len(plan.rows))
        buffer, _ = self._builder.build(plan, shape)
        ends = [index for index, row in enumerate(plan.rows) if row.samples]
        chains = np.zeros((3, shape.seqs), np.int32)
        chains[0, : len(ends)], chains[1, : len(ends)], chains[2] = ends, limits, len(ends)
        encoded = memory.get_encoder_outputs(self._builder.fields(shape).featured)
        drafts, memory.cache = self.functions["draft", shape.seqs](
            self.weights.leaves, memory.cache, buffer, chains, *encoded
        )
        lines: list[list[int]] = np.asarray(drafts)[: len(ends), : plan.steps].tolist()
        return [
            [*takewhile(lambda token: token >= 0, line[: limit - plan.rows[end].stop + 1])]
            for line, limit, end in zip(lines, limits, ends, strict=True)
        ]

    # ---- adapters

    def load_adapter(self, number: int, place: int, adapter: Adapter) -> None:
        """Write a LoRA adapter to a slot. Sequences that start with its number use the adapter.

        Args:
            number: number of the adapter.
            place: index of the slot, from 1.
            adapter: values of the adapter.

        Raises:
            ConfigError: the adapter does not match the slots. Nothing was written.
        """
        weights = self.weights
        model = weights.merge_leaves(weights.leaves) if uses_dora(adapter) else self.model
        values = jax.tree.leaves(slot_values(cast(nnx.Module, model), adapter))
        write = self.functions[PLACE]
        self.weights.put(write(self.weights.places, np.int32(place), values))
        self._slots.adapter_places[number] = place
