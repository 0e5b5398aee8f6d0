"""Options of the methods that train on sampled completions. Free of jax.

`ed_trainers.options.groups` has the methods that compare several completions of a prompt. Names are
EasyDeL's if EasyDeL has the option, otherwise TRL's; other spellings are aliases. Defaults of
`ppo`, `xpo` and `nash_md` are TRL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from ed_infra.options import Count, Fraction, NotNegative, Options, Positive, Whole, choice
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from ed_trainers.options.base import Mixup, StrictFlag, TrainingArguments, conflict
from ed_trainers.options.optimizers import Steps

#: The bounds of the engine: it takes the most probable token below 1e-5.
SamplingTemperature = Annotated[float, Field(ge=1e-5, le=1e6)]
#: A positive weight rewards policies that keep several continuations probable.
EntropyWeight = Annotated[float, Field(ge=-1e6, le=1e6)]


def _one_or_many(value: object) -> object:
    return (value,) if isinstance(value, str | dict) else value


def _has_one_name(entry: str | dict[str, dict[str, Any]]) -> str | dict[str, dict[str, Any]]:
    if isinstance(entry, dict) and len(entry) != 1:
        raise conflict(
            f"{entry} has {len(entry)} names: write NAME, or one name with its settings, "
            "{NAME: {setting: value}}"
        )
    return entry


#: A class, a name of `ed_trainers.environments.ADAPTERS`, or one of these with settings.
EnvironmentName = Annotated[str | dict[str, dict[str, Any]], AfterValidator(_has_one_name)]
#: A function `path/file.py:function` or `module:function`, or `{mcp: {…}}`.
TrainingTool = Annotated[
    Annotated[str, Field(pattern=r":\w+(\.\w+)*$")] | dict[Literal["mcp"], dict[str, Any]],
    AfterValidator(_has_one_name),
]
TrainingTools = Annotated[tuple[TrainingTool, ...], BeforeValidator(_one_or_many)]


class OnlineArguments(TrainingArguments):
    """Options of sampling, and of the training steps per generation."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "max_new_tokens": "max_completion_length",
        "num_completions_to_print": "num_completions_to_log",
    }
    #: Option that sets `rows_per_prompt`, for messages.
    ROWS_OPTION: ClassVar[str] = "num_return_sequences"
    DEFAULT_LENGTH = 1024

    learning_rate: Positive = 1e-6

    max_prompt_length: Count = 512
    """Maximum number of prompt tokens; longer prompts keep their last tokens."""
    max_completion_length: Count = 256
    """Maximum number of tokens of a completion."""
    temperature: SamplingTemperature = 1.0
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
    lmhead_chunksize: Count | None = None
    """Number of tokens whose logits exist at the same time; None: chosen by the loss."""
    num_completions_to_log: Annotated[int, Field(ge=0, le=1 << 20)] = 16
    """Number of completions of a generation that are written to `completions.jsonl` with their
    rewards at a logged step; 0: none."""
    environment: EnvironmentName | None = None
    """The environment that replies to the messages of the model: a class, `path/file.py:Class` or
    `module:Class`; an adapter (`gymnasium`, `openenv`, `verifiers`); or an entry point of
    `easydel.environments`. Settings are written as `{NAME: {setting: value}}`. None: a completion
    is one message."""
    max_turns: Count | None = None
    """Maximum number of messages of the model in a completion; None: only `max_completion_length`
    limits them."""
    tools: TrainingTools = ()
    """Functions that the model may call, `path/file.py:function` or `module:function`, searched as
    `reward_functions` are; or the tools of an MCP server, `{mcp: {command: …, args: […]}}` or
    `{mcp: {url: …}}`. The prompts contain their signatures and docstrings, and the model reads
    their results. A completion ends with the first message without a call."""
    tool_timeout: Positive = 30.0
    """Maximum duration of a call of a tool in seconds; then the model reads an error."""
    tool_format: str = "auto"
    """Format of the calls in the replies of the model: a value of the server's `tool_parser_name`.
    `auto`: the format of the chat template."""

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
        return self.sequences_per_step * self.steps_per_generation // self.rows_per_prompt

    @property
    def completions_per_generation(self) -> int:
        """Number of completions that a generation samples."""
        return self.loader_batch_size * self.rows_per_prompt * self.completions_per_row

    @property
    def rounds_per_generation(self) -> int:
        """Largest number of batches of prompts that a generation completes."""
        return 1

    @property
    def updates_per_generation(self) -> int:
        """Number of optimizer steps between two generations."""
        return self.steps_per_generation * self.num_iterations

    @property
    def row_length(self) -> int:
        """Number of positions of a row: maximum prompt plus maximum completion."""
        return self.max_prompt_length + self.max_completion_length

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        idle_options = super().idle()
        if not self.tools and self.environment is None:  # an environment may have tools
            names = {"tool_timeout", "tool_format"} & self.model_fields_set
            idle_options += [(name, "there are no tools") for name in sorted(names)]
        has_replies = bool(self.tools) or self.environment is not None
        if not has_replies and "max_turns" in self.model_fields_set:
            idle_options.append(("max_turns", "there is no environment to reply, and no tools"))
        return idle_options

    @model_validator(mode="after")
    def _prompts_are_whole(self) -> Self:
        rows = self.sequences_per_step * self.steps_per_generation
        if rows % self.rows_per_prompt:
            raise conflict(
                f"total_batch_size {self.total_batch_size} times steps_per_generation "
                f"{self.steps_per_generation} is not a multiple of {self.ROWS_OPTION} "
                f"{self.rows_per_prompt}: total_batch_size counts completions, and each prompt has "
                f"{self.ROWS_OPTION} of them. To count prompts, set batch_unit: prompts"
            )
        return self


