"""`Scorer`: the rewards of completions, from functions, an environment and a reward model.

Legend: n completions, k rewards of a completion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import distributed
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import REWARD_ROLE
from ed_trainers.contract import Batch, MethodRun, Models
from ed_trainers.losses.scoring import token_scores
from ed_trainers.losses.segments import last_tokens
from ed_trainers.online.completions import ENVIRONMENT_REWARD, TOTAL, Completions
from ed_trainers.online.phase import OnlineRun
from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.online import RewardedArguments
from ed_trainers.placement import TOKENS
from ed_trainers.rewards import Rewards
from ed_trainers.rollout import AheadRollout, Weights

A = TypeVar("A", bound=TrainingArguments)
# The names of judges in `Rewards.names`.
_JUDGE = re.compile(r"judge(_\d+)?")


class Scores(NamedTuple):
    """The rewards of completions, float32.

    Attributes:
        rewards: [n, k]; NaN where a function does not apply.
        total: [n], weighted; NaN where no function applies.
        names: names of the k rewards.
        per_prompt: number of completions of a prompt, if some of them were removed.
    """

    rewards: np.ndarray
    total: np.ndarray
    names: tuple[str, ...]
    per_prompt: int | None = None

    def figures(self) -> dict[str, float]:
        """Return the mean and the standard deviation of each reward, with TRL's names, and the
        agreement of judges with the other rewards."""
        out = {}
        for name, function_rewards in zip(self.names, self.rewards.T, strict=True):
            finite_rewards = function_rewards[np.isfinite(function_rewards)]
            out[f"rewards/{name}/mean"] = (
                float(finite_rewards.mean()) if finite_rewards.size else np.nan
            )
            out[f"rewards/{name}/std"] = (
                float(finite_rewards.std(ddof=1)) if finite_rewards.size > 1 else np.nan
            )
        finite_rewards = self.total[np.isfinite(self.total)]
        out["reward_std"] = float(finite_rewards.std(ddof=1)) if finite_rewards.size > 1 else np.nan
        return out | self.measure_agreement()

    def measure_agreement(self) -> dict[str, float]:
        """Return the rank correlation of each judge and each other reward, Kendall's tau-b.

        Only completions with both rewards count. The value is NaN for fewer than two of them, and
        if all rewards of one function are equal.
        """
        out = {}
        for first, second in combinations(range(len(self.names)), 2):
            names = self.names[first], self.names[second]
            if not any(map(_JUDGE.fullmatch, names)):
                continue
            from scipy.stats import kendalltau  # slow to import, and only judges need it

            pair = self.rewards[:, [first, second]]
            pair = pair[np.isfinite(pair).all(axis=1)]
            is_varied = len(pair) > 1 and (np.ptp(pair, axis=0) > 0).all()
            tau = float(np.asarray(kendalltau(*pair.T))[0]) if is_varied else np.nan
            out[f"agreement/{names[0]}/{names[1]}"] = tau
        return out


class Scorer:
    """The rewards of a run: functions and a reward model.

    The reward model is the frozen model `"reward"`, a `SequenceClassifier` with one label, whose
    score of the last token counts. The reward model reads the token ids of the learner.

    Args:
        run: the run of the method, with options of `RewardedArguments`.
        models: the frozen models by role; unchanged.

    Raises:
        ConfigError: there are no rewards, or the number of weights differs from their number.
    """

    def __init__(self, run: OnlineRun, models: dict[str, LanguageModel]):
        options = run.arguments
        assert isinstance(options, RewardedArguments), "the options of a method with rewards"
        self._run = run
        functions = run.reward_functions or options.reward_functions
        self._functions = Rewards(functions, run.reward_folders)
        names = self._functions.names
        if isinstance(run.rollout, AheadRollout):
            names = (*names, *run.rollout.reward_names)
        elif getattr(options, "environment", None) is not None:
            names = (*names, ENVIRONMENT_REWARD)
        self._has_model = REWARD_ROLE.name in models
        if self._has_model:
            if "pixel_values" in run.learner.input_names:
                raise ConfigError(
                    "a reward model reads texts, and the trained model reads images: set "
                    "reward_functions instead of the section reward_model"
                )
            names = (*names, REWARD_ROLE.section)
            _check_vocabulary(run.learner, models[REWARD_ROLE.name])
        if not names:
            raise ConfigError(
                f"{run.name} needs rewards: set reward_functions, or pass "
                "the frozen model 'reward' (the section reward_model)"
            )
        weights = options.reward_weights or (1.0,) * len(names)
        if len(weights) != len(names):
            raise ConfigError(
                f"{len(weights)} reward_weights for {len(names)} rewards ({', '.join(names)}): "
                "set one weight per reward"
            )
        self._names, self._weights = names, np.asarray(weights, np.float32)
        #: Number of rewards before the reward model.
        self.function_count = len(names) - self._has_model

    def score(
        self, completions: Completions, rows: Mapping[str, np.ndarray], weights: Weights
    ) -> Scores:
        """Return the rewards of completions.

        Args:
            completions: n completions.
            rows: `completions.rows(...)`; the rows of the reward model have the same length.
            weights: the learner's weights, for `Phase.ask`.
        """
        parts = [] if completions.rewards is None else [completions.rewards]
        # In this process, an environment has scored the completions, and the functions have not.
        if not parts or parts[0].shape[1] < self.function_count:
            parts.insert(0, call_once(self._functions, completions))
        if self._has_model:
            score_inputs = dict(completions.rows_to_score(rows["input_ids"].shape[1]))
            score_inputs["last"] = last_tokens(score_inputs["segment_ids"])
            axes = dict.fromkeys(score_inputs, TOKENS)
            model_scores = self._run.phase.ask(_compute_rewards, score_inputs, weights, axes)
            parts.append(model_scores[REWARD_ROLE.name][:, None])
        rewards = np.concatenate(parts, axis=1)
        total = np.nansum(rewards * self._weights, axis=1)
        total = np.where(np.isnan(rewards).all(axis=1), np.nan, total).astype(np.float32)
        completions.scores.update(zip(self._names, rewards.T, strict=True))
        completions.scores[TOTAL] = total
        return Scores(rewards, total, self._names)


def call_once(rewards: Rewards, completions: Completions) -> np.ndarray:
    """Return the values of reward functions, float32 [n, k], called on the first process only.

    A function may call a server or be random, and all processes need the same values.
    """
    return distributed.from_main(lambda: rewards(completions))


def _compute_rewards(run: MethodRun, models: Models, rows: Batch) -> dict[str, jax.Array]:
    """Return the reward model's score of the last token of each row."""
    del run
    _, scores = token_scores(models[REWARD_ROLE.name], rows, None, labels=1)
    return {REWARD_ROLE.name: jnp.sum(scores[..., 0] * rows["last"], axis=-1)}


def _check_vocabulary(learner: LanguageModel, model: LanguageModel) -> None:
    sizes = [
        getattr(language_model.config, "vocab_size", None) for language_model in (learner, model)
    ]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"the reward model has {sizes[1]} tokens, the learner {sizes[0]}: it reads the "
            "learner's token ids, so use a reward model with the same tokenizer, or score the text "
            "in a reward function"
        )
