"""Samples that a run has stored, and their log-probabilities under another state of the model.

A run stores completions of its previews (`metrics.jsonl`), of its rollouts (`completions.jsonl`)
and of its last evaluation (`summary.json`). A later state of the model scores them again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from ed_infra.chats import Prompt
from ed_trainers.figures.metrics import COMPLETIONS, RECORD, read_metrics

if TYPE_CHECKING:
    from ed_models.protocol import LanguageModel
    from transformers import PreTrainedTokenizerBase

#: Samples that are scored, the newest of each kind.
MOST_SAMPLES = 16
_MULTIPLE = 32  # lengths are rounded up, so that few programs are compiled


class StoredSample(NamedTuple):
    """A completion of a run.

    Attributes:
        prompt: the prompt, a text or the messages of a chat.
        completion: the text.
        step: number of updates of the model that wrote it; None: the end of the run.
        reward: its reward, if it has one.
    """

    prompt: Prompt
    completion: str
    step: int | None = None
    reward: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON values."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def list_samples(directory: Path, most: int = MOST_SAMPLES) -> list[StoredSample]:
    """Return the newest samples of a run: of previews, of rollouts, and of its evaluation."""
    previews = [
        StoredSample(sample.get("prompt", ""), str(sample.get("completion", "")), row["step"])
        for row in read_metrics(directory / RECORD)
        for sample in row.get("samples") or ()
    ]
    rollouts = [
        StoredSample(row["prompt"], str(row["completion"]), row["step"], row.get("reward"))
        for row in read_metrics(directory / COMPLETIONS)
    ]
    summary: dict[str, Any] = {}
    if (directory / "summary.json").is_file():
        summary = json.loads((directory / "summary.json").read_text("utf-8"))
    last = [
        StoredSample(sample.get("prompt", ""), str(sample.get("completion", "")))
        for sample in summary.get("samples") or ()
    ]
    kinds = (previews[-most:], rollouts[-most:], last[-most:])
    return [sample for kind in kinds for sample in kind if sample.completion]


class SampleScorer:
    """Computes log-probabilities of completions.

    Args:
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __call__(self, model: LanguageModel, samples: Sequence[StoredSample]) -> list[float | None]:
        """Return the mean log-probability of the tokens of each completion, in nats.

        None for a completion without tokens.
        """
        from ed_elarge.evaluation.heldout_metrics import build_scorer

        score = build_scorer(model)
        values: list[float | None] = []
        for batch in self._build_batches(samples):
            logps, _, weights = score(batch)
            weight = np.asarray(weights, np.float64).sum()
            total = (np.asarray(logps, np.float64) * np.asarray(weights)).sum()
            values.append(float(total / weight) if weight else None)
        return values

    def _build_batches(self, samples: Sequence[StoredSample]) -> Iterator[Mapping[str, np.ndarray]]:
        """Yield the arrays [1, s] of each sample; only its completion has labels."""
        for sample in samples:
            prompt = self._encode_prompt(sample.prompt)
            ids = self._tokenizer(sample.completion, add_special_tokens=False)["input_ids"]
            width = -(-max(len(prompt) + len(ids), 1) // _MULTIPLE) * _MULTIPLE
            tokens, labels = np.zeros((1, width), np.int32), np.full((1, width), -100, np.int32)
            segments = np.zeros((1, width), np.int32)
            tokens[0, : len(prompt) + len(ids)] = [*prompt, *ids]
            labels[0, len(prompt) : len(prompt) + len(ids)] = ids
            segments[0, : len(prompt) + len(ids)] = 1
            positions = np.where(segments > 0, np.arange(width, dtype=np.int32), 0)
            yield {
                "input_ids": tokens,
                "labels": labels,
                "segment_ids": segments,
                "position_ids": positions.astype(np.int32),
            }

    def _encode_prompt(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt)["input_ids"])
        messages = [{**message} for message in prompt]
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(str(text), add_special_tokens=False)["input_ids"])
