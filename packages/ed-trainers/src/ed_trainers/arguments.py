"""The table of methods. Imports neither jax nor flax.

A package adds a method with one file and one entry point of the group `easydel.methods`, which
names a `MethodEntry`. A method of this package is two files: its functions are in
`ed_trainers.methods`, and its options in the file of its family in `ed_trainers.options`. An entry
of this file names both.

A role is a frozen model that a method reads, with one entry in `ROLES`. Its name is the key of
`frozen=` of a trainer and of `models[...]` in a loss, and with the suffix `_model` the section of a
run file. The learner, the policy, has no entry. Further trained variables, such as a value head,
are an `Extension` of a method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple

from ed_infra import lazy
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, did_you_mean, unknown_name

from ed_trainers.options.base import TrainingArguments
from ed_trainers.options.distillation import (
    DistillationArguments,
    DraftArguments,
    GKDArguments,
    IWOPDArguments,
    OnPolicyDistillationArguments,
    SDFTArguments,
    SeqKDArguments,
    SparseDistillationArguments,
)
from ed_trainers.options.groups import (
    GFPOArguments,
    GRPOArguments,
    GSPOArguments,
    RLOOArguments,
    RLVRArguments,
    SDPOArguments,
)
from ed_trainers.options.online import NashMDArguments, PPOArguments, XPOArguments
from ed_trainers.options.optimizers import DECAYING, OPTIMIZERS
from ed_trainers.options.preference import (
    BCOArguments,
    CPOArguments,
    DPOArguments,
    KTOArguments,
    ORPOArguments,
    PRMArguments,
    RewardArguments,
    SimPOArguments,
    TPOArguments,
)
from ed_trainers.options.supervised import (
    ContrastiveArguments,
    CrossEncoderArguments,
    CTCArguments,
    EmbeddingArguments,
    ImageClassificationArguments,
    MLMArguments,
    MultipleChoiceArguments,
    QuestionAnsweringArguments,
    SequenceClassificationArguments,
    SFTArguments,
    SpanCorruptionArguments,
    TokenClassificationArguments,
)

__all__ = [
    "ARGUMENTS",
    "METHODS",
    "OPTIMIZERS",
    "OWN_NAMES",
    "ROLES",
    "DPOArguments",
    "MethodEntry",
    "Role",
    "SFTArguments",
    "TrainingArguments",
    "arguments_class",
    "idle_options",
    "method",
]

#: Group of entry points for methods of other packages.
_GROUP = "easydel.methods"


class Role(NamedTuple):
    """A frozen model that a method reads.

    Attributes:
        name: the name of the role.
        required: whether the method needs the model.
        task: the task of the model.
    """

    name: str
    required: bool = False
    task: TaskType = TaskType.CAUSAL_LM

    @property
    def section(self) -> str:
        """The section of a run file that names the model."""
        return f"{self.name}_model"


REFERENCE_ROLE = Role("reference")
TEACHER_ROLE = Role("teacher", required=True)
REWARD_ROLE = Role("reward", task=TaskType.SEQUENCE_CLASSIFICATION)

#: Roles by name; each one is a section of run files.
ROLES = {role.name: role for role in (REFERENCE_ROLE, TEACHER_ROLE, REWARD_ROLE)}


@dataclass(frozen=True)
class MethodEntry:
    """An entry of the table of methods: options, record of functions, models and data.

    Attributes:
        arguments: Class of the options.
        method: The `ed_trainers.contract.Method`, or the location `module:NAME` of the method or of
            its trainer class. A location does not import jax.
        rows: Kind of the rows of the data, the name of a schema of `ed_data.schema`.
        roles: Frozen models that the method reads.
        task: Task of the trained models.
        other_tasks: Further tasks of trained models.
        labels: Number of outputs of the model's head, if the model is not a language model.
        special_tokens: Special tokens of a tokenizer that the run trains.
        samples: Whether the method trains on sampled completions. Its trainer needs a `rollout`.
    """

    arguments: type[TrainingArguments]
    method: object
    rows: str = "text"
    roles: tuple[Role, ...] = ()
    task: TaskType = TaskType.CAUSAL_LM
    other_tasks: tuple[TaskType, ...] = ()
    labels: int | None = None
    special_tokens: tuple[str, ...] = ()
    samples: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the required roles."""
        return tuple(role.name for role in self.roles if role.required)

    @property
    def may_read(self) -> tuple[str, ...]:
        """Names of the optional roles."""
        return tuple(role.name for role in self.roles if not role.required)

    def load(self) -> object:
        """Return the method record, or its trainer class."""
        if not isinstance(self.method, str):
            return self.method
        module, _, name = self.method.partition(":")
        load, _, _ = lazy.attach(module, {name: self.method})
        return load(name)