#: A rule of `ed_trainers.rewards`, `path/file.py:function`, `module:function`, or one of these with
#: settings: `{name: {…}}`.
RewardName = str | dict[str, dict[str, Any]]
RewardNames = Annotated[tuple[RewardName, ...], BeforeValidator(_one_or_many)]


class Support(NamedTuple):
    """The tokens whose probabilities a divergence compares.

    Attributes:
        top_k: number of most probable tokens.
        add_tail: whether the probability of all other tokens is compared too; otherwise the
            probabilities of the tokens are normalized.
        from_student: whether the tokens are the student's most probable ones, or the teacher's.
    """

    top_k: int
    add_tail: bool
    from_student: bool = False


def with_fields(*names: str) -> AfterValidator:
    """Return a validator of a template with exactly these fields."""

    def check(text: str) -> str:
        try:
            template_fields = {
                name for _, name, _, _ in Formatter().parse(text) if name is not None
            }
        except ValueError as error:
            raise conflict(f"{text!r} is no template: {error}") from error
        if template_fields != {*names}:
            expected_fields = ", ".join(f"{{{name}}}" for name in names)
            raise conflict(f"{text!r} must have the fields {expected_fields}, and no others")
        return text

    return AfterValidator(check)


class SelfDistillationArguments(Options):
    """Options of the methods whose teacher is the learner with a longer prompt."""

    EQUIVALENT: ClassVar[Mapping[str, str]] = {
        "use_teacher_server": "omit it: the teacher is always on the devices of the run",
    }

    distillation_mode: Literal["sampled_token", "full_logits", "topk_logits"] = "sampled_token"
    """Compared probabilities: those of the sampled tokens, of the vocabulary, or of the student's
    `distillation_topk` most probable tokens."""
    distillation_alpha: Fraction = 1.0
    """Kind of divergence: 0 is forward, KL(teacher || student); 1 is reverse; values between are
    the generalized Jensen-Shannon divergence. `sampled_token` needs 1."""
    distillation_topk: Count | None = None
    """Number of compared tokens of `topk_logits`."""
    distillation_add_tail: StrictFlag = False
    """`topk_logits`: also compare the total probability of all other tokens. False: the
    probabilities of the compared tokens are normalized to the sum 1."""
    distillation_is_clip: Positive | None = 2.0
    """Largest ratio of the learner's probability of a token to that when the token was sampled,
    which weights the distillation of the token. None: no weights."""
    teacher_model_kind: Literal["ema", "base", "live"] = "ema"
    """Weights of the teacher: a running mean of the learner's, the learner's before training, or
    its present ones."""
    teacher_update_rate: Mixup = 0.05
    """Weight of the learner in each update of the teacher `ema`."""
    teacher_sync_steps: Steps = 1
    """Steps between two updates of the teacher `ema`."""

    @field_validator("distillation_alpha")
    @classmethod
    def _is_reverse(cls, value: float, info: ValidationInfo) -> float:
        if value != 1 and info.data.get("distillation_mode", "sampled_token") == "sampled_token":
            raise conflict(
                "the sampled tokens estimate the reverse divergence only: omit "
                "distillation_alpha, or use distillation_mode full_logits or topk_logits"
            )
        return value

    @field_validator("distillation_topk", "distillation_add_tail")
    @classmethod
    def _has_a_support(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("distillation_mode") != "topk_logits":
            raise conflict(f"only distillation_mode topk_logits reads {info.field_name}: omit it")
        return value

    @property
    def distills(self) -> bool:
        """Whether there is a distillation."""
        return True

    @property
    def support(self) -> Support | None:
        """The tokens that are compared; None: the vocabulary."""
        if self.distillation_topk is None:
            return None
        return Support(self.distillation_topk, self.distillation_add_tail, from_student=True)

    def list_idle_teacher_options(self) -> dict[str, str]:
        """Return the options of the teacher without effect, and the reasons."""
        if self.teacher_model_kind == "ema":
            return {}
        reason = f"the teacher is {self.teacher_model_kind}"
        return {"teacher_update_rate": reason, "teacher_sync_steps": reason}


class SyncArguments(Options):
    """TR-DPO (Gorbatovski et al., arXiv:2404.09656)."""

    sync_ref_model: StrictFlag = False
    """Update the reference from the learner. The weights of the reference are then part of the
    checkpoints. Not for models with adapters, whose reference is the base model."""
    ref_model_mixup_alpha: Mixup = 0.6
    """Weight of the learner in each update of the reference; the rest is the weight of the old
    reference. 1 copies the learner."""
    ref_model_sync_steps: Steps = 512
    """Steps between two updates of the reference."""


class RewardedArguments(Options):
    """Options of the methods with rewards of completions."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "reward_funcs": "reward_functions",
        "kl_coef": "beta",
    }

    beta: NotNegative = 0.04
    """Weight of the divergence from the reference; 0: no reference."""
    reward_functions: RewardNames = ()
    """Functions that score completions: `path/file.py:function` or `module:function`, searched in
    the folder of the run file and in the working directory; a rule (`exact`, `number`, `regex`,
    `math_answer`, `math_verify`, `code`, `judge`, `format`, `length`, `overlong`, `repetition`); or
    an entry point of `easydel.rewards`. Settings are written
    as `{NAME: {setting: value}}`. The model of the section `reward_model` is the last reward."""
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


class ScoredArguments(RewardedArguments, SyncArguments):
    """Options of `ppo`, `xpo` and `nash_md`, which do not compare the rewards of a group."""

    missing_eos_penalty: NotNegative | None = None
    """Subtracted from the score of a completion that reached the maximum length."""


KL_ESTIMATORS = ("k1", "k2", "k3")


class PPOArguments(ScoredArguments, OnlineArguments):
    """Proximal policy optimization (Schulman et al., arXiv:1707.06347) with a value head."""

    ALIASES: ClassVar[Mapping[str, str]] = {
        "num_ppo_epochs": "num_iterations",
        "num_mini_batches": "steps_per_generation",
        "response_length": "max_completion_length",
        "num_generations": "num_return_sequences",
    }

    trainer_type: Literal["ppo"] = "ppo"
    num_return_sequences: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of completions per prompt. Each completion has its own values and advantages."""
    batch_unit: Literal["completions", "prompts"] = "completions"
    """The unit of `total_batch_size`: completions, or prompts, as in EasyDeL."""
    num_iterations: Count = 4
    """Number of times that the completions of a generation are used for training."""
    beta: NotNegative = 0.05
    """Weight of the divergence from the reference, which is subtracted from the reward of each
    token; 0: no reference."""
    kl_estimator: Annotated[str, choice("kl_estimator", KL_ESTIMATORS)] = "k1"
    """Estimator of the divergence of a token (Schulman, joschu.net/blog/kl-approx.html): `k1` is
    the log-ratio, `k2` half its square; `k3` is unbiased and never negative."""
    cliprange: Positive = 0.2
    """Clipping range of the probability ratio around 1."""
    vf_coef: NotNegative = 0.1
    """Weight of the loss of the values."""
    entropy_coef: EntropyWeight | None = None
    """Weight of the mean entropy of the tokens, which is subtracted from the loss. None: 0."""
    cliprange_value: Positive = 0.2
    """Clipping range of a value around its value at the time of sampling."""
    gamma: Fraction = 1.0
    """Discount factor per token."""
    lam: Fraction = 0.95
    """Lambda of generalized advantage estimation (arXiv:1506.02438): 1 uses whole returns, 0 single
    steps."""
    whiten_rewards: StrictFlag = False
    """Scale the token rewards of a generation to unit variance."""
    whiten_advantages: StrictFlag = True
    """Scale the advantages of a generation to mean 0 and unit variance."""
    value_head: str | None = None
    """Directory of a model that `ppo` saved, for the initial value head. None: initial values of
    0."""

    @property
    def rows_per_prompt(self) -> int:
        """See `OnlineArguments`."""
        return self.num_return_sequences

    @property
    def sequences_per_unit(self) -> int:
        """See `TrainingArguments`."""
        return self.rows_per_prompt if self.batch_unit == "prompts" else 1

    def idle(self) -> list[tuple[str, str]]:
        """See `TrainingArguments.idle`."""
        if self.has_reference or "kl_estimator" not in self.model_fields_set:
            return super().idle()
        return [*super().idle(), ("kl_estimator", "beta is 0: nothing is taken off")]


XPO_LOSSES = ("sigmoid", "ipo")


class SelfPlayArguments(ScoredArguments):
    """Options of `xpo` and `nash_md`."""

    beta: Positive = 0.1
    """Weight of log-ratios to the reference: a higher value keeps the model nearer to the
    reference."""
    judge: str | None = None
    """Function that compares two completions of each prompt, instead of scores:
    `path/file.py:function` or `module:function`, found and called like reward functions. It
    receives `completions` of the learner and `others` of the other policy, and returns for each
    prompt the probability that the learner's completion is better."""

    @field_validator("judge")
    @classmethod
    def _no_scores(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("reward_functions"):
            raise conflict("judge compares completions, reward_functions score them: set one")
        if value is not None and info.data.get("missing_eos_penalty") is not None:
            raise conflict(
                "missing_eos_penalty is subtracted from scores, and a judge returns no scores"
            )
        return value


class XPOArguments(SelfPlayArguments, OnlineArguments):
    """Exploratory preference optimization (Xie et al., arXiv:2405.21046)."""

    trainer_type: Literal["xpo"] = "xpo"
    alpha: NotNegative = 1e-5
    """Weight of the exploration term, which lowers the probability of the reference's
    completions."""
    loss_type: Annotated[str, choice("loss_type", XPO_LOSSES)] = "sigmoid"
    """The loss of a pair, as in `dpo`."""


class NashMDArguments(SelfPlayArguments, OnlineArguments):
    """Nash learning from human feedback by mirror descent (Munos et al., arXiv:2312.00886)."""

    trainer_type: Literal["nash_md"] = "nash_md"
    mixture_coef: Fraction = 0.5
    """Weight of the reference in the geometric mixture that the learner competes with: 0 is the
    learner, 1 the reference."""
