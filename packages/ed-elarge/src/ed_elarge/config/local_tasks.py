"""Evaluation tasks whose rows are in local files (`eval.local_tasks`).

A new kind of task is one entry of `LOCAL_KINDS`, and the file of its class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.options import Count, Options, Whole, choice
from pydantic import BeforeValidator, Field, model_validator


@dataclass(frozen=True)
class LocalKind:
    """One kind of task.

    Attributes:
        files: The keys of its files.
        evaluates: Address of the class that reads the rows and evaluates a model; see
            `ed_elarge.evaluation.local.LocalTasks`.
        models: The tasks of the models that it evaluates.
        keys: Its keys that only some kinds have.
    """

    files: tuple[str, ...]
    evaluates: str
    models: tuple[TaskType, ...]
    keys: tuple[str, ...] = ()


_HERE = "ed_elarge.evaluation"
_OF_VECTORS = (TaskType.EMBEDDING, TaskType.SEQUENCE_CLASSIFICATION, TaskType.AUTO_BIND)
_OF_TEXT = (TaskType.CAUSAL_LM, TaskType.AUTO_BIND)
#: `type` of a task -> its kind.
LOCAL_KINDS: dict[str, LocalKind] = {
    "retrieval": LocalKind(
        ("queries", "corpus", "qrels"), f"{_HERE}.retrieval:Retrieval", _OF_VECTORS, keys=("k",)
    ),
    "sts": LocalKind(("data_files",), f"{_HERE}.embedding_tasks:Similarity", _OF_VECTORS),
    "classification": LocalKind(
        ("train_files", "test_files"), f"{_HERE}.embedding_tasks:ClassificationTask", _OF_VECTORS
    ),
    "reranking": LocalKind(
        ("data_files",), f"{_HERE}.reranking:Reranking", _OF_VECTORS, keys=("k",)
    ),
    "answers": LocalKind(
        ("data_files",),
        f"{_HERE}.answers:AnswerTask",
        _OF_TEXT,
        keys=("compare", "max_new_tokens", "show"),
    ),
}
_FILES = tuple(dict.fromkeys(name for kind in LOCAL_KINDS.values() for name in kind.files))
_KEYS = tuple(dict.fromkeys(name for kind in LOCAL_KINDS.values() for name in kind.keys))


def _one_or_more(value: object) -> Any:
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


Files = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(min_length=1),
    BeforeValidator(_one_or_more),
]
Cutoffs = Annotated[
    tuple[Annotated[Count, Field(le=1000)], ...],
    Field(min_length=1, max_length=16),
    BeforeValidator(_one_or_more),
]


class LocalTask(Options):
    """A task on local files (jsonl, csv, tsv, parquet, …)."""

    type: Annotated[str, choice("type", tuple(LOCAL_KINDS))]
    """`retrieval`: search in a corpus. `sts`: semantic similarity of two texts. `classification`: a
    logistic regression on embeddings. `reranking`: the order of the documents of each query.
    `answers`: greedy answers of a model that generates text."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the task in `tasks` and in the results. None: the type."""
    queries: Files | None = None
    """retrieval: rows with `_id` and `text`."""
    corpus: Files | None = None
    """retrieval: rows with `_id`, `text` and optionally `title`, which precedes the text."""
    qrels: Files | None = None
    """retrieval: rows with `query-id`, `corpus-id` and `score`; above 0 is relevant."""
    data_files: Files | None = None
    """sts: rows with `sentence1`, `sentence2` and `score`. reranking: rows with `query`, and the
    lists `positive` and `negative`. answers: rows with `messages`, of which the last is the
    expected answer, or with `prompt` and `completion`."""
    train_files: Files | None = None
    """classification: rows with `text` and `label`, on which the regression is fitted."""
    test_files: Files | None = None
    """classification: rows with `text` and `label`, which are classified."""
    k: Cutoffs = (10,)
    """Cutoffs of nDCG, MRR and recall: one number or several."""
    compare: Annotated[str, choice("compare", ("text", "json"))] = "text"
    """answers: `text` compares whole texts. `json` compares objects, and counts equal fields."""
    max_new_tokens: Count = 128
    """answers: maximum length of an answer."""
    show: Whole = 3
    """answers: number of answers in the summary of the run and in its report."""

    @model_validator(mode="after")
    def _has_files(self) -> LocalTask:
        kind = LOCAL_KINDS[self.type]
        missing = [key for key in kind.files if getattr(self, key) is None]
        if missing:
            raise ValueError(f"{', '.join(missing)}: a {self.type} task needs these files")
        unused_keys = [
            key for key in _FILES if key not in kind.files and getattr(self, key) is not None
        ]
        unused_keys += [
            key for key in _KEYS if key not in kind.keys and key in self.model_fields_set
        ]
        if unused_keys:
            raise ValueError(
                f"{', '.join(unused_keys)}: a {self.type} task reads only "
                f"{', '.join((*kind.files, *kind.keys))}: omit the key"
            )
        return self

    @property
    def label(self) -> str:
        """The name of the task."""
        return self.name or self.type

    def files(self) -> dict[str, tuple[str, ...]]:
        """Return the files of the task by key."""
        return {key: getattr(self, key) for key in LOCAL_KINDS[self.type].files}


def check_task_names(tasks: Iterable[LocalTask], used_names: Iterable[str]) -> None:
    """Check that each task has a name of its own.

    Raises:
        ValueError: Two tasks have one name, or a task has the name of another evaluation.
    """
    seen = set(used_names)
    for task in tasks:
        if task.label in seen:
            raise ValueError(f"two tasks have the name {task.label!r}: set name")
        seen.add(task.label)


def select_tasks(tasks: Iterable[LocalTask], names: Iterable[str]) -> list[LocalTask]:
    """Return the local tasks among the tasks of an evaluation; all if there are no names.

    Raises:
        ConfigError: Only some of the names are local tasks.
    """
    by_name = {task.label: task for task in tasks}
    names = list(names) or list(by_name)
    selected_tasks = [by_name[name] for name in names if name in by_name]
    if selected_tasks and len(selected_tasks) < len(names):
        other_names = ", ".join(name for name in names if name not in by_name)
        raise ConfigError(
            f"{other_names}: one evaluation runs either local tasks ({', '.join(by_name)}) or "
            "tasks of "
            "lm-evaluation-harness: use two actions"
        )
    return selected_tasks