def _online(
    kind: type[TrainingArguments], trainer: str, *roles: Role, images: bool = False
) -> MethodEntry:
    """Return the entry of a method that samples; `images`: whether the prompts may have images."""
    other_tasks = (TaskType.IMAGE_TEXT_TO_TEXT,) if images else ()
    return MethodEntry(kind, trainer, "prompt", roles, other_tasks=other_tasks, samples=True)


_SHIPPED: dict[str, MethodEntry] = {
    "sft": MethodEntry(
        SFTArguments,
        "ed_trainers.methods.sft:SFTTrainer",
        other_tasks=(
            TaskType.SEQUENCE_TO_SEQUENCE,
            TaskType.IMAGE_TEXT_TO_TEXT,
            TaskType.ANY_TO_ANY,
            TaskType.SPEECH_SEQUENCE_TO_SEQUENCE,
        ),
    ),
    "dpo": MethodEntry(
        DPOArguments,
        "ed_trainers.methods.dpo:DPOTrainer",
        "preference",
        (REFERENCE_ROLE,),
        other_tasks=(TaskType.SEQUENCE_TO_SEQUENCE, TaskType.IMAGE_TEXT_TO_TEXT),
    ),
    "orpo": MethodEntry(ORPOArguments, "ed_trainers.methods.orpo:ORPOTrainer", "preference"),
    "cpo": MethodEntry(CPOArguments, "ed_trainers.methods.cpo:CPOTrainer", "preference"),
    "simpo": MethodEntry(SimPOArguments, "ed_trainers.methods.cpo:SimPOTrainer", "preference"),
    "tpo": MethodEntry(TPOArguments, "ed_trainers.methods.tpo:TPOTrainer", "gold_preference"),
    "kto": MethodEntry(
        KTOArguments, "ed_trainers.methods.kto:KTOTrainer", "labelled", (REFERENCE_ROLE,)
    ),
    "bco": MethodEntry(
        BCOArguments, "ed_trainers.methods.bco:BCOTrainer", "labelled", (REFERENCE_ROLE,)
    ),
    "reward": MethodEntry(
        RewardArguments,
        "ed_trainers.methods.reward:RewardTrainer",
        "reward",
        task=TaskType.SEQUENCE_CLASSIFICATION,
        labels=1,
    ),
    "distillation": MethodEntry(
        DistillationArguments,
        "ed_trainers.methods.distillation:DistillationTrainer",
        roles=(TEACHER_ROLE,),
    ),
    "seq_kd": MethodEntry(
        SeqKDArguments, "ed_trainers.methods.seq_kd:SeqKDTrainer", "prompt", (TEACHER_ROLE,)
    ),
    "embedding": MethodEntry(
        EmbeddingArguments,
        "ed_trainers.methods.embedding:EmbeddingTrainer",
        "embedding",
        (Role("teacher", task=TaskType.EMBEDDING),),
        task=TaskType.EMBEDDING,
    ),
    "mlm": MethodEntry(MLMArguments, "ed_trainers.methods.mlm:MLMTrainer", task=TaskType.MASKED_LM),
    "span_corruption": MethodEntry(
        SpanCorruptionArguments,
        "ed_trainers.methods.span_corruption:SpanCorruptionTrainer",
        task=TaskType.SEQUENCE_TO_SEQUENCE,
        special_tokens=tuple(f"<extra_id_{number}>" for number in range(100)),
    ),
    "cross_encoder": MethodEntry(
        CrossEncoderArguments,
        "ed_trainers.methods.cross_encoder:CrossEncoderTrainer",
        "relevance",
        task=TaskType.SEQUENCE_CLASSIFICATION,
        labels=1,
    ),
    "question_answering": MethodEntry(
        QuestionAnsweringArguments,
        "ed_trainers.methods.question_answering:QuestionAnsweringTrainer",
        "question_answering",
        task=TaskType.QUESTION_ANSWERING,
    ),
    "multiple_choice": MethodEntry(
        MultipleChoiceArguments,
        "ed_trainers.methods.multiple_choice:MultipleChoiceTrainer",
        "choice",
        task=TaskType.MULTIPLE_CHOICE,
    ),
    "ctc": MethodEntry(
        CTCArguments, "ed_trainers.methods.ctc:CTCTrainer", "ctc", task=TaskType.CTC
    ),
    "sequence_classification": MethodEntry(
        SequenceClassificationArguments,
        "ed_trainers.methods.sequence_classification:SequenceClassificationTrainer",
        "classification",
        task=TaskType.SEQUENCE_CLASSIFICATION,
    ),
    "token_classification": MethodEntry(
        TokenClassificationArguments,
        "ed_trainers.methods.token_classification:TokenClassificationTrainer",
        "token_classification",
        task=TaskType.TOKEN_CLASSIFICATION,
    ),
    "image_classification": MethodEntry(
        ImageClassificationArguments,
        "ed_trainers.methods.image_classification:ImageClassificationTrainer",
        "image_classification",
        task=TaskType.IMAGE_CLASSIFICATION,
    ),
    "contrastive": MethodEntry(
        ContrastiveArguments,
        "ed_trainers.methods.contrastive:ContrastiveTrainer",
        "image_text",
        task=TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION,
    ),
    "grpo": _online(
        GRPOArguments,
        "ed_trainers.methods.grpo:GRPOTrainer",
        REFERENCE_ROLE,
        REWARD_ROLE,
        images=True,
    ),
    "gspo": _online(
        GSPOArguments,
        "ed_trainers.methods.grpo:GSPOTrainer",
        REFERENCE_ROLE,
        REWARD_ROLE,
        images=True,
    ),
    "gfpo": _online(
        GFPOArguments,
        "ed_trainers.methods.gfpo:GFPOTrainer",
        REFERENCE_ROLE,
        REWARD_ROLE,
        images=True,
    ),
    "sdpo": _online(
        SDPOArguments, "ed_trainers.methods.sdpo:SDPOTrainer", REFERENCE_ROLE, REWARD_ROLE
    ),
    "rloo": _online(
        RLOOArguments,
        "ed_trainers.methods.rloo:RLOOTrainer",
        REFERENCE_ROLE,
        REWARD_ROLE,
        images=True,
    ),
    "rlvr": _online(
        RLVRArguments,
        "ed_trainers.methods.grpo:RLVRTrainer",
        REFERENCE_ROLE,
        REWARD_ROLE,
        images=True,
    ),
    "ppo": _online(PPOArguments, "ed_trainers.methods.ppo:PPOTrainer", REFERENCE_ROLE, REWARD_ROLE),
    "gkd": _online(GKDArguments, "ed_trainers.methods.gkd:GKDTrainer", TEACHER_ROLE),
    "on_policy_distillation": _online(
        OnPolicyDistillationArguments,
        "ed_trainers.methods.gkd:OnPolicyDistillationTrainer",
        TEACHER_ROLE,
    ),
    "sparse_distillation": _online(
        SparseDistillationArguments,
        "ed_trainers.methods.gkd:SparseDistillationTrainer",
        TEACHER_ROLE,
    ),
    "draft": _online(DraftArguments, "ed_trainers.methods.draft:DraftTrainer"),
    "iw_opd": _online(IWOPDArguments, "ed_trainers.methods.iw_opd:IWOPDTrainer", TEACHER_ROLE),
    "sdft": _online(SDFTArguments, "ed_trainers.methods.sdft:SDFTTrainer"),
    "xpo": _online(XPOArguments, "ed_trainers.methods.xpo:XPOTrainer", REFERENCE_ROLE, REWARD_ROLE),
    "nash_md": _online(
        NashMDArguments, "ed_trainers.methods.nash_md:NashMDTrainer", REFERENCE_ROLE, REWARD_ROLE
    ),
    "prm": MethodEntry(
        PRMArguments,
        "ed_trainers.methods.prm:PRMTrainer",
        "steps",
        task=TaskType.SEQUENCE_CLASSIFICATION,
        labels=2,
    ),
}


