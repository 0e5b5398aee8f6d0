"""The runner's data of each running sequence, by slot, so that plans contain only new data.

Sampling settings and page tables are stored in arrays. The rows of a step are gathered from these
arrays. A sequence with adjusted logits (penalties, biases, masks) has a row in the sampler's state
on the device. The host writes this row when the masks change. The device updates its token counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.core.request import RequestError, is_adjusted
from ed_esurge.runner.guides import Guides
from ed_esurge.sampling import PoolingParams, SamplingParams

# Numbers of a slot, int32 (floats as their bits). The first three describe the sequence, the others
# its sampling. Rows that do not sample use the sampling numbers of the empty slot.
OF_SEQUENCE = ("state_slots", "prompt_lens", "adapter_ids")
OF_SAMPLING = (
    "slot",
    "seed",
    "top_k",
    "num_logprobs",
    "processed",
    "mirostat",
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "typical_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "mirostat_tau",
    "mirostat_eta",
)
NUMBERS = OF_SEQUENCE + OF_SAMPLING
FLOATS = frozenset(OF_SAMPLING[OF_SAMPLING.index("temperature") :])

Line = tuple[np.int32, np.ndarray, np.ndarray, np.float32]


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
        self.numbers = np.zeros((len(OF_SEQUENCE) + len(OF_SAMPLING), num_slots + 1), np.int32)
        self.page_table = {group: np.zeros((num_slots + 1, pages), np.int32) for group in groups}
        self._filled = {group: [0] * num_slots for group in groups}
        self.adapter_places = {0: 0}
        """Number of a LoRA adapter -> its index on the device."""
        # Rotary position of a generated token minus its number.
        self._offsets = np.zeros(num_slots + 1, np.int32)
        self._new: list[NewSequence | None] = [None] * num_slots
        self._adjusted: list[Adjustment | None] = [None] * num_slots
        # Index `num_slots` is out of range, so that writes to it are dropped.
        self._set(
            num_slots,
            state_slots=num_slots,
            slot=num_slots,
            num_logprobs=-1,
            top_p=1.0,
            typical_p=1.0,
            repetition_penalty=1.0,
        )

    def take(self, plan: StepPlan) -> list[tuple[Adjustment, int, Line | None]]:
        """Update the tables with the new data of a plan.

        Returns:
            for each sampling row with adjusted logits: the adjustment, the number of sampled
            tokens, and the row of the sampler's state to write first, if any.

        Raises:
            RequestError: a sequence cannot be prepared.
        """
        adjusted: list[tuple[Adjustment, int, Line | None]] = []
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
        place = self.adapter_places[new.adapter]
        self._set(slot, state_slots=slot, prompt_lens=new.prompt_len, adapter_ids=place)
        self._adjusted[slot] = None
        placed = new.positions
        self._offsets[slot] = 0 if placed is None else placed.max() + 1 - new.prompt_len
        if isinstance(params, PoolingParams):
            return
        if is_adjusted(params, new.bad_token_ids, new.rules):
            self._adjusted[slot] = Adjustment(new, params, self.vocab_size)
            self._set(
                slot,
                slot=slot,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                repetition_penalty=params.repetition_penalty,
            )
        if params.logprobs is not None:
            processed = params.logprobs_mode == "processed_logprobs"
            self._set(slot, num_logprobs=params.logprobs, processed=processed)
        if not params.greedy:
            self._set(
                slot,
                seed=int(np.uint32(new.seed).view(np.int32)),
                temperature=params.temperature,
                top_k=max(params.top_k, 0),
                top_p=params.top_p,
                min_p=params.min_p,
                typical_p=params.typical_p,
                top_n_sigma=max(params.top_n_sigma, 0.0),
                xtc_probability=params.xtc_probability,
                xtc_threshold=params.xtc_threshold,
                mirostat=params.mirostat,
                mirostat_tau=params.mirostat_tau,
                mirostat_eta=params.mirostat_eta,
            )

    def grow(self, row: PlanRow) -> None:
        """Append the pages and tokens of a row."""
        for group, pages in row.pages.items():
            start = self._filled[group][row.slot]
            self._filled[group][row.slot] = stop = start + len(pages)
            table = self.page_table[group][row.slot]
            if not start:
                # Attention also reads unused page table entries and masks them, which does not
                # remove NaN. Unused and freed entries therefore name a page of the same sequence.
                own = max(0, *pages)
                table[:] = own
                pages = [own if page < 0 else page for page in pages]
            table[start:stop] = pages
        adjustment = self._adjusted[row.slot]
        if adjustment is not None:
            adjustment.grow(row)

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
                of_prompt = (slots == slot) & (numbers < new.prompt_len)
                positions[:, of_prompt] = new.positions[:, numbers[of_prompt]]
        return positions

    def following(self, row: PlanRow) -> Sequence[int]:
        """Return the prompt token after each token of a row; one fewer at the end of the prompt."""
        new = self._at(row.slot)
        return new.token_ids[row.start + 1 : min(row.stop + 1, new.prompt_len)]

    def pooling(self, rows: Sequence[PlanRow], tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `(slot_of_token, rows)` for `ed_esurge.runner.hidden_states.pool`.

        Args:
            rows: rows of the step.
            tokens: padded number of tokens T.
        """
        slot_of_token = np.full(tokens, self.num_slots, np.int32)
        of_slot = np.zeros((self.num_slots, 4), np.int32)
        at = 0
        for row in rows:
            end = at + len(row.token_ids)
            if row.pools:
                new = self._at(row.slot)
                assert isinstance(new.params, PoolingParams), "only pooled rows are asked about"
                slot_of_token[at:end] = row.slot
                mean = new.prompt_len if new.params.pooling == "mean" else 0
                of_slot[row.slot] = row.start == 0, end - 1, mean, new.params.normalize
            at = end
        return slot_of_token, of_slot

    def forget_lines(self) -> None:
        """Mark all rows of the sampler's state on the device as lost."""
        for adjustment in self._adjusted:
            if adjustment is not None:
                adjustment.held = None

    def _at(self, slot: int) -> NewSequence:
        new = self._new[slot]
        assert new is not None, f"slot {slot} has a row but no plan has started its sequence"
        return new

    def _set(self, at: int, **values: float) -> None:
        for name, value in values.items():
            bits = np.float32(value).view(np.int32) if name in FLOATS else np.int32(value)
            self.numbers[NUMBERS.index(name), at] = bits


