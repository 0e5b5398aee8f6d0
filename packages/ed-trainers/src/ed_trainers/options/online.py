"""Options of the methods that learn from completions of their own. Free of jax.

Names are EasyDeL's where it has them, else TRL's; other spellings are aliases.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Self

from ed_infra.options import Count, Fraction, NotNegative, Positive, Whole
from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from ed_trainers.options.base import TrainingArguments, conflict


class OnlineArguments(TrainingArguments):
    """Options of sampling, and of how often what was sampled is learned from."""

    ALIASES: ClassVar[dict[str, str]] = {
        **TrainingArguments.ALIASES,
        "max_new_tokens": "max_completion_length",
    }

    max_prompt_length: Count = 512
    """Tokens of a prompt; of a longer one the last are kept."""
    max_completion_length: Count = 256
    """Tokens of a completion."""
    temperature: Positive = 1.0
    """Of the sampling. The loss, too, divides the logits by it: it learns the distribution that is
    sampled from."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: Whole = 0
    """Sample from so many of the likeliest tokens; 0 for all."""
    min_p: Fraction = 0.0
    """Smallest probability that is sampled, relative to the likeliest token's."""
    steps_per_generation: Count = 1
    """Optimizer steps that the completions of one generation are shared out to."""
    num_iterations: Count = 1
    """Times that the completions of a generation are learned from."""

    @property
    def completions_per_row(self) -> int:
        """Completions of one prompt that share a row of a batch."""
        return 1

    @property
    def rows_per_prompt(self) -> int:
        """Rows of a batch that one prompt becomes."""
        return 1

    @property
    def loader_batch_size(self) -> int:
        """Prompts of a generation."""
        return self.total_batch_size * self.steps_per_generation // self.rows_per_prompt

    @property
    def updates_per_generation(self) -> int:
        """Optimizer steps between two generations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def row_length(self) -> int:
        """Positions of a row: the longest prompt with the longest completion."""
        return self.max_prompt_length + self.max_completion_length

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> Self:
        rows = self.total_batch_size * self.steps_per_generation
        if rows % self.rows_per_prompt:
            raise conflict(
                f"total_batch_size {self.total_batch_size} times steps_per_generation "
                f"{self.steps_per_generation} is not a multiple of num_return_sequences "
                f"{self.rows_per_prompt}: total_batch_size counts completions, and each prompt has "
                "num_return_sequences of them"
            )
        return self


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str | dict) else value


#: A rule of `ed_trainers.rewards`, `path/file.py:function`, `module:function`, or one of these with
#: settings: `{name: {…}}`.
RewardName = str | dict[str, dict[str, Any]]
RewardNames = Annotated[tuple[RewardName, ...], BeforeValidator(_one_or_many)]


class RewardedArguments(TrainingArguments):
    """Options of the methods whose completions get rewards."""

    ALIASES: ClassVar[dict[str, str]] = {
        **TrainingArguments.ALIASES,
        "reward_funcs": "reward_functions",
        "kl_coef": "beta",
    }

    beta: NotNegative = 0.04
    """How much the divergence from the reference counts; 0 reads no reference."""
    reward_functions: RewardNames = ()
    """What scores completions: `path/file.py:function` or `module:function`, searched in the run
    file's folder and the working directory; a rule (`exact`, `number`, `regex`, `math_answer`,
    `format`); or an entry point of `easydel.rewards`; with settings as
    `{NAME: {setting: value}}`. The section `reward_model` comes after them."""
    reward_weights: tuple[float, ...] | None = None
    """Factor on each reward, the reward model's last; None is 1 for all."""

    @property
    def has_reference(self) -> bool:
        """Whether the method reads a reference."""
        return self.beta > 0

    @property
    def without_reference(self) -> str:
        """The option that turns the reference off, for messages."""
        return "beta 0"

    @field_validator("beta")
    @classmethod
    def _something_can_move(cls, value: float, info: ValidationInfo) -> float:
        if value == 0 and info.data.get("sync_ref_model"):
            raise conflict(
                "with beta 0 there is no reference that sync_ref_model could move: set beta above "
                "0, or leave sync_ref_model out"
            )
        return value

    @field_validator("reward_functions")
    @classmethod
    def _are_names(cls, value: tuple[RewardName, ...]) -> tuple[RewardName, ...]:
        for entry in value:
            if isinstance(entry, dict) and len(entry) != 1:
                raise conflict(
                    f"{entry} is no reward function: write NAME, or NAME with its settings, "
                    "{NAME: {setting: value}}"
                )
        return value

    @field_validator("reward_weights")
    @classmethod
    def _one_each(
        cls, value: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        functions = len(info.data.get("reward_functions", ()))
        # Without names here the functions may be given to the trainer, which checks.
        if value is not None and functions and len(value) not in (functions, functions + 1):
            raise conflict(
                f"{len(value)} reward_weights for {functions} reward_functions: give one each, and "
                "one more for a reward model"
            )
        return value
