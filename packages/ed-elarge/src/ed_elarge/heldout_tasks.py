"""Tasks of lm-evaluation-harness that are built from the held-out texts of a run.

`heldout_perplexity` computes word perplexity, byte perplexity and bits per byte of each held-out
text by rolling log-likelihood. `heldout_cloze` asks for the continuation of a text out of four;
three of them come from other held-out texts. Both are ordinary local task files that also run
elsewhere.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from ed_infra.errors import ConfigError

PERPLEXITY, CLOZE = "heldout_perplexity", "heldout_cloze"
HELDOUT_TASKS = (PERPLEXITY, CLOZE)

CHOICES = 4
MAX_QUESTIONS = 200
CONTEXT_CHARACTERS = 400
"""Characters before the gap: some sentences, within the context of a small model."""
_WORDS = (6, 14)
"""Smallest and largest number of words of a continuation."""

_SENTENCE = re.compile(r"[A-Z][^.!?]{40,400}[.!?](?=\s)")


def write_tasks(
    texts: Sequence[str], directory: Path, names: Sequence[str] = HELDOUT_TASKS
) -> Path:
    """Write task files and their data.

    Args:
        texts: The held-out texts.
        directory: The folder for task files (`*.yaml`) and data (`*.jsonl`).
        names: The tasks to write, from `HELDOUT_TASKS`.

    Returns:
        The directory, for lm-eval's `include_path`.

    Raises:
        ConfigError: There is no held-out text, or too little text for questions.
    """
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError("the held-out part of the mixture contains no text")
    directory.mkdir(parents=True, exist_ok=True)
    if PERPLEXITY in names:
        _task(directory, PERPLEXITY, [{"text": text} for text in texts], _PERPLEXITY)
    if CLOZE in names:
        _task(directory, CLOZE, list_questions(texts), _CLOZE)
    return directory


class Gap(NamedTuple):
    """A sentence that is split in the middle: the first part, the white space, the rest."""

    context: str
    space: str
    ending: str

    @property
    def words(self) -> int:
        return len(self.ending.split())


def list_questions(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Build cloze questions (`{"context", "choices", "label"}`), a pure function of the texts.

    A sentence is split in the middle. The wrong choices are second halves of three other sentences
    with nearly the same number of words, so that neither length nor form reveals the answer.

    Raises:
        ConfigError: The texts have fewer than four usable sentences.
    """
    gaps = [gap for text in texts for gap in _gaps(text)]
    if len({gap.ending for gap in gaps}) < CHOICES:
        raise ConfigError(
            f"the held-out texts have only {len(gaps)} usable sentences, and {CLOZE} needs "
            f"{CHOICES}: hold out more text (mixture.eval_fraction), or omit the task"
        )
    count = min(len(gaps), MAX_QUESTIONS)
    rows = []
    for number in range(count):
        gap = gaps[number * len(gaps) // count]
        choose = random.Random(number)
        wrong = sorted({g.ending for g in gaps} - {gap.ending})
        wrong.sort(key=lambda ending: abs(len(ending.split()) - gap.words))  # stable
        options = choose.sample(wrong[: CHOICES * 8], CHOICES - 1)
        label = choose.randrange(CHOICES)
        options.insert(label, gap.ending)
        choices = [gap.space + option for option in options]
        rows.append({"context": gap.context, "choices": choices, "label": label})
    return rows


def _gaps(text: str) -> list[Gap]:
    """Return the usable sentences of a text, split, each with the text before it."""
    out = []
    for match in _SENTENCE.finditer(text):
        words = list(re.finditer(r"\S+", match.group()))
        half = len(words) // 2
        ending_words = words[half : half + _WORDS[1]]
        if half < 3 or len(ending_words) < _WORDS[0]:
            continue
        cut, resume, end = words[half - 1].end(), ending_words[0].start(), ending_words[-1].end()
        start = max(0, match.start() - CONTEXT_CHARACTERS)
        preceding_text = text[start : match.start()]
        if start:  # start at a word boundary
            preceding_text = preceding_text[preceding_text.find(" ") + 1 :]
        sentence = match.group()
        out.append(Gap(preceding_text + sentence[:cut], sentence[cut:resume], sentence[resume:end]))
    return out


_PERPLEXITY: dict[str, Any] = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "text",
    "metric_list": [
        {"metric": name, "aggregation": aggregation, "higher_is_better": False}
        for name, aggregation in (
            ("word_perplexity", "weighted_perplexity"),
            ("byte_perplexity", "weighted_perplexity"),
            ("bits_per_byte", "bits_per_byte"),
        )
    ],
}
_CLOZE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_text": "context",
    "doc_to_target": "label",
    "doc_to_choice": "choices",
    "target_delimiter": "",
    "metric_list": [
        {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
        {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
    ],
}


def _task(directory: Path, name: str, rows: list[dict[str, Any]], task: dict[str, Any]) -> None:
    data = directory / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    header = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data.resolve())}},
        "test_split": "test",
        "metadata": {"version": 1.0},
    }
    text = yaml.safe_dump({**header, **task}, sort_keys=False, allow_unicode=True)
    (directory / f"{name}.yaml").write_text(text, "utf-8")
