"""Proposals by the MTP layer of the served model (`ed_models.body.mtp`).

The layer has a separate page pool, whose pages have the numbers of the pages of the served model.
Position i of the layer holds the pair of the hidden state of token i and the token i + 1, and
predicts token i + 2. After each step of the served model, the layer computes the pairs of the
accepted tokens with the hidden states of that step. The first proposal follows from the last pair.
Each further proposal follows from the pair of the layer's own hidden state and the proposal before;
the next step of the served model replaces these pairs.

New weights of the served model are also those of the layer.

The last pair of a page depends on the first token of the next page. Sequences that share a page may
differ in that token, so their proposals may differ from those without shared pages. Tokens do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NoReturn

import jax
import jax.numpy as jnp
from ed_models.body.mtp import as_draft, select_draft_state
from tqdm import tqdm

from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.core.proposals import DraftKind
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

    def observe(self, plan: StepPlan, requests: Mapping[str, Request]) -> None:
        """See `Proposer`."""
        index = 0
        self._first.clear()
        for row in plan.rows:
            self._first[row.request_id] = index
            index += len(row.token_ids)
        self._write_hidden(self._served)
        super().observe(plan, requests)

    def _write_hidden(self, source: ModelRunner) -> None:
        """Write the hidden states of the last step of a runner to the table of the layer."""
        memory = self.runner.memory
        if source.hidden is not None and memory.encoded is not None:
            padded = fill_table(source.hidden, memory.encoded.shape[0])
            memory.encoded = memory.replicate_arrays(padded)

    def _get_range(self, request: Request, row: PlanRow) -> tuple[int, int, int]:
        self._drafts.pop(row.request_id, None)
        start = max(row.start, self._computed[row.request_id])
        return start, min(row.stop, request.num_tokens - 1), request.num_tokens - 1

    def _build_row(
        self, request: Request, row: PlanRow, places: range, pages: list[int], samples: int
    ) -> PlanRow:
        first = self._first[row.request_id] - row.start
        tokens = request.tokens(places.start + 1, places.stop + 1)
        built = super()._build_row(request, row, places, pages, samples)
        return built._replace(token_ids=tokens, features=[first + place for place in places])

    def _run(self, plan: StepPlan) -> Mapping[str, Sequence[int]]:
        if plan.total <= self.runner.buckets.max_rows:  # needs no larger shape
            lines = [line for row in plan.rows for line in separate_tokens(row)]
            plan = replace(plan, rows=tuple(lines))
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


def separate_tokens(row: PlanRow) -> list[PlanRow]:
    """Return a row for each token of a row; the last one samples."""
    lines = [
        row._replace(
            start=row.start + index,
            token_ids=(token,),
            pages={} if index else row.pages,
            features=row.features[index : index + 1],
            samples=0,
        )
        for index, token in enumerate(row.token_ids)
    ]
    return [*lines[:-1], lines[-1]._replace(samples=row.samples)]


@partial(jax.jit, static_argnums=1)
def fill_table(hidden: jax.Array, rows: int) -> jax.Array:
    """Return hidden states [n, d] as the first rows of a table [rows, d]."""
    return jnp.pad(hidden, ((0, rows - hidden.shape[0]), (0, 0)))


MTP_KIND = DraftKind(
    None,
    MTPDrafts,
    derive=lambda model, config: as_draft(model, config.draft_vocab_size),
    reads_hidden=True,
    config_fields={"mtp_head": "stored"},
)
