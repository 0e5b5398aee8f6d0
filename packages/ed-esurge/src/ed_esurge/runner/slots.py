"""The runner's data of each running sequence, by slot, so that plans contain only new data.

Sampling settings and page tables are stored in arrays. The rows of a step are gathered from these
arrays. A sequence with adjusted logits (penalties, biases, masks) has a row in the sampler's state
on the device. The host writes this row when the masks change. The device updates its token counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.core.request import RequestError, is_adjusted
from ed_esurge.runner.adjustment import Adjustment, Line
from ed_esurge.runner.guides import Guides
from ed_esurge.runner.row_numbers import (
    DROPPED,
    OF_FILTERS,
    OF_SAMPLING,
    OF_SEQUENCE,
    OF_STEP,
    NumberTable,
)
from ed_esurge.sampling import PoolingParams


class SlotTables:
    """Tables with one row per slot. Row `num_slots` is the empty slot.

    Args:
        num_slots: maximum number of running sequences.
        groups: names of the page groups.
        pages: maximum number of pages of a sequence.
        vocab_size: vocabulary size v.
        guides: grammars of the sequences.
    """

    def __init__(
        self,
        num_slots: int,
        groups: Sequence[str],
        *,
        pages: int,
        vocab_size: int,
        guides: Guides | None = None,
    ) -> None:
        self.guides = guides or Guides(None, num_slots, vocab_size)
        self.num_slots, self.vocab_size = num_slots, vocab_size
        self._rows = NumberTable((*OF_SEQUENCE, *OF_SAMPLING), num_slots + 1)
        # Numbers of the sequences with filters of `ed_esurge.runner.filters`.
        self._filters = NumberTable((*OF_SAMPLING, *OF_FILTERS), num_slots + 1)
        self._filtered = np.zeros(num_slots + 1, bool)
        self.page_table = {group: np.zeros((num_slots + 1, pages), np.int32) for group in groups}
        self._filled = {group: [0] * num_slots for group in groups}
        self.adapter_places = {0: 0}
        """Number of a LoRA adapter -> its index on the device."""
        # Rotary position of a generated token minus its number.
        self._offsets = np.zeros(num_slots + 1, np.int32)
        self._new: list[NewSequence | None] = [None] * num_slots
        self._adjusted: list[Adjustment | None] = [None] * num_slots
        # Request id -> number of proposals for which the row of the sampler's state is valid.
        self._num_valid: dict[str, int] = {}
        # Index `num_slots` is out of range, so that writes to it are dropped.
        self._rows.set(
            num_slots,
            state_slots=num_slots,
            slot=num_slots,
            num_logprobs=-1,
            top_p=1.0,
            repetition_penalty=1.0,
        )

    @property
    def numbers(self) -> np.ndarray:
        """Numbers of the sequences by slot, int32 [OF_SEQUENCE and OF_SAMPLING, num_slots + 1]."""
        return self._rows.numbers

    def take(self, plan: StepPlan) -> list[tuple[Adjustment, int, Line | None]]:
        """Update the tables with the new data of a plan.

        Returns:
            for each sampling row with adjusted logits: the adjustment, the number of sampled
            tokens, and the row of the sampler's state to write first, if any.

        Raises:
            RequestError: a sequence cannot be prepared.
        """
        adjusted: list[tuple[Adjustment, int, Line | None]] = []
        self._num_valid.clear()
        name = ""
        try:
            for new in plan.started:
                name = new.request_id
                self.start(new)
                self.guides.start(new)
            for row in plan.rows:
                name = row.request_id
                self.grow(row)
                self.guides.grow(row)
                adjustment = self._adjusted[row.slot] if row.samples else None
                if adjustment is not None:
                    adjusted.append((adjustment, row.samples, adjustment.update()))
                    if row.samples > 1:
                        self._num_valid[name] = adjustment.count_valid(row.proposed)
        except Exception as error:
            raise RequestError(name) from error
        return adjusted

    def start(self, new: NewSequence) -> None:
        """Assign a slot to a sequence and overwrite the data of the previous sequence."""
        slot, params = new.slot, new.params
        self._new[slot] = new
        for group, table in self.page_table.items():
            table[slot] = 0
            self._filled[group][slot] = 0
        self.numbers[:, slot] = self.numbers[:, self.num_slots]
        self._filtered[slot] = False
        place = self.adapter_places[new.adapter]
        self._rows.set(slot, state_slots=slot, prompt_lens=new.prompt_len, adapter_ids=place)
        self._adjusted[slot] = None
        placed = new.positions
        self._offsets[slot] = 0 if placed is None else placed[1:].max() + 1 - new.prompt_len
        if isinstance(params, PoolingParams):
            return
        if is_adjusted(params, new.bad_token_ids, new.rules):
            self._adjusted[slot] = Adjustment(new, params, self.vocab_size)
            self._rows.set(
                slot,
                slot=slot,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
        if params.logprobs is not None:
            processed = params.logprobs_mode == "processed_logprobs"
            self._rows.set(slot, num_logprobs=params.logprobs, processed=processed)
        if params.greedy:
            return
        seed = int(np.uint32(new.seed).view(np.int32))
        self._rows.set(slot, seed=seed, temperature=params.temperature)
        self._rows.set(
            slot,
            mirostat=params.mirostat,
            mirostat_tau=params.mirostat_tau,
            mirostat_eta=params.mirostat_eta,
        )
        limits = {"top_k": max(params.top_k, 0), "top_p": params.top_p, "min_p": params.min_p}
        if not params.filtered:
            self._rows.set(slot, **limits)
            return
        # The program of the filters applies all limits, and the sampler the resulting mask.
        self._filtered[slot] = True
        self._filters.numbers[: len(OF_SAMPLING), slot] = self.numbers[len(OF_SEQUENCE) :, slot]
        self._filters.set(
            slot,
            **limits,
            typical_p=params.typical_p,
            top_n_sigma=max(params.top_n_sigma, 0.0),
            xtc_probability=params.xtc_probability,
            xtc_threshold=params.xtc_threshold,
        )

    def get_filtered_rows(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a step with filters, and the numbers for the program of the filters.

        Args:
            rows: numbers of the rows by `OF_STEP`, int32 [k, n].

        Returns:
            indices of the rows [r], and int32 [1 + OF_SAMPLING + OF_FILTERS, r]: the lengths of
            the sequences come first.
        """
        if not self._filtered.any():
            return np.zeros(0, np.int32), np.zeros((0, 0), np.int32)
        slots = rows[OF_STEP.index("state_slots")]
        # A row that does not sample has the temperature 0.
        is_filtered = self._filtered[slots] & (rows[OF_STEP.index("temperature")] != 0)
        index = np.flatnonzero(is_filtered).astype(np.int32)
        lengths = rows[OF_STEP.index("kv_lens"), index]
        return index, np.concatenate([lengths[None], self._filters.numbers[:, slots[index]]])

    def grow(self, row: PlanRow) -> None:
        """Append the pages and tokens of a row."""
        for group, pages in row.pages.items():
            start = self._filled[group][row.slot]
            self._filled[group][row.slot] = stop = start + len(pages)
            table = self.page_table[group][row.slot]
            if not start:
                # Attention also reads unused page table entries and masks them, which does not
                # remove NaN. Unused and freed entries therefore name a page of the same sequence.
                fill_page = max(0, *pages)
                table[:] = fill_page
                pages = [fill_page if page < 0 else page for page in pages]
            table[start:stop] = pages
        adjustment = self._adjusted[row.slot]
        if adjustment is not None:
            adjustment.grow(row)

    def get_proposals(
        self, rows: Sequence[PlanRow], places: Sequence[int]
    ) -> Iterator[tuple[int, int]]:
        """Yield the row on the device of each proposed token, and the token, or `DROPPED`.

        Args:
            rows: rows of a plan.
            places: for each row of the plan, the index of its first sampled row.
        """
        for row, place in zip(rows, places, strict=True):
            if row.samples > 1:
                valid = self._num_valid.get(row.request_id, row.samples)
                for index, token in enumerate(row.proposed):
                    yield place + 1 + index, token if index < valid else DROPPED

    def rotary_positions(self, slots: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the rotary positions of tokens along time, height and width, [3, T].

        Args:
            slots: the slot of each token.
            numbers: the number of each token in its sequence.
        """
        positions = np.broadcast_to(numbers + self._offsets[slots], (3, len(slots))).copy()
        for slot in np.unique(slots):
            new = self._new[slot]
            if new is not None and new.positions is not None:
                in_prompt = (slots == slot) & (numbers < new.prompt_len)
                positions[:, in_prompt] = new.positions[:, numbers[in_prompt]]
        return positions

    def following(self, row: PlanRow) -> Sequence[int]:
        """Return the prompt token after each token of a row; one fewer at the end of the prompt."""
        new = self._at(row.slot)
        return new.token_ids[row.start + 1 : min(row.stop + 1, new.prompt_len)]

    def pooling(self, rows: Sequence[PlanRow], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `(slot_of_token, rows)` for `ed_esurge.runner.hidden_states.pool_states`.

        Args:
            rows: rows of the step.
            tokens: padded number of tokens T.
        """
        slot_of_token = np.full(tokens, self.num_slots, np.int32)
        slot_rows = np.zeros((self.num_slots, 4), np.int32)
        at = 0
        for row in rows:
            end = at + len(row.token_ids)
            if row.pools:
                new = self._at(row.slot)
                assert isinstance(new.params, PoolingParams), "only pooled rows are asked about"
                slot_of_token[at:end] = row.slot
                mean = new.prompt_len if new.params.pooling == "mean" else 0
                slot_rows[row.slot] = row.start == 0, end - 1, mean, new.params.normalize
            at = end
        return slot_of_token, slot_rows

    def forget_lines(self) -> None:
        """Mark all rows of the sampler's state on the device as lost."""
        for adjustment in self._adjusted:
            if adjustment is not None:
                adjustment.forget()

    def _at(self, slot: int) -> NewSequence:
        new = self._new[slot]
        assert new is not None, f"slot {slot} has a row but no plan has started its sequence"
        return new