class Adjustment:
    """Biases, masks and token counts of one sequence, and the version of them on the device.

    Args:
        new: the sequence.
        params: sampling options of the sequence.
        vocab_size: vocabulary size v.
    """

    def __init__(self, new: NewSequence, params: SamplingParams, vocab_size: int) -> None:
        self._new, self._params, self._vocab_size = new, params, vocab_size
        self._tokens = list(new.token_ids)
        # Tokens counted, banned tokens, the only allowed token, and penalties of repetitions.
        self.held: tuple[int, frozenset[int], int | None, dict[int, float]] | None = None
        self._begun = False
        self._repetition = params.repetition_of_sequences

    def grow(self, row: PlanRow) -> None:
        """Append the new tokens of a row."""
        if row.stop > len(self._tokens):
            self._tokens[row.start :] = row.token_ids

    def update(self) -> Line | None:
        """Return `(slot, bias [v], seen [v], mu)` if the row must be written before the next
        sampling; None otherwise. `mu` is NaN if the row keeps its limit of mirostat."""
        banned, forced, repeated = self._banned(), self._forced(), self._repeated()
        now = (len(self._tokens), banned, forced, repeated)
        if self.held == now:
            return None
        self.held = now
        mu = np.float32(np.nan if self._begun else 2 * self._params.mirostat_tau)
        self._begun = True
        bias = self._bias(banned, forced)
        for token, penalty in repeated.items():
            bias[token] -= penalty
        return np.int32(self._new.slot), bias, self._seen(), mu

    def _repeated(self) -> dict[int, float]:
        """Return the penalties of tokens that would continue a repetition (DRY)."""
        return {} if self._repetition is None else self._repetition.of(self._tokens)

    def sampled(self, count: int) -> None:
        """Record that the device counts `count` more tokens."""
        assert self.held is not None, "a line is written before its sequence samples"
        self.held = (self.held[0] + count, *self.held[1:])

    def _banned(self) -> frozenset[int]:
        """Return the tokens that are forbidden next and may be allowed in a later step."""
        output = self._tokens[self._new.prompt_len :]
        banned: set[int] = set()
        if len(output) < self._params.min_tokens:
            banned.update(self._new.end_token_ids)
        for word in self._new.bad_token_ids:
            *head, last = word
            if not head or output[-len(head) :] == head:
                banned.add(last)
        if self._new.rules is not None:
            banned.update(self._new.rules.banned(len(output)))
        return frozenset(banned)

    def _forced(self) -> int | None:
        """Return the only token that is allowed next; None = no such token."""
        budget = self._params.thinking_budget
        if budget is not None:
            forced = budget.forced(self._tokens[self._new.prompt_len :])
            if forced is not None:
                return forced
        new, count = self._new, len(self._tokens) - self._new.prompt_len
        ends = new.rules is not None and new.rules.forces_end(count, new.max_tokens)
        return new.rules.forced_eos_token_id if new.rules is not None and ends else None

    def _bias(self, banned: frozenset[int], forced: int | None) -> np.ndarray:
        if forced is not None:
            bias = np.full(self._vocab_size, -np.inf, np.float32)
            bias[forced] = 0
            return bias
        allowed = self._params.allowed_token_ids
        bias = np.zeros(self._vocab_size, np.float32)
        if allowed is not None:
            bias[:] = -np.inf
            bias[list(allowed)] = 0
        for token, value in self._params.logit_bias.items():
            bias[token] += value
        bias[list(banned)] = -np.inf
        return bias

    def _seen(self) -> np.ndarray:
        prompt, output = np.split(np.asarray(self._tokens, np.int64), [self._new.prompt_len])
        seen = 2 * np.bincount(output, minlength=self._vocab_size).astype(np.int32)
        seen[np.unique(prompt)] += 1
        return seen
