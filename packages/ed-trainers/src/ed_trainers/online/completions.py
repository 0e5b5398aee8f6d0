"""Completions of prompts, and the rows of a batch that are made of them.

Legend: n completions, s positions of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from ed_trainers.losses.next_token import next_token_batch

#: Rows for a reward model grow by so many tokens.
_LONGER = 64
#: A text, chat messages, or token ids.
Content = str | list[dict[str, Any]] | list[int]


@runtime_checkable
class PromptBatch(Protocol):
    """A batch of prompts, as ed-data's `build_prompts` gives them.

    It may have `prompts`, the same as they were written, and `fields`: for each name one value a
    prompt, which reward functions get. It may have `with_answers(number, answers)`, which encodes a
    prompt of the batch with answers as rows for training are encoded, for a reward model.
    """

    @property
    def input_ids(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""
        ...


@dataclass(frozen=True)
class Completions:
    """What prompts were completed with; a list has one entry for each completion.

    Attributes:
        prompts: as they were written; ids where nobody says.
        prompt_ids: tokens of the prompts, at most `max_prompt_length`.
        completion_ids: tokens that were sampled, the end token included.
        logprobs: of these tokens, see `Sampled.logprobs`.
        completions: as the prompts were written: texts, the answers of a chat, or ids.
        ended: False where the longest length cut a completion.
        fields: of the rows of data, by name.
        documents: returns the tokens of each prompt with its completion, encoded as rows for
            training are; None where the batch of prompts cannot encode answers.
    """

    prompts: list[Content]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    completions: list[Content]
    ended: list[bool]
    fields: Mapping[str, list[Any]] = field(default_factory=dict)
    documents: Callable[[], list[list[int]]] | None = None

    def __len__(self) -> int:
        return len(self.completion_ids)

    def rows(self, length: int) -> dict[str, np.ndarray]:
        """Return a row for each: the prompt, then the completion, which alone has weight.

        Args:
            length: s.

        Returns:
            `input_ids`, `segment_ids`, `position_ids`, `targets` int32 [n, s] and `weights` float32
            [n, s]: 1 where the next token is one of the completion.
        """
        shape = (len(self), length)
        rows = {name: np.zeros(shape, np.int32) for name in ("input_ids", "segment_ids")}
        rows["labels"] = np.full(shape, -100, np.int32)
        for row, (prompt, answer) in enumerate(
            zip(self.prompt_ids, self.completion_ids, strict=True)
        ):
            end = len(prompt) + len(answer)
            rows["input_ids"][row, :end] = [*prompt, *answer]
            rows["segment_ids"][row, :end] = 1
            rows["labels"][row, len(prompt) : end] = answer
        return next_token_batch(rows)

    def rows_to_score(self, length: int) -> dict[str, np.ndarray]:
        """Return a row for each, for a reward model.

        A reward model scores the last token of a row. So the rows hold the tokens that the model
        was trained with. These may differ from the sampled tokens: behind the end token, a chat
        template may write a line end.

        Args:
            length: s of `rows`; longer documents have longer rows.

        Returns:
            `input_ids`, `segment_ids` and `position_ids`, int32 [n, s].
        """
        documents = self.documents() if self.documents is not None else self._sampled_documents()
        longest = max(map(len, documents))
        if longest > length:  # in steps, so that few shapes are compiled
            length += -(-(longest - length) // _LONGER) * _LONGER
        ids, segments = np.zeros((2, len(self), length), np.int32)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = document
            segments[row, : len(document)] = 1
        made = next_token_batch({"input_ids": ids, "segment_ids": segments})
        return {name: made[name] for name in ("input_ids", "segment_ids", "position_ids")}

    def _sampled_documents(self) -> list[list[int]]:
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [[*prompt, *answer] for prompt, answer in pairs]

    def at_tokens(self, values: Sequence[Sequence[float]], length: int) -> np.ndarray:
        """Put a value of each token where it is predicted, float32 [n, s]; 0 elsewhere.

        Args:
            values: of each completion's tokens.
            length: s.
        """
        placed = np.zeros((len(self), length), np.float32)
        for row, (prompt, own) in enumerate(zip(self.prompt_ids, values, strict=True)):
            begin = len(prompt) - 1
            placed[row, begin : begin + len(own)] = own
        return placed

    def figures(self) -> dict[str, float]:
        """Means and extremes for the log, with TRL's names."""
        lengths = np.asarray([len(ids) for ids in self.completion_ids], np.float64)
        ended = np.asarray(self.ended, bool)
        own = lengths[ended] if ended.any() else np.zeros(1)
        return {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(1 - ended.mean()),
            "completions/mean_terminated_length": float(own.mean()),
        }
