"""Checks of what options of the trainer require: sizes of the models, steps, rewards.

Each check repeats, for a run file, a condition that a trainer checks when it starts. As in
`ed_elarge.config.checks.training`, functions yield problems whose paths start at the sections. A
value that is unknown without a download is not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ed_trainers.options.distillation import DistillationArguments, GKDArguments
from ed_trainers.options.groups import GRPOArguments
from ed_trainers.options.online import OnlineArguments, RewardedArguments
from ed_trainers.options.supervised import MSE, EmbeddingArguments, SFTArguments

from ed_elarge.config.checkpoint_tasks import read_task_config
from ed_elarge.config.run_config import RunConfig
from ed_elarge.errors import Problem, ValuePath

#: Field of the rows with the completions of `gkd`.
_COMPLETION = "completion"


def check_requirements(run: RunConfig) -> Iterator[Problem]:
    """Yield the problems of a run that trains."""
    if run.trainer is None or not run.will("train") or run.is_broken("trainer"):
        return
    yield from _steps(run)
    yield from _lengths(run)
    yield from _reward_weights(run)
    yield from _sampling(run)
    yield from _teacher(run)
    yield from _sizes(run)
    yield from _transcripts(run)


def _steps(run: RunConfig) -> Iterator[Problem]:
    trainer = run.trainer
    assert trainer is not None
    point, total = trainer.step_start_point, trainer.max_training_steps
    if point is not None and total is not None and point >= total:
        message = (
            f"{point} leaves no step of a run of {total} steps: lower it, or raise "
            "max_training_steps"
        )
        yield Problem(("trainer", "step_start_point"), message)


def _lengths(run: RunConfig) -> Iterator[Problem]:
    """Check that a prompt with its completion has no more tokens than the model has positions."""
    trainer, limit = run.trainer, run.known_positions
    if not isinstance(trainer, OnlineArguments) or limit is None or trainer.row_length <= limit:
        return
    message = (
        f"prompts and completions need up to {trainer.row_length} tokens (max_prompt_length "
        f"{trainer.max_prompt_length} + max_completion_length {trainer.max_completion_length}), "
        f"and the model has max_position_embeddings {limit}: lower one of them"
    )
    given = trainer.model_fields_set
    names = ("max_completion_length", "max_prompt_length")
    name = next((name for name in names if name in given), "trainer_type")
    yield Problem(("trainer", name), message)


def read_data_completions(run: RunConfig) -> Iterator[Problem]:
    """Yield advice about rows that have to contain completions."""
    trainer, mixture = run.trainer, run.mixture
    if not isinstance(trainer, GKDArguments) or mixture is None or not run.will("train"):
        return
    named = any(_COMPLETION in inform.additional_fields for inform in mixture.informs)
    if trainer.lmbda == 1 or trainer.seq_kd or named:
        return
    message = (
        f"with {trainer.lmbda:g} the data complete {1 - trainer.lmbda:.0%} of the generations, so "
        "each row has to be a conversation that ends with an answer. For other rows write "
        f"additional_fields: [{_COMPLETION}] in the entries of mixture.informs; or set seq_kd for "
        "completions of the teacher, or lmbda 1 for those of the learner"
    )
    yield Problem(("trainer", "lmbda"), message)


def _reward_weights(run: RunConfig) -> Iterator[Problem]:
    trainer, section = run.trainer, run.asynchronous
    has_environment = section is not None and section.environment is not None
    if not isinstance(trainer, RewardedArguments) or trainer.reward_weights is None:
        return
    has_model = "reward_model" in run.written
    count = len(trainer.reward_functions) + has_model
    if has_environment or not count or len(trainer.reward_weights) == count:
        return
    model = " and the reward model" if has_model else ", without a reward model"
    message = (
        f"{len(trainer.reward_weights)} weights for {len(trainer.reward_functions)} "
        f"reward_functions{model}: set {count}"
    )
    yield Problem(("trainer", "reward_weights"), message)


def _sampling(run: RunConfig) -> Iterator[Problem]:
    trainer = run.trainer
    if isinstance(trainer, GKDArguments) and run.asynchronous is not None:
        message = (
            f"{run.method} decides for each generation how prompts are completed, so its prompts "
            "cannot be issued ahead: omit the section"
        )
        yield Problem(("asynchronous",), message, True)
    if isinstance(trainer, GRPOArguments) and trainer.routing_replay:
        config = _text_config(run.known_model)
        has_experts = any("expert" in str(name) and value for name, value in config.items())
        if config.get("model_type") and not has_experts:
            message = f"a {config['model_type']} has no experts: omit routing_replay"
            yield Problem(("trainer", "routing_replay"), message)


def _teacher(run: RunConfig) -> Iterator[Problem]:
    """Check that `embedding` has a teacher exactly if its loss compares with one."""
    trainer = run.trainer
    if not isinstance(trainer, EmbeddingArguments):
        return
    has_teacher = "teacher_model" in run.written
    if has_teacher != (trainer.loss_type == MSE):
        change = "omit the section teacher_model" if has_teacher else "add the section"
        verb = "reads no teacher" if has_teacher else "needs the section teacher_model"
        path = ("trainer", "loss_type") if "loss_type" in trainer.model_fields_set else ("trainer",)
        yield Problem(path, f"loss_type {trainer.loss_type} {verb}: {change}")


def _sizes(run: RunConfig) -> Iterator[Problem]:
    """Check layers, widths and heads that options compare with those of the models."""
    trainer, config = run.trainer, _text_config(run.known_model)
    width, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    if isinstance(trainer, EmbeddingArguments) and type(width) is int:
        for number, dims in enumerate(trainer.matryoshka_dims):
            if dims > width:
                path: ValuePath = ("trainer", "matryoshka_dims", number)
                yield Problem(path, f"{dims} is more than the {width} numbers of an embedding")
    if not isinstance(trainer, DistillationArguments):
        return
    for name in ("hidden_state_layers", "attention_layers"):
        for number, layer in enumerate(getattr(trainer, name) or ()):
            if type(layers) is int and layer > layers:
                message = f"{layer} is more than the {layers} layers of the student"
                yield Problem(("trainer", name, number), message)
    section = run.sections.get("teacher_model")
    address = getattr(section, "name_or_path", None)
    teacher = _text_config(read_task_config(address, None) if address else None)
    for option, size in (
        ("hidden_state_loss_weight", "hidden_size"),
        ("attention_loss_weight", "num_attention_heads"),
    ):
        own, other = config.get(size), teacher.get(size)
        if getattr(trainer, option) and own and other and own != other:
            message = f"the models need the same {size}: the student has {own}, the teacher {other}"
            yield Problem(("trainer", option), message)


def _transcripts(run: RunConfig) -> Iterator[Problem]:
    trainer = run.trainer
    if not isinstance(trainer, SFTArguments) or not run.has_valid_task:
        return
    if trainer.predict_with_generate and not (run.has_audio or run.has_recordings):
        message = "transcribes recordings, and the model reads none: omit the key"
        yield Problem(("trainer", "predict_with_generate"), message)


def _text_config(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    inner = (config or {}).get("text_config")
    return inner if isinstance(inner, Mapping) else config or {}
