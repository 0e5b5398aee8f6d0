"""Proposals by the MTP layer of the served model (`ed_models.body.mtp`).

The layer has a separate page pool, whose pages have the numbers of the pages of the served model.
Position i of the layer holds the pair of the hidden state of token i and the token i + 1, and
predicts token i + 2. After each step of the served model, the layer computes the pairs of the
accepted tokens with the hidden states of that step. The first proposal follows from the last pair.
Each further proposal follows from the pair of the layer's own hidden state and the proposal before;
the next step of the served model replaces these pairs. One program computes all of them.

The pairs of a sequence without proposals are computed when it receives proposals again.

New weights of the served model are also those of the layer.

The last pair of a page depends on the first token of the next page. Sequences that share a page may
differ in that token, so their proposals may differ from those without shared pages. Tokens do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from ed_models.body.mtp import as_draft, select_draft_state
from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.core.proposals import RESTORED_ROWS, DraftKind
from ed_esurge.core.request import Request
from ed_esurge.runner.draft_model import DraftModel
from ed_esurge.runner.model_runner import ModelRunner


class MTPDrafts(DraftModel):
    """Proposes tokens of the MTP layer.

    Args:
        runner: runner of the layer, with a table of hidden states.
        served: runner of the served model.
        config: options with `method: mtp`.
        token_budget: maximum number of tokens in one step.
    """

    def __init__(
        self,
        runner: ModelRunner,
        served: ModelRunner,
        config: SpeculativeConfig,
        token_budget: int,
    ) -> None:
        super().__init__(runner, config, token_budget)
        self._served = served
        served.keeps_hidden = runner.keeps_hidden = True
        select = partial(select_draft_state, vocab_size=config.draft_vocab_size)
        served.weights.add_follower(runner.weights, select)
        self._first = dict[str, int]()  # flat index of the first token of each row
        # Hidden states of positions that the layer computes later, after a pause.
        self._waiting = dict[str, list[np.ndarray]]()
        self._restored = list[np.ndarray]()  # those that the next step of the layer computes

    def observe(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """See `Proposer`."""
        index = 0
        self._first.clear()
        self._restored.clear()
        for row in plan.rows:
            self._first[row.request_id] = index
            index += len(row.token_ids)
        for new in plan.started:
            self._waiting.pop(new.request_id, None)
        super().observe(plan, requests)

    def forget(self, request: Request) -> None:
        """See `Proposer`."""
        self._waiting.pop(request.request_id, None)
        super().forget(request)

    def _can_wait(self, request: Request, row: PlanRow, places: range) -> bool:
        """See `DraftModel`. The hidden states are stored in host memory."""
        stored = self._waiting.get(request.request_id, [])
        can_wait = super()._can_wait(request, row, places) or not places
        if not can_wait and len(self._restored) + len(stored) <= RESTORED_ROWS:
            return False
        new = range(places.start + len(stored), self._get_range(request, row)[1])
        if new:
            self._waiting[request.request_id] = [*stored, *self._read_hidden(row, new)]
        return True

    def _read_hidden(self, row: PlanRow, places: range) -> list[np.ndarray]:
        """Return the hidden states of some positions of a row of the served model."""
        assert self._served.hidden is not None, "the served runner keeps hidden states"
        first = self._first[row.request_id] - row.start
        return [*np.asarray(self._served.hidden)[[first + place for place in places]]]

    def _draft(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        self._write_hidden(self._served)
        if self._restored:
            memory = self.runner.memory
            assert memory.encoded is not None, "allocated with the pages"
            states = np.zeros((RESTORED_ROWS, *self._restored[0].shape), self._restored[0].dtype)
            states[: len(self._restored)] = self._restored
            memory.encoded = memory.replicate_arrays(write_restored(memory.encoded, states))
        super()._draft(plan, requests)

    def _write_hidden(self, source: ModelRunner) -> None:
        """Write the hidden states of the last step of a runner to the table of the layer."""
        memory = self.runner.memory
        if source.hidden is not None and memory.encoded is not None:
            padded = fill_table(source.hidden, memory.encoded.shape[0])
            memory.encoded = memory.replicate_arrays(padded)

    def _get_range(self, request: Request, row: PlanRow) -> tuple[int, int, int]:
        name, end = row.request_id, request.num_tokens - 1
        self._drafts.pop(name, None)
        start = self._computed[name]
        return start if name in self._waiting else max(row.start, start), min(row.stop, end), end

    def _build_row(
        self, request: Request, row: PlanRow, places: range, pages: list[int], samples: int
    ) -> PlanRow:
        table, (_, end, _) = self.runner.memory.encoded, self._get_range(request, row)
        assert table is not None, "allocated with the pages"
        stored = self._waiting.pop(row.request_id, [])
        now = stored[: len(places)]
        remaining_places = range(max(places.stop, places.start + len(stored)), end)
        if places.stop < end:  # the budget of the step ends here
            remaining_states = self._read_hidden(row, remaining_places)
            self._waiting[row.request_id] = [*stored[len(now) :], *remaining_states]
        begin = table.shape[0] - RESTORED_ROWS + len(self._restored)
        self._restored += now
        first = self._first[row.request_id] - row.start
        features = [begin + index for index in range(len(now))]
        features += [first + place for place in places[len(now) :]]
        tokens = request.tokens(places.start + 1, places.stop + 1)
        built = super()._build_row(request, row, places, pages, samples)
        return built._replace(token_ids=tokens, features=features)

    def _run(self, plan: StepPlan) -> Mapping[str, Sequence[int]]:
        sampled = super()._run(plan)
        self._write_hidden(self.runner)
        return sampled

    def _build_next(self, row: PlanRow, token: int, index: int) -> PlanRow:
        return super()._build_next(row, token, index)._replace(features=(index,))

    def compile_all(self, progress: tqdm[NoReturn]) -> None:
        """See `Proposer`."""
        super().compile_all(progress)
        table = self.runner.memory.encoded
        assert table is not None, "allocated with the pages"
        for tokens in {shape.tokens for shape in self.runner.buckets.shapes}:
            fill_table(table[:tokens], table.shape[0])
        write_restored(table, np.zeros((RESTORED_ROWS, table.shape[1]), table.dtype))


@partial(jax.jit, static_argnums=1)
def fill_table(hidden: jax.Array, rows: int) -> jax.Array:
    """Return hidden states [n, d] as the first rows of a table [rows, d]."""
    return jnp.pad(hidden, ((0, rows - hidden.shape[0]), (0, 0)))


@jax.jit
def write_restored(table: jax.Array, states: jax.Array) -> jax.Array:
    """Return a table with states in its last rows."""
    return jax.lax.dynamic_update_slice(table, states, (table.shape[0] - len(states), 0))


MTP_KIND = DraftKind(
    None,
    MTPDrafts,
    derive=lambda model, config: as_draft(model, config.draft_vocab_size),
    reads_hidden=True,
    config_fields={"mtp_head": "stored"},
)
