"""Answers of a model that generates text, compared with the expected answers of a file.

The answers are greedy. A standard error is that of a mean: the standard deviation of the scores of
the rows (with n - 1), divided by the square root of their number.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict

from ed_data import DataError
from ed_data.schema import Row
from ed_infra.chats import Chat, Prompt

from ed_elarge.config.local_tasks import LocalTask
from ed_elarge.evaluation.local_rows import count_examples, field, get_rows, get_text_field

if TYPE_CHECKING:
    from ed_elarge.evaluation.text_model import TextModel

#: Answer, expected answer -> metric -> score.
ScoreAnswer = Callable[[str, str], dict[str, float]]


class AnswerSample(TypedDict):
    """One row of the results: the prompt, the expected answer, and the answer of the model."""

    prompt: Prompt
    expected: str
    answer: str


class AnswerTask:
    """Prompts with expected answers.

    Args:
        task: The files, and how answers are compared.
        limit: Number of rows, or below 1 the fraction of them.

    Attributes:
        samples: Each answer of the last evaluation.
        shown: Number of samples in the summary of a run.

    Raises:
        DataError: A row is broken, or an expected answer is no JSON object with `compare: json`.
    """

    def __init__(self, task: LocalTask, limit: float | None) -> None:
        assert task.data_files
        rows = [(place, *_read_pair(place, row)) for place, row in get_rows(task.data_files)]
        rows = rows[: count_examples(len(rows), limit)]
        if task.compare == "json":
            for place, _, expected in rows:
                if not _parse_object(expected):
                    raise DataError(
                        f"{place}: the expected answer must be a JSON object with a key, got "
                        f"{expected!r:.80}: correct the row, or omit compare"
                    )
        self.samples: list[AnswerSample] = []
        self.shown = task.show
        self._rows = [row[1:] for row in rows]
        self._score = SCORES[task.compare]
        self._most_tokens = task.max_new_tokens

    def evaluate(self, model: TextModel) -> dict[str, float]:
        """Return the mean of each score, and its standard error with two rows or more."""
        model.check_generates("answers")
        answers = model.complete([prompt for prompt, _ in self._rows], self._most_tokens)
        self.samples = [
            {"prompt": prompt, "expected": expected, "answer": answer}
            for (prompt, expected), answer in zip(self._rows, answers, strict=True)
        ]
        rows = [self._score(sample["answer"], sample["expected"]) for sample in self.samples]
        return {
            name: value
            for metric in rows[0]
            for name, value in average_scores(metric, [row[metric] for row in rows]).items()
        }


def average_scores(metric: str, scores: Sequence[float]) -> dict[str, float]:
    """Return the mean of scores as `metric`, and its standard error as `metric_stderr`."""
    out = {metric: float(statistics.fmean(scores))}
    if len(scores) > 1:
        out[f"{metric}_stderr"] = statistics.stdev(scores) / math.sqrt(len(scores))
    return out


def score_text(answer: str, expected: str) -> dict[str, float]:
    """Return whether two texts are equal, apart from blanks at their ends."""
    return {"exact_match": float(answer.strip() == expected.strip())}


def score_object(answer: str, expected: str) -> dict[str, float]:
    """Compare two JSON objects.

    Returns:
        `exact_match`: the answer is the expected object, and nothing else. `fields`: the fraction
        of the expected fields that the first object in the answer has with an equal value; text
        around the object is allowed. `valid_json`: the answer is an object, and nothing else.
    """
    reference, whole = _parse_object(expected) or {}, _parse_object(answer)
    first = whole if whole is not None else _find_object(answer)
    right = sum(key in first and first[key] == value for key, value in reference.items())
    return {
        "exact_match": float(whole == reference),
        "fields": right / len(reference),
        "valid_json": float(whole is not None),
    }


#: `compare` of a task -> the score of an answer.
SCORES: Mapping[str, ScoreAnswer] = {"text": score_text, "json": score_object}


def _parse_object(text: str) -> dict[str, object] | None:
    """Return the JSON object that a text is, or None."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _find_object(text: str) -> dict[str, object]:
    """Return the JSON object at the first brace of a text; empty if there is none."""
    start = text.find("{")
    try:
        value = json.JSONDecoder().raw_decode(text, start)[0] if start >= 0 else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_pair(place: str, row: Row) -> tuple[Prompt, str]:
    """Return the prompt and the expected answer of a row."""
    if "messages" not in row:
        return get_text_field(place, row, "prompt"), get_text_field(place, row, "completion")
    messages = field(place, row, "messages")
    if not isinstance(messages, list) or not all(isinstance(turn, dict) for turn in messages):
        raise DataError(f"{place}: messages must be a list of messages, got {messages!r:.80}")
    if len(messages) < 2 or messages[-1].get("role") != "assistant":
        raise DataError(
            f"{place}: messages must end with the expected answer of the assistant, after a "
            f"question, got {messages!r:.80}"
        )
    return _check_chat(place, messages[:-1]), get_text_field(place, messages[-1], "content")


def _check_chat(place: str, messages: Sequence[Row]) -> Chat:
    for number, message in enumerate(messages):
        for name in ("role", "content"):
            get_text_field(f"{place}, messages[{number}]", message, name)
    return tuple(messages)