class _Methods(Mapping[str, MethodEntry]):
    """The methods of this package, then those of other packages, which are imported on access."""

    def __getitem__(self, name: str) -> MethodEntry:
        return _SHIPPED[name] if name in _SHIPPED else _load_entry_point(name)

    def __iter__(self) -> Iterator[str]:
        yield from _SHIPPED
        yield from (name for name in _points() if name not in _SHIPPED)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Arguments(Mapping[str, type[TrainingArguments]]):
    """The classes of options by method."""

    def __getitem__(self, name: str) -> type[TrainingArguments]:
        return METHODS[name].arguments

    def __iter__(self) -> Iterator[str]:
        return iter(METHODS)

    def __len__(self) -> int:
        return len(METHODS)


@cache
def _points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=_GROUP)}


@cache
def _load_entry_point(name: str) -> MethodEntry:
    entry = _points()[name].load()
    if not isinstance(entry, MethodEntry):
        raise ConfigError(
            f"the entry point {name!r} of {_GROUP} is a {type(entry).__name__}: name a MethodEntry"
        )
    return entry


#: `trainer_type` -> the method.
METHODS: Mapping[str, MethodEntry] = _Methods()
#: `trainer_type` -> the options of the method.
ARGUMENTS: Mapping[str, type[TrainingArguments]] = _Arguments()

