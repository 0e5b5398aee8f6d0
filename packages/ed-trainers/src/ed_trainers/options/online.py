"""Options of the methods that train on sampled completions. Free of jax.

Names are EasyDeL's if EasyDeL has the option, otherwise TRL's; other spellings are aliases.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from ed_infra.options import Count, Fraction, NotNegative, Positive, Whole
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from ed_trainers.options.base import TrainingArguments, conflict


class OnlineArguments(TrainingArguments):
    """Options of sampling, and of the training steps per generation."""

    ALIASES: ClassVar[dict[str, str]] = {
        **TrainingArguments.ALIASES,
        "max_new_tokens": "max_completion_length",
    }
    #: Option that sets `rows_per_prompt`, for messages.
    ROWS_OPTION: ClassVar[str] = "num_return_sequences"

    max_prompt_length: Count = 512
    """Maximum number of prompt tokens; longer prompts keep their last tokens."""
    max_completion_length: Count = 256
    """Maximum number of tokens of a completion."""
    temperature: Positive = 1.0
    """Sampling temperature. The loss divides the logits by the same value, so it trains the
    distribution that is sampled from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most probable tokens with this total probability."""
    top_k: Whole = 0
    """Sample from this number of most probable tokens; 0: all tokens."""
    min_p: Fraction = 0.0
    """Minimum probability of a sampled token, relative to the most probable token."""
    steps_per_generation: Count = 1
    """Number of optimizer steps over which the completions of a generation are distributed."""
    num_iterations: Count = 1
    """Number of times that the completions of a generation are used for training."""

    @property
    def completions_per_row(self) -> int:
        """Number of completions of a prompt in one row of a batch."""
        return 1

    @property
    def rows_per_prompt(self) -> int:
        """Number of rows of a batch per prompt."""
        return 1

    @property
    def loader_batch_size(self) -> int:
        """Number of prompts of a generation."""
        return self.total_batch_size * self.steps_per_generation // self.rows_per_prompt

    @property
    def completions_per_generation(self) -> int:
        """Number of completions that a generation samples."""
        return self.loader_batch_size * self.rows_per_prompt * self.completions_per_row

    @property
    def updates_per_generation(self) -> int:
        """Number of optimizer steps between two generations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def row_length(self) -> int:
        """Number of positions of a row: maximum prompt plus maximum completion."""
        return self.max_prompt_length + self.max_completion_length

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> Self:
        rows = self.total_batch_size * self.steps_per_generation
        if rows % self.rows_per_prompt:
            raise conflict(
                f"total_batch_size {self.total_batch_size} times steps_per_generation "
                f"{self.steps_per_generation} is not a multiple of {self.ROWS_OPTION} "
                f"{self.rows_per_prompt}: total_batch_size counts completions, and each prompt has "
                f"{self.ROWS_OPTION} of them"
            )
        return self


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str | dict) else value


#: A rule of `ed_trainers.rewards`, `path/file.py:function`, `module:function`, or one of these with
#: settings: `{name: {…}}`.
RewardName = str | dict[str, dict[str, Any]]
RewardNames = Annotated[tuple[RewardName, ...], BeforeValidator(_one_or_many)]


class RewardedArguments(TrainingArguments):
    """Options of the methods with rewards of completions."""

    ALIASES: ClassVar[dict[str, str]] = {
        **TrainingArguments.ALIASES,
        "reward_funcs": "reward_functions",
        "kl_coef": "beta",
    }

    beta: NotNegative = 0.04
    """Weight of the divergence from the reference; 0: no reference."""
    reward_functions: RewardNames = ()
    """Functions that score completions: `path/file.py:function` or `module:function`, searched in
    the folder of the run file and in the working directory; a rule (`exact`, `number`, `regex`,
    `math_answer`, `format`); or an entry point of `easydel.rewards`. Settings are written as
    `{NAME: {setting: value}}`. The model of the section `reward_model` is the last reward."""
    reward_weights: tuple[float, ...] | None = None
    """Weight of each reward; the weight of the reward model is the last. None: 1 each."""

    @property
    def has_reference(self) -> bool:
        """Whether the method reads a reference."""
        return self.beta > 0

    @property
    def without_reference(self) -> str:
        """Name of the option that disables the reference, for messages."""
        return "beta 0"

    @field_validator("beta")
    @classmethod
    def _something_can_move(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("sync_ref_model"):
            raise conflict(
                "with beta 0 there is no reference for sync_ref_model to update: set beta above "
                "0, or omit sync_ref_model"
            )
        return value

    @field_validator("reward_functions")
    @classmethod
    def _are_names(cls, value: tuple[RewardName, ...]) -> tuple[RewardName, ...]:
        for entry in value:
            if isinstance(entry, dict) and len(entry) != 1:
                raise conflict(
                    f"{entry} is not a reward function: write NAME, or NAME with its settings, "
                    "{NAME: {setting: value}}"
                )
        return value

    @field_validator("reward_weights")
    @classmethod
    def _one_each(
        cls, value: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        functions = len(info.data.get("reward_functions", ()))
        # Without names, the functions may be passed to the trainer, which checks their number.
        if value is not None and functions and len(value) not in (functions, functions + 1):
            raise conflict(
                f"{len(value)} reward_weights for {functions} reward_functions: set one "
                "per function, and one more for a reward model"
            )
        return value
