"""lm-evaluation-harness tasks made from the run's own held-out texts.

`heldout_perplexity`: word and byte perplexity and bits per byte of each held-out text, by rolling
log-likelihood. `heldout_cloze`: which of four continuations a text really has; the other three come
from other places of the held-out texts. Both are ordinary task files: lm-eval runs them as it runs
any local task, and they can be kept and run elsewhere.
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
NAMES = (PERPLEXITY, CLOZE)

CHOICES = 4
MAX_QUESTIONS = 200
CONTEXT_CHARACTERS = 400
"""Text before the gap; enough for some sentences and short enough for a small model's window."""
WORDS = (6, 14)
"""Words of a continuation, least and most."""

_SENTENCE = re.compile(r"[A-Z][^.!?]{40,400}[.!?](?=\s)")


def write(texts: Sequence[str], directory: Path, names: Sequence[str] = NAMES) -> Path:
    """Write tasks.

    Args:
        texts: held-out texts.
        directory: where the task files (`*.yaml`) and their data (`*.jsonl`) go.
        names: which of `NAMES`.

    Returns:
        The directory, to be given to lm-eval as `include_path`.

    Raises:
        ConfigError: there is no held-out text, or too little to ask questions about.
    """
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise ConfigError("the held-out part of the mixture holds no text")
    directory.mkdir(parents=True, exist_ok=True)
    if PERPLEXITY in names:
        _task(directory, PERPLEXITY, [{"text": text} for text in texts], _PERPLEXITY)
    if CLOZE in names:
        _task(directory, CLOZE, questions(texts), _CLOZE)
    return directory


class Gap(NamedTuple):
    """A sentence cut in its middle: the text up to the cut, the white space there, the rest."""

    context: str
    space: str
    rest: str

    @property
    def words(self) -> int:
        return len(self.rest.split())


def questions(texts: Sequence[str]) -> list[dict[str, Any]]:
    """Make the cloze: `{"context", "choices", "label"}`, the same for the same texts.

    A sentence is cut in its middle. The true continuation stands among three second halves of other
    sentences with nearly as many words, so that neither length nor form gives it away.

    Raises:
        ConfigError: the texts have fewer than four usable sentences.
    """
    gaps = [gap for text in texts for gap in _gaps(text)]
    if len({gap.rest for gap in gaps}) < CHOICES:
        raise ConfigError(
            f"the held-out texts have only {len(gaps)} usable sentences, and {CLOZE} needs "
            f"{CHOICES}: hold out more (mixture.eval_fraction), or leave the task out"
        )
    count = min(len(gaps), MAX_QUESTIONS)
    rows = []
    for number in range(count):
        gap = gaps[number * len(gaps) // count]
        choose = random.Random(number)
        wrong = sorted({g.rest for g in gaps} - {gap.rest})
        wrong.sort(key=lambda rest: abs(len(rest.split()) - gap.words))  # stable: ties by text
        options = choose.sample(wrong[: CHOICES * 8], CHOICES - 1)
        label = choose.randrange(CHOICES)
        options.insert(label, gap.rest)
        choices = [gap.space + option for option in options]
        rows.append({"context": gap.context, "choices": choices, "label": label})
    return rows


def _gaps(text: str) -> list[Gap]:
    """The usable sentences of a text, cut, each with some of what stands before it."""
    out = []
    for match in _SENTENCE.finditer(text):
        words = list(re.finditer(r"\S+", match.group()))
        half = len(words) // 2
        rest = words[half : half + WORDS[1]]
        if half < 3 or len(rest) < WORDS[0]:
            continue
        cut, resume, end = words[half - 1].end(), rest[0].start(), rest[-1].end()
        start = max(0, match.start() - CONTEXT_CHARACTERS)
        before = text[start : match.start()]
        if start:  # begin with a whole word
            before = before[before.find(" ") + 1 :]
        sentence = match.group()
        out.append(Gap(before + sentence[:cut], sentence[cut:resume], sentence[resume:end]))
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