#: Name of an option in some methods -> its name in this project, which other methods have with
#: another meaning. A run file may contain both; a method with the first name ignores the second.
OWN_NAMES: dict[str, str] = {"kl_coef": "beta", "lambda_orpo": "beta"}

#: Options of the previews of a run.
PREVIEW_OPTIONS = tuple(n for n in TrainingArguments.model_fields if n.startswith("generation_"))

# Option -> options without effect unless the option is set.
_NEEDED = {
    "generation_interval": tuple(n for n in PREVIEW_OPTIONS if n != "generation_interval"),
    "weight_distribution_log_steps": ("weight_distribution_pattern",),
    "benchmark_interval": ("benchmarks", "benchmark_options"),
    "benchmarks": ("benchmark_interval",),
    "profile_start_step": ("profile_steps",),
    "sync_ref_model": ("ref_model_mixup_alpha", "ref_model_sync_steps"),
}


def method(trainer_type: str) -> MethodEntry:
    """Return the entry of a method. `nash-md` and `NASH_MD` are spellings of `nash_md`.

    Raises:
        ConfigError: The method is unknown.
    """
    if isinstance(trainer_type, str) and trainer_type not in METHODS:
        normalized_name = trainer_type.lower().replace("-", "_")
        trainer_type = normalized_name if normalized_name in METHODS else trainer_type
    if not isinstance(trainer_type, str) or trainer_type not in METHODS:
        raise unknown_name("trainer_type", trainer_type, METHODS)
    return METHODS[trainer_type]


def arguments_class(trainer_type: str) -> type[TrainingArguments]:
    """Return the options of a method.

    Raises:
        ConfigError: The method is unknown.
    """
    return method(trainer_type).arguments


