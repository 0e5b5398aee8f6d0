"""Completions of the learner against completions of an opponent, for `xpo` and `nash_md`.

The learner and an opponent, built from learner and reference, complete each prompt. The scores of
both completions, or a judge that compares them, decide which completion wins.

Legend: n prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
from ed_models.protocol import LanguageModel

from ed_trainers.contract import Models
from ed_trainers.online.completions import TOTAL, Completions
from ed_trainers.online.phase import OnlineRun
from ed_trainers.online.scorer import Scorer, call_once
from ed_trainers.options.online import OnlineArguments, SelfPlayArguments
from ed_trainers.rewards import Rewards
from ed_trainers.rollout import Weights

# Generations of an opponent have their own numbers, which determine the seeds of their samples.
_OPPONENT = 2**30


class Contest(NamedTuple):
    """The completions of both sides and the winners, in the order of the prompts.

    Attributes:
        learner_rows, opponent_rows: rows of the completions of the learner and of its opponent.
        scored: `rewards` and `scored` [n] of the learner's completions; empty with a judge.
        wins: probability that the learner's completion is better, float32 [n]; NaN if unknown.
        figures: figures for the log.
    """

    learner_rows: dict[str, np.ndarray]
    opponent_rows: dict[str, np.ndarray]
    scored: dict[str, np.ndarray]
    wins: np.ndarray
    figures: dict[str, float]


class Referee:
    """Decides which completion is better.

    Args:
        run: the run of the method, with options of `SelfPlayArguments`.
        models: the frozen models by role; unchanged.

    Raises:
        ConfigError: there is neither a judge nor a reward.
    """

    def __init__(self, run: OnlineRun, models: dict[str, LanguageModel]):
        options = run.arguments
        assert isinstance(options, OnlineArguments), "the options of a method that samples"
        self._run, self._length = run, options.row_length
        assert isinstance(options, SelfPlayArguments), "the options of self-play"
        self._penalty, judge = options.missing_eos_penalty, options.judge
        self._judge = None if judge is None else Rewards((judge,), run.reward_folders)
        self._scorer = Scorer(run, models) if judge is None else None

    def contest(
        self, completions: Completions, weights: Weights, opponent: Callable[[Models], object]
    ) -> Contest:
        """Let an opponent complete the prompts of completions, and decide which ones are better.

        Args:
            completions: completions of the learner.
            weights: weights of the learner.
            opponent: returns the module whose `generate` completes the prompts a second time.
        """
        phase = self._run.phase
        prompts = SimpleNamespace(
            input_ids=completions.prompt_ids,
            prompts=completions.prompts,
            fields=dict(completions.fields),
        )
        opponent_completions = phase.sample(
            prompts,  # type: ignore[arg-type] - a PromptBatch
            weights,
            number=_OPPONENT + weights.version,
            copies=1,
            rollout=phase.build_rollout(opponent),
        )
        rows = dict(completions.rows(self._length)), dict(opponent_completions.rows(self._length))
        if self._judge is not None:
            compared = replace(
                completions,
                fields={**completions.fields, "others": opponent_completions.completions},
            )
            wins = call_once(self._judge, compared)[:, 0]
            completions.scores[TOTAL] = wins
            return Contest(*rows, {}, wins.astype(np.float32), {})
        first, second = (
            self._scores(side, side_rows, weights)
            for side, side_rows in zip((completions, opponent_completions), rows, strict=True)
        )
        margin = first - second
        wins = 1 / (1 + np.exp(-margin))
        reward_mask = np.isfinite(first)
        scored = {
            "rewards": np.where(reward_mask, first, 0).astype(np.float32),
            "scored": reward_mask.astype(np.float32),
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
        assert self._scorer is not None
        total = self._scorer.score(completions, rows, weights).total
        if self._penalty is not None:
            total = total - self._penalty * ~np.asarray(completions.ended)
        return total
