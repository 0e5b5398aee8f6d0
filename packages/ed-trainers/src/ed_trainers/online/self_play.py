"""`SelfPlayTrainer`: what the methods share whose completions compete with another policy's.

Each prompt is completed by the learner and by an opponent that is made of the learner and the
reference. Who wins is said by the scores of both, or by a judge that compares them.

Legend: n prompts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from ed_models.protocol import LanguageModel

from ed_trainers.contract import Models
from ed_trainers.online.completions import Completions
from ed_trainers.online.rewarded import RewardedTrainer, asked_once
from ed_trainers.options.self_play import SelfPlayArguments
from ed_trainers.rewards import Rewards
from ed_trainers.rollout import Weights

# Generations of an opponent have numbers of their own, which draw their seeds.
_OPPONENT = 2**30


class Contest(NamedTuple):
    """What became of the completions of both sides, in the order of the prompts.

    Attributes:
        own, other: rows of the completions of the learner, and of its opponent.
        scored: of the learner's, `rewards` and `scored` [n]; nothing where a judge compares.
        wins: probability that the learner's is the better one, float32 [n]; NaN where nothing says.
        figures: for the log.
    """

    own: dict[str, np.ndarray]
    other: dict[str, np.ndarray]
    scored: dict[str, np.ndarray]
    wins: np.ndarray
    figures: dict[str, float]


class SelfPlayTrainer(RewardedTrainer):
    """A `RewardedTrainer` whose completions are compared with those of an opponent."""

    arguments: SelfPlayArguments

    @abstractmethod
    def opponent(self, models: Models) -> object:
        """Return the module whose `generate` completes the prompts a second time."""

    def frozen_of(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """See `RewardedTrainer.frozen_of`; a judge takes the place of what scores."""
        judge = self.arguments.judge
        self._judge = None if judge is None else Rewards((judge,), self._reward_folders)
        if self._judge is None:
            return super().frozen_of(models)
        return self.with_reference(models)

    def contest(self, own: Completions, weights: Weights) -> Contest:
        """Let the opponent complete the prompts of completions, and find out who wins.

        Args:
            own: the learner's.
            weights: the learner's.
        """
        prompts = SimpleNamespace(
            input_ids=own.prompt_ids, prompts=own.prompts, fields=dict(own.fields)
        )
        others = self.complete(
            prompts,  # type: ignore[arg-type] - a PromptBatch
            weights,
            number=_OPPONENT + weights.version,
            copies=1,
            rollout=self.rollout_of(self.opponent),
        )
        length = self.arguments.row_length
        rows = own.rows(length), others.rows(length)
        if self._judge is not None:
            compared = replace(own, fields={**own.fields, "others": others.completions})
            wins = asked_once(self._judge, compared)[:, 0]
            figures: dict[str, float] = {}
            scored: dict[str, np.ndarray] = {}
        else:
            first, second = (
                self._scores(side, of_side, weights)
                for side, of_side in zip((own, others), rows, strict=True)
            )
            margin = first - second
            wins = 1 / (1 + np.exp(-margin))
            known = np.isfinite(first)
            scored = {
                "rewards": np.where(known, first, 0).astype(np.float32),
                "scored": known.astype(np.float32),
            }
            figures = {
                "objective/model_scores": float(np.nanmean(first)),
                "objective/other_scores": float(np.nanmean(second)),
                "objective/scores_margin": float(np.nanmean(margin)),
            }
        return Contest(*rows, scored, wins.astype(np.float32), figures)

    def _scores(
        self, completions: Completions, rows: Mapping[str, np.ndarray], weights: Weights
    ) -> np.ndarray:
        total: Any = self.score(completions, rows, weights).total
        if self.arguments.missing_eos_penalty is not None:
            total = total - self.arguments.missing_eos_penalty * ~np.asarray(completions.ended)
        return total
