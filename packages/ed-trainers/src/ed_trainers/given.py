"""What Python code gives to a trainer: datasets of rows, and arguments under other names.

A trainer reads batches. A dataset of rows (`datasets.Dataset`, `IterableDataset`, a list of
mappings or texts) is prepared by the entry point group `easydel.rows`, which `ed-elarge` provides:
this package does not import `ed-data`. `ARGUMENT_NAMES` contains the names of EasyDeL and TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, Protocol, TypedDict, cast

import numpy as np
from ed_infra.errors import ConfigError, unknown_name
from ed_models.protocol import LanguageModel

from ed_trainers.batches import BatchLoader, Dataset, HostBatch
from ed_trainers.environments.tools import ToolSet
from ed_trainers.options.base import TrainingArguments
from ed_trainers.rewards import RewardFunction
from ed_trainers.rollout import Rollout
from ed_trainers.state import EasyDeLState

#: Group of the entry point that prepares rows.
ROWS_GROUP = "easydel.rows"
#: Name of EasyDeL or TRL -> argument of a trainer; `frozen.<role>` is a frozen model.
ARGUMENT_NAMES: dict[str, str] = {
    "args": "arguments",
    "student_model": "model",
    "reference_model": "frozen.reference",
    "ref_model": "frozen.reference",
    "teacher_model": "frozen.teacher",
    "reward_model": "frozen.reward",
    "reward_funcs": "reward_functions",
    "tokenizer": "processing_class",
    "dataset_train": "train_dataset",
    "dataset_eval": "eval_dataset",
}

GivenRow = Mapping[str, object] | str
#: A function that converts the rows of a batch to its arrays.
Collator = Callable[[list[GivenRow]], HostBatch]


class OtherNames(TypedDict, total=False):
    """The keys of `ARGUMENT_NAMES`, as keyword arguments."""

    args: TrainingArguments
    student_model: LanguageModel
    reference_model: LanguageModel | None
    ref_model: LanguageModel | None
    teacher_model: LanguageModel
    reward_model: LanguageModel
    reward_funcs: RewardFunction | Sequence[RewardFunction]
    tokenizer: object
    dataset_train: object
    dataset_eval: object


class PreparedRows(NamedTuple):
    """The batches of two datasets, and the rollout and the tools of a method that samples."""

    train: Dataset | None
    evaluation: Dataset | None
    rollout: Rollout | None = None
    tools: ToolSet | None = None


class RowPreparation(Protocol):
    """The function of the entry point."""

    def __call__(
        self,
        arguments: TrainingArguments,
        model: LanguageModel,
        processing_class: object,
        train: object,
        evaluation: object,
        tools: Sequence[Callable[..., object]] = (),
    ) -> PreparedRows:
        """Return the batches of both datasets, and the parts of a method that samples."""
        ...


def merge_names(values: Mapping[str, object], others: Mapping[str, object]) -> dict[str, Any]:
    """Return the arguments of a trainer, with those under other names in their places.

    Args:
        values: argument -> value; None is a value that is not given.
        others: values under the names of `ARGUMENT_NAMES`.

    Raises:
        ConfigError: a name is unknown, or two names of one argument have values.
    """
    out = dict(values)
    for name, value in others.items():
        place = ARGUMENT_NAMES.get(name)
        if place is None:
            raise unknown_name("argument of a trainer", name, [*values, *ARGUMENT_NAMES])
        if value is None:
            continue
        holder, _, role = place.partition(".")
        given = out.get(holder)
        if role:
            frozen = cast("Mapping[str, object]", given or {})
            if role in frozen:
                raise ConfigError(f"{name} and frozen[{role!r}] are one model: pass one of them")
            out[holder] = {**frozen, role: value}
        elif given is not None and given != ():
            raise ConfigError(f"{name} and {holder} are one argument: pass one of them")
        else:
            out[holder] = value
    functions = out.get("reward_functions")
    if callable(functions):
        out["reward_functions"] = (functions,)
    return out


def has_rows(dataset: object) -> bool:
    """Whether a dataset yields rows, not batches of arrays."""
    if dataset is None or isinstance(dataset, BatchLoader):
        return False
    if type(dataset).__module__.partition(".")[0] == "datasets":
        return True
    if isinstance(dataset, Sequence):
        first = next(iter(dataset), None)
        return first is not None and not _is_batch(first)
    return False


def _is_batch(value: object) -> bool:
    """Whether a value is a mapping of arrays with equally many rows."""
    if not isinstance(value, Mapping) or not value:
        return False
    shapes: list[tuple[int, ...]] = [getattr(item, "shape", ()) for item in value.values()]
    return all(shapes) and len({shape[:1] for shape in shapes}) == 1


def prepare_datasets(
    arguments: TrainingArguments,
    model: LanguageModel | EasyDeLState,
    processing_class: object,
    datasets: tuple[object, object],
    collate: Collator | None,
    tools: Sequence[Callable[..., object]] = (),
) -> PreparedRows:
    """Return the batches for training and evaluation, and the parts of a method that samples.

    Args:
        arguments: options of the method.
        model: the trained model, or its state.
        processing_class: encodes rows.
        datasets: the datasets for training and evaluation, of rows or of batches.
        collate: converts rows to batches; None prepares rows as a run file does.
        tools: functions that the model may call.

    Raises:
        ConfigError: no installed package prepares rows, `processing_class` is missing, or one of
            the datasets has rows and the other one has batches.
    """
    present = [dataset for dataset in datasets if dataset is not None]
    rows = [dataset for dataset in present if has_rows(dataset)]
    if collate is not None:
        if len(rows) < len(present) or not rows:
            raise ConfigError(
                "data_collator converts rows: pass a dataset of rows as train_dataset"
            )
        size = arguments.loader_batch_size
        train, held_out = cast(
            "tuple[Iterable[GivenRow] | None, Iterable[GivenRow] | None]", datasets
        )
        return PreparedRows(
            None if train is None else CollatedRows(train, collate, size, arguments.seed),
            None
            if held_out is None
            else CollatedRows(held_out, collate, arguments.eval_batch_size or size, None),
        )
    if present and not rows and arguments.data_keys:
        names = ", ".join(arguments.data_keys)
        raise ConfigError(f"{names}: keys for rows, and train_dataset has batches: omit them")
    if not rows:
        if tools:
            raise ConfigError(
                "the schemas of tools are part of the prompts: pass rows as train_dataset, or "
                "batches with the schemas and a ToolSet of ed_elarge.building.tools.build_tool_set"
            )
        return PreparedRows(*cast("tuple[Dataset | None, Dataset | None]", datasets))
    if len(rows) < len(present):
        raise ConfigError("one of train_dataset and eval_dataset has rows: pass rows for both")
    points = metadata.entry_points(group=ROWS_GROUP)
    if not points:
        raise ConfigError("train_dataset has rows, which ed-elarge prepares: pip install ed-elarge")
    if processing_class is None:
        raise ConfigError("train_dataset has rows: pass the tokenizer as processing_class")
    prepare = cast("RowPreparation", next(iter(points)).load())
    module = model.model if isinstance(model, EasyDeLState) else model
    return prepare(arguments, module, processing_class, *datasets, tools=tools)


class CollatedRows:
    """Batches of prepared rows, which a `data_collator` converts to arrays.

    Every epoch has another order, a function of the seed. The rows after the last whole batch of an
    epoch are left out.

    Args:
        rows: rows that fit in memory.
        collate: converts the rows of a batch.
        batch_size: rows of a batch.
        seed: seed of the order; None keeps the order.

    Raises:
        ConfigError: there are less rows than a batch has.
    """

    def __init__(
        self, rows: Iterable[GivenRow], collate: Collator, batch_size: int, seed: int | None
    ) -> None:
        self.rows, self.collate = list(rows), collate
        self.batch_size, self.seed = batch_size, seed
        if len(self.rows) < batch_size:
            raise ConfigError(
                f"the dataset has {len(self.rows)} rows, and a batch has {batch_size}: use more "
                "rows or a smaller batch"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of whole batches of the rows."""
        return len(self.rows) // self.batch_size

    def batch_at(self, step: int) -> HostBatch:
        """Return the batch of update `step`, from 0."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.arange(len(self.rows))
        if self.seed is not None:
            order = np.random.default_rng([self.seed, epoch]).permutation(order)
        numbers = order[place * self.batch_size : (place + 1) * self.batch_size]
        return self.collate([self.rows[number] for number in numbers])
