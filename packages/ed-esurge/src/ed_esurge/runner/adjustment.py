"""Biases, masks and token counts of a sequence whose previous tokens change its logits."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy

import numpy as np

from ed_esurge.core.plan import NewSequence, PlanRow
from ed_esurge.repetition import Repetitions
from ed_esurge.sampling import SamplingParams
from ed_esurge.thinking import LimitedThoughts

#: Arguments of `SamplerState.put`: slot, bias [v], seen [v], and mu.
Line = tuple[np.int32, np.ndarray, np.ndarray, np.float32]


class Adjustment:
    """Biases, masks and token counts of one sequence, and the version of them on the device.

    A new token costs the same time at every length of the sequence, except with DRY.

    Args:
        new: the sequence.
        params: sampling options of the sequence.
        vocab_size: vocabulary size v.
    """

    def __init__(self, new: NewSequence, params: SamplingParams, vocab_size: int) -> None:
        self._new, self._params, self._vocab_size = new, params, vocab_size
        self._tokens = list(new.token_ids)
        # `SamplerState.seen` after all tokens.
        prompt, output = np.split(np.asarray(self._tokens, np.int64), [new.prompt_len])
        self._seen = 2 * np.bincount(output, minlength=vocab_size).astype(np.int32)
        self._seen[np.unique(prompt)] += 1
        # Number of counted tokens, forbidden tokens and the only allowed token on the device.
        self._held: tuple[int, frozenset[int], int | None] | None = None
        self._begun = self._penalized = self._drafted = False
        self._proposed: Sequence[int] = ()
        penalty, budget = params.repetition_of_sequences, params.thinking_budget
        self._repetitions = None if penalty is None else Repetitions(penalty, self._tokens)
        self._thoughts = None if budget is None else LimitedThoughts(budget, output.tolist())

    def grow(self, row: PlanRow) -> None:
        """Append the new tokens of a row."""
        # Proposals of the last row that precede this row were accepted.
        accepted_tokens = self._proposed[: max(row.start - len(self._tokens), 0)]
        known = row.token_ids[max(len(self._tokens) - row.start, 0) : row.known - row.start]
        for token in (*accepted_tokens, *known):
            self._append(token)
            self._seen[token] += 2
        self._proposed = row.proposed
        if self._drafted and self._held is not None:
            # The device has counted exactly the accepted tokens.
            self._held = (len(self._tokens), *self._held[1:])
        self._drafted = False

    def _append(self, token: int) -> None:
        self._tokens.append(token)
        if self._repetitions is not None:
            self._repetitions.append(token)
        if self._thoughts is not None:
            self._thoughts.append(token)

    def count_valid(self, proposed: Sequence[int]) -> int:
        """Return the number of proposed tokens after which the biases and masks of the row of the
        sampler's state are those of the next token. The device counts the tokens itself."""
        if self._penalized:
            return 0
        now, count = (self._get_banned_tokens(), self._get_forced_token()), len(self._tokens)
        ahead = copy(self)  # with the same list of tokens
        ahead._repetitions, ahead._thoughts = deepcopy((self._repetitions, self._thoughts))
        valid = 0
        for token in proposed:
            ahead._append(token)
            repeated = ahead._repetitions
            if repeated is not None and len(repeated.penalties()[0]):
                break
            if (ahead._get_banned_tokens(), ahead._get_forced_token()) != now:
                break
            valid += 1
        del self._tokens[count:]
        return valid

    def update(self) -> Line | None:
        """Return the row of the sampler's state if the row must be written before the next
        sampling; None otherwise. Its `mu` is NaN if the row keeps its limit of mirostat."""
        banned, forced = self._get_banned_tokens(), self._get_forced_token()
        now = (len(self._tokens), banned, forced)
        repeated = None if self._repetitions is None else self._repetitions.penalties()
        penalized = repeated is not None and len(repeated[0]) > 0
        if self._held == now and not penalized and not self._penalized:
            return None
        self._held, self._penalized = now, penalized
        mu = np.float32(np.nan if self._begun else 2 * self._params.mirostat_tau)
        self._begun = True
        bias = self._bias(banned, forced)
        if repeated is not None:
            tokens, penalties = repeated
            bias[tokens] -= penalties.astype(np.float32)
        return np.int32(self._new.slot), bias, self._seen.copy(), mu

    def forget(self) -> None:
        """Mark the row on the device as lost."""
        self._held = None

    def record_samples(self, count: int) -> None:
        """Record that the device counts `count` sampled tokens, or the accepted ones of them if
        tokens were proposed."""
        assert self._held is not None, "a line is written before its sequence samples"
        self._drafted = count > 1
        self._held = (self._held[0] + count, *self._held[1:])

    def _get_banned_tokens(self) -> frozenset[int]:
        """Return the tokens that are forbidden next and may be allowed in a later step."""
        new, generated = self._new, len(self._tokens) - self._new.prompt_len
        banned: set[int] = set()
        if generated < self._params.min_tokens:
            banned.update(new.end_token_ids)
        for word in new.bad_token_ids:
            *head, last = word
            if not head or (len(head) <= generated and self._tokens[-len(head) :] == head):
                banned.add(last)
        if new.rules is not None:
            banned.update(new.rules.get_banned_tokens(generated))
        return frozenset(banned)

    def _get_forced_token(self) -> int | None:
        """Return the only token that is allowed next; None = no such token."""
        if self._thoughts is not None and self._thoughts.forced is not None:
            return self._thoughts.forced
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
