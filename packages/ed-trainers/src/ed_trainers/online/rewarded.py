"""`RewardedTrainer`: what the methods share whose completions get rewards.

Rewards come from functions (`ed_trainers.rewards`) and from a reward model: the frozen model
`"reward"`, a `SequenceClassifier` of one label, whose score of the last token counts. It reads the
learner's token ids.

Legend: n completions, k rewards of each, s positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import distributed
from ed_infra.errors import ConfigError, unknown_name
from ed_models.adapters.lora import has_lora
from ed_models.protocol import LanguageModel

from ed_trainers.contract import Batch, Models
from ed_trainers.losses.scoring import token_scores
from ed_trainers.losses.segments import last_tokens
from ed_trainers.online.completions import Completions
from ed_trainers.online.trainer import OnlineTrainer
from ed_trainers.options.online import RewardedArguments
from ed_trainers.rewards import RewardFunction, Rewards
from ed_trainers.rollout import Weights
from ed_trainers.synced import SyncedReference

REWARD = "reward"


class Scores(NamedTuple):
    """The rewards of completions, float32.

    Attributes:
        each: [n, k]; NaN where a function does not apply.
        total: [n], weighted; NaN where none applies.
        names: of the k.
    """

    each: np.ndarray
    total: np.ndarray
    names: tuple[str, ...]

    def figures(self) -> dict[str, float]:
        """Mean and standard deviation of each, with TRL's names."""
        out = {}
        for name, own in zip(self.names, self.each.T, strict=True):
            here = own[np.isfinite(own)]
            out[f"rewards/{name}/mean"] = float(here.mean()) if here.size else np.nan
            out[f"rewards/{name}/std"] = float(here.std(ddof=1)) if here.size > 1 else np.nan
        here = self.total[np.isfinite(self.total)]
        out["reward_std"] = float(here.std(ddof=1)) if here.size > 1 else np.nan
        return out


class RewardedTrainer(SyncedReference, OnlineTrainer):
    """An `OnlineTrainer` whose completions get rewards.

    Args:
        reward_functions: in place of those that the arguments name; for functions that have no
            name.
        reward_folders: where the files and modules of named functions are searched, before the
            working directory.

    Raises:
        ConfigError: nothing gives rewards, or the number of weights is another one.
    """

    arguments: RewardedArguments
    frozen_models: ClassVar[tuple[str, ...]] = ("reference", REWARD)

    def __init__(
        self,
        *given: Any,
        reward_functions: Sequence[RewardFunction] = (),
        reward_folders: Sequence[str | Path] = (),
        **more: Any,
    ):
        self._given_functions = tuple(reward_functions)
        self._reward_folders = tuple(reward_folders)
        super().__init__(*given, **more)

    def frozen_of(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Find out who gives rewards, and which model is the reference.

        The reference is the frozen model `"reference"`; else, of a learner with adapters, the base
        under them; else the learner as it is before training. With `beta` 0 there is none.
        """
        arguments = self.arguments
        functions = self._given_functions or arguments.reward_functions
        self.rewards = Rewards(functions, self._reward_folders)
        names = self.rewards.names
        self.has_reward_model = REWARD in models
        if self.has_reward_model:
            names = (*names, "reward_model")
            self._check_vocabulary(models[REWARD])
        if not names:
            raise ConfigError(
                f"{type(self).__name__} learns from rewards, and nothing gives any: set "
                "reward_functions, or give the frozen model 'reward' (the section reward_model)"
            )
        weights = arguments.reward_weights or (1.0,) * len(names)
        if len(weights) != len(names):
            raise ConfigError(
                f"{len(weights)} reward_weights for {len(names)} rewards ({', '.join(names)}): "
                "give one each"
            )
        self._reward_names, self._reward_weights = names, np.asarray(weights, np.float32)
        return self.with_reference(models)

    def with_reference(self, models: Mapping[str, LanguageModel]) -> Mapping[str, LanguageModel]:
        """Add the reference to the frozen models, where it is the learner itself."""
        for name in models:
            if name not in self.frozen_models:
                raise unknown_name(
                    f"frozen model of {type(self).__name__}", name, self.frozen_models
                )
        if not self.arguments.has_reference:
            if "reference" in models:
                raise ConfigError(
                    "with beta 0 no reference is read: leave it out, or set beta above 0"
                )
            return models
        if "reference" in models or has_lora(self._model):
            return models
        return {"reference": self._model, **models}

    def score(
        self, completions: Completions, rows: Mapping[str, np.ndarray], weights: Weights
    ) -> Scores:
        """Return the rewards of completions.

        Args:
            completions: n.
            rows: `completions.rows(...)`, whose length the reward model's rows have.
            weights: the learner's, for `compute`.
        """
        parts = [asked_once(self.rewards, completions)]
        if self.has_reward_model:
            asked = completions.rows_to_score(rows["input_ids"].shape[1])
            asked["last"] = last_tokens(asked["segment_ids"])
            parts.append(self.compute(_reward_of, asked, weights)[REWARD][:, None])
        each = np.concatenate(parts, axis=1)
        total = np.nansum(each * self._reward_weights, axis=1)
        total = np.where(np.isnan(each).all(axis=1), np.nan, total).astype(np.float32)
        return Scores(each, total, self._reward_names)

    def _check_vocabulary(self, model: LanguageModel) -> None:
        own, other = self._model.config, model.config
        sizes = getattr(own, "vocab_size", None), getattr(other, "vocab_size", None)
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"the reward model has {sizes[1]} tokens, the learner {sizes[0]}: it reads the "
                "learner's ids, so take one that was trained with the same tokenizer, or score "
                "text in a reward function"
            )


def asked_once(rewards: Rewards, completions: Completions) -> np.ndarray:
    """What reward functions say, float32 [n, k]; of several processes the first one asks.

    A function may ask a server, or give another answer each time: the processes must not part.
    """
    return distributed.from_main(lambda: rewards(completions))


def _reward_of(models: Models, rows: Batch) -> dict[str, jax.Array]:
    """The reward model's score of each row's last token."""
    _, scores = token_scores(models[REWARD], rows, None, labels=1)
    return {REWARD: jnp.sum(scores[..., 0] * rows["last"], axis=-1)}
