"""The methods and their options, one class each. Imports neither jax nor flax.

A new method is one file with its trainer in `ed_trainers.methods`, its options in
`ed_trainers.options`, which is free of jax as this file is, and here its row in `METHODS`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from ed_infra.enums import TaskType
from ed_infra.errors import unknown_name
from ed_infra.options import Positive

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.distillation import DistillationArguments, SeqKDArguments
from ed_trainers.options.embedding import EmbeddingArguments
from ed_trainers.options.gkd import GKDArguments
from ed_trainers.options.groups import GRPOArguments, RLOOArguments, RLVRArguments
from ed_trainers.options.labels import BCOArguments, KTOArguments
from ed_trainers.options.next_token import NextTokenArguments
from ed_trainers.options.optimizers import DECAYING, OPTIMIZERS
from ed_trainers.options.ppo import PPOArguments
from ed_trainers.options.preference import CPOArguments, DPOArguments, ORPOArguments, SimPOArguments
from ed_trainers.options.scores import PRMArguments, RewardArguments
from ed_trainers.options.self_play import NashMDArguments, XPOArguments

__all__ = [
    "ARGUMENTS",
    "METHODS",
    "OPTIMIZERS",
    "DPOArguments",
    "SFTArguments",
    "TrainingArguments",
    "arguments_class",
    "idle_options",
    "method",
]


class SFTArguments(NextTokenArguments):
    """Supervised fine-tuning, and pre-training: the cross-entropy of the labels."""

    trainer_type: Literal["sft"] = "sft"
    learning_rate: Positive = 2e-5


class MethodEntry(NamedTuple):
    """A method, for whoever builds its trainer.

    Attributes:
        arguments: its options.
        trainer: where its trainer is.
        rows: kind of the rows of its data, the name of a schema of `ed_data.schema`.
        needs: the frozen models that it cannot do without.
        may_read: the frozen models that it can also do without.
        task: what its model is for, a `TaskType`.
        other_tasks: further tasks of models that it trains.
        labels: outputs of the model's head, where it is no language model.
        samples: whether it learns from completions of its own: its trainer takes a `rollout`.
    """

    arguments: type[TrainingArguments]
    trainer: str
    rows: str = "text"
    needs: tuple[str, ...] = ()
    may_read: tuple[str, ...] = ()
    task: TaskType = TaskType.CAUSAL_LM
    other_tasks: tuple[TaskType, ...] = ()
    labels: int | None = None
    samples: bool = False


#: `trainer_type` -> the method.
METHODS: dict[str, MethodEntry] = {
    "sft": MethodEntry(
        SFTArguments,
        "ed_trainers.methods.sft:SFTTrainer",
        other_tasks=(TaskType.SEQUENCE_TO_SEQUENCE, TaskType.IMAGE_TEXT_TO_TEXT),
    ),
    "dpo": MethodEntry(
        DPOArguments,
        "ed_trainers.methods.dpo:DPOTrainer",
        rows="preference",
        may_read=("reference",),
    ),
    "orpo": MethodEntry(ORPOArguments, "ed_trainers.methods.orpo:ORPOTrainer", rows="preference"),
    "cpo": MethodEntry(CPOArguments, "ed_trainers.methods.cpo:CPOTrainer", rows="preference"),
    "simpo": MethodEntry(
        SimPOArguments, "ed_trainers.methods.simpo:SimPOTrainer", rows="preference"
    ),
    "kto": MethodEntry(
        KTOArguments,
        "ed_trainers.methods.kto:KTOTrainer",
        rows="labelled",
        may_read=("reference",),
    ),
    "bco": MethodEntry(
        BCOArguments,
        "ed_trainers.methods.bco:BCOTrainer",
        rows="labelled",
        may_read=("reference",),
    ),
    "reward": MethodEntry(
        RewardArguments,
        "ed_trainers.methods.reward:RewardTrainer",
        rows="reward",
        task=TaskType.SEQUENCE_CLASSIFICATION,
        labels=1,
    ),
    "distillation": MethodEntry(
        DistillationArguments,
        "ed_trainers.methods.distillation:DistillationTrainer",
        needs=("teacher",),
    ),
    "seq_kd": MethodEntry(
        SeqKDArguments,
        "ed_trainers.methods.seq_kd:SeqKDTrainer",
        rows="prompt",
        needs=("teacher",),
    ),
    "embedding": MethodEntry(
        EmbeddingArguments,
        "ed_trainers.methods.embedding:EmbeddingTrainer",
        rows="embedding",
        task=TaskType.EMBEDDING,
    ),
    "grpo": MethodEntry(
        GRPOArguments,
        "ed_trainers.methods.grpo:GRPOTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "rloo": MethodEntry(
        RLOOArguments,
        "ed_trainers.methods.rloo:RLOOTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "rlvr": MethodEntry(
        RLVRArguments,
        "ed_trainers.methods.rlvr:RLVRTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "ppo": MethodEntry(
        PPOArguments,
        "ed_trainers.methods.ppo:PPOTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "gkd": MethodEntry(
        GKDArguments,
        "ed_trainers.methods.gkd:GKDTrainer",
        rows="prompt",
        needs=("teacher",),
        samples=True,
    ),
    "xpo": MethodEntry(
        XPOArguments,
        "ed_trainers.methods.xpo:XPOTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "nash_md": MethodEntry(
        NashMDArguments,
        "ed_trainers.methods.nash_md:NashMDTrainer",
        rows="prompt",
        may_read=("reference", "reward"),
        samples=True,
    ),
    "prm": MethodEntry(
        PRMArguments,
        "ed_trainers.methods.prm:PRMTrainer",
        rows="steps",
        task=TaskType.SEQUENCE_CLASSIFICATION,
        labels=2,
    ),
}

# Option -> options that do nothing without it.
_NEEDED = {
    "generation_interval": (
        "generation_prompts",
        "generation_num_prompts",
        "generation_max_new_tokens",
        "generation_temperature",
        "generation_top_p",
    ),
    "benchmark_interval": ("benchmarks",),
    "benchmarks": ("benchmark_interval",),
    "profile_start_step": ("profile_steps",),
}

#: `trainer_type` -> its options.
ARGUMENTS: dict[str, type[TrainingArguments]] = {
    name: entry.arguments for name, entry in METHODS.items()
}


def method(trainer_type: str) -> MethodEntry:
    """Return the entry of a method.

    Raises:
        ConfigError: the method is not known.
    """
    if not isinstance(trainer_type, str) or trainer_type not in METHODS:
        raise unknown_name("trainer_type", trainer_type, METHODS)
    return METHODS[trainer_type]


def arguments_class(trainer_type: str) -> type[TrainingArguments]:
    """Return the options of a method.

    Raises:
        ConfigError: the method is not known.
    """
    return method(trainer_type).arguments


def idle_options(arguments: TrainingArguments) -> list[tuple[str, str]]:
    """Return the options that do nothing in a run with these arguments, each with the reason.

    They are no errors: a run file may keep them for a longer run. Whoever reads the file warns
    about those that it sets, with their line.
    """
    idle = arguments.idle()
    steps = arguments.max_training_steps
    if steps is not None:
        if "num_train_epochs" in arguments.model_fields_set:
            idle.append(("num_train_epochs", f"max_training_steps ({steps}) sets the length"))
        if arguments.warmup_steps >= steps:
            why = f"the run ends after {steps} steps, within the warm-up"
            idle.append(("warmup_steps", f"{why}: the learning rate only rises"))
            if arguments.scheduler in DECAYING:
                idle.append(("scheduler", f"{why}: the learning rate never decays"))
        for name in ("save_steps", "evaluation_steps", "generation_interval", "benchmark_interval"):
            every = getattr(arguments, name)
            if every is not None and every > steps:
                idle.append((name, f"the run ends after {steps} steps, at the end it acts anyway"))
    settings = arguments.optimizer_kwargs
    if arguments.optimizer == "sgd" and settings.get("nesterov") and not settings.get("momentum"):
        why = "nesterov is a kind of momentum, and sgd has none here: set momentum as well"
        idle.append(("optimizer_kwargs", why))
    if not arguments.skip_bad_steps:
        for name in ("sigma_factor", "rolling_interval_length"):
            if name in arguments.model_fields_set:
                idle.append((name, "skip_bad_steps is false: no step is skipped"))
    if not arguments.report_to:
        for name in ("project", "run_name"):
            if name in arguments.model_fields_set:
                idle.append((name, "report_to names no tracker"))
    return idle + _idle_probes(arguments)


def _idle_probes(arguments: TrainingArguments) -> list[tuple[str, str]]:
    """The idle options of previews, benchmarks and the profiler."""
    idle = []
    for needed, names in _NEEDED.items():
        if not getattr(arguments, needed):
            here = [name for name in names if name in arguments.model_fields_set]
            idle += [(name, f"{needed} is not set") for name in here]
    if arguments.generation_prompts and "generation_num_prompts" in arguments.model_fields_set:
        idle.append(("generation_num_prompts", "generation_prompts says which there are"))
    if not arguments.generation_temperature and arguments.generation_top_p < 1:
        idle.append(("generation_top_p", "generation_temperature is 0: nothing is sampled"))
    steps, first = arguments.max_training_steps, arguments.profile_start_step
    if steps is not None and first is not None and first > steps:
        idle.append(("profile_start_step", f"the run ends after {steps} steps"))
    return idle