def idle_options(arguments: TrainingArguments) -> list[tuple[str, str]]:
    """Return the options without effect in a run with these arguments, each with the reason.

    Such options are not errors, because a run file may keep them for a longer run. The reader of a
    run file warns about options of the file, with their line.
    """
    idle = arguments.idle()
    steps = arguments.max_training_steps
    if steps is not None:
        if "num_train_epochs" in arguments.model_fields_set:
            idle.append(("num_train_epochs", f"max_training_steps ({steps}) sets the length"))
        if "per_epoch_training_steps" in arguments.model_fields_set:
            idle.append(("per_epoch_training_steps", f"max_training_steps is {steps}"))
        if arguments.count_warmup_steps(steps) >= steps:
            reason = f"the run ends after {steps} steps, within the warm-up"
            name = "warmup_steps" if arguments.warmup_steps else "warmup_ratio"
            idle.append((name, f"{reason}: the learning rate only rises"))
            if arguments.scheduler in DECAYING:
                idle.append(("scheduler", f"{reason}: the learning rate never decays"))
        for name in ("save_steps", "evaluation_steps", "generation_interval", "benchmark_interval"):
            every = getattr(arguments, name)
            if every is not None and every > steps:
                idle.append((name, f"the run ends after {steps} steps, at the end it acts anyway"))
    settings = arguments.optimizer_kwargs
    if arguments.optimizer == "sgd" and settings.get("nesterov") and not settings.get("momentum"):
        reason = "nesterov is a kind of momentum, and sgd has none here: set momentum as well"
        idle.append(("optimizer_kwargs", reason))
    if not arguments.skip_bad_steps:
        for name in ("sigma_factor", "rolling_interval_length"):
            if name in arguments.model_fields_set:
                idle.append((name, "skip_bad_steps is false: no step is skipped"))
    if not arguments.report_to:
        for name in ("project", "run_name", "tracker_entity"):
            if name in arguments.model_fields_set:
                idle.append((name, "report_to names no tracker"))
    return idle + _idle_probes(arguments)


def _idle_probes(arguments: TrainingArguments) -> list[tuple[str, str]]:
    """Return the options of previews, benchmarks, the profiler and the reference without effect."""
    idle: list[tuple[str, str]] = []
    for needed, names in _NEEDED.items():
        needed_value = getattr(arguments, needed, True)
        if not needed_value:
            reason = f"{needed} is {'false' if needed_value is False else 'not set'}"
            idle += [(name, reason) for name in names if name in arguments.model_fields_set]
    counts = "generation_num_prompts" in arguments.model_fields_set
    if counts and arguments.generation_prompts and not arguments.generation_use_train_prompts:
        idle.append(("generation_num_prompts", "see `generation_prompts`"))
    if not arguments.generation_temperature and not arguments.generation_do_sample:
        reason = "generation_temperature is 0: nothing is sampled"
    elif arguments.generation_do_sample is False:
        reason = "generation_do_sample is false: nothing is sampled"
    else:
        reason = ""
    for name, neutral in (("generation_top_p", 1.0), ("generation_top_k", 0)):
        if reason and getattr(arguments, name) != neutral:
            idle.append((name, reason))
    if reason and arguments.generation_do_sample is False and arguments.generation_temperature:
        idle.append(("generation_temperature", reason))
    steps, first = arguments.max_training_steps, arguments.profile_start_step
    if steps is not None and first is not None and first > steps:
        idle.append(("profile_start_step", f"the run ends after {steps} steps"))
    return idle


def suggest_of_other_methods(arguments: type[TrainingArguments], key: str) -> str:
    """Return the nearest key of the methods with other arguments, as the end of a sentence."""
    methods: dict[str, list[str]] = {}
    for method, options in ARGUMENTS.items():
        if options is not arguments:
            for name in (*options.model_fields, *options.ALIASES):
                methods.setdefault(name, []).append(method)
    hint = did_you_mean(key, methods)
    name = hint.partition("'")[2].rpartition("'")[0]
    return f"{hint} (a key of {', '.join(methods[name])})" if name else ""


TrainingArguments.suggest_other = suggest_of_other_methods
