"""Completions of prompts, and their rows for training and for a reward model.

Legend: n completions, s positions of a row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from ed_infra.inputs import ROUTED_EXPERTS

from ed_trainers.contract import Prepared
from ed_trainers.environments.tools import ReadReply, count_calls
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.online.turns import ChatTokenizer, split_completion
from ed_trainers.rollout import Sampled

#: Step by which the rows of a reward model grow, in tokens.
_LONGER = 64
#: Key of `Completions.scores`: the weighted sum of the rewards.
TOTAL = "reward"
#: Key of `Completions.scores`: the reward of the environment.
ENVIRONMENT_REWARD = "environment"
#: A text, chat messages, or token ids.
PromptContent = str | list[dict[str, Any]] | list[int]


@runtime_checkable
class PromptRows(Protocol):
    """A batch of prompts, as `build_prompts` of ed-data yields them.

    Optional attributes: `prompts`, the prompts as written; `images`, arrays of the images of the
    prompts by name, a row for each prompt; `fields`, by name one value per prompt
    for reward functions; `with_prompt(number, prompt)`, which encodes another prompt for a row of
    the batch; `with_answers(number, answers)`, which encodes a prompt of the batch with
    answers in the way in which rows for training are encoded, for a reward model.
    """

    @property
    def input_ids(self) -> Sequence[Sequence[int]]:
        """Token ids of each prompt."""
        ...


@dataclass(frozen=True)
class WrittenPrompts:
    """A batch of prompts that replaces the prompts of another batch; see `PromptRows`."""

    prompts: list[PromptContent]
    input_ids: Sequence[Sequence[int]]
    fields: Mapping[str, Sequence[object]]
    images: Mapping[str, np.ndarray]
    with_prompt: Callable[[int, PromptContent], list[int]] | None


@dataclass(frozen=True)
class Completions:
    """Completed prompts; each list has one entry per completion.

    Attributes:
        prompts: the prompts as written; token ids if the batch has no written prompts.
        prompt_ids: tokens of the prompts, at most `max_prompt_length`.
        completion_ids: sampled tokens, the end token included.
        logprobs: log-probabilities of these tokens, see `Sampled.logprobs`.
        completions: the completions in the kind of their prompts: texts, answers of a chat, or ids.
        ended: False if the maximum length truncated the completion.
        fields: fields of the rows of data, by name.
        images: arrays of the images of the prompts by name, [n, ...]; empty for models of text.
        documents: returns the tokens of each prompt with its completion, encoded like rows for
            training; None if the batch of prompts cannot encode answers.
        encode: returns the tokens of another prompt for the row of a completion, encoded like the
            prompts; None if the batch of prompts cannot encode prompts.
        rewards: values of reward functions and of an environment, float32 [n, k], NaN for None;
            None: not scored.
        given: the tokens of an environment, see `Sampled.given`; empty: none.
        experts: the experts of the tokens of each row, see `Sampled.experts`; empty: none.
        masks: see `Sampled.masks`; empty: none.
        has_tools: whether the completions are messages of a model with tools.
        scores: reward -> value of each completion, [n], NaN for None. A scorer adds the rewards and
            their weighted sum, `reward`.
    """

    prompts: list[PromptContent]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float]]
    completions: list[PromptContent]
    ended: list[bool]
    fields: Mapping[str, list[Any]] = field(default_factory=dict)
    images: Mapping[str, np.ndarray] = field(default_factory=dict)
    documents: Callable[[], list[list[int]]] | None = None
    encode: Callable[[int, PromptContent], list[int]] | None = None
    rewards: np.ndarray | None = None
    given: list[Sequence[tuple[int, int]]] = field(default_factory=list)
    experts: list[np.ndarray] = field(default_factory=list)
    masks: list[Sequence[np.ndarray]] = field(default_factory=list)
    has_tools: bool = False
    scores: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.completion_ids)

    def select(self, numbers: Sequence[int]) -> Completions:
        """Return the completions with these numbers, in this order."""

        def some(values: Sequence[Any]) -> list[Any]:
            return [values[number] for number in numbers]

        documents, encode = self.documents, self.encode
        return Completions(
            prompts=some(self.prompts),
            prompt_ids=some(self.prompt_ids),
            completion_ids=some(self.completion_ids),
            logprobs=some(self.logprobs),
            completions=some(self.completions),
            ended=some(self.ended),
            fields={name: some(values) for name, values in self.fields.items()},
            images={name: x[list(numbers)] for name, x in self.images.items()},
            documents=None if documents is None else lambda: some(documents()),
            encode=None if encode is None else lambda row, ask: encode(numbers[row], ask),
            rewards=None if self.rewards is None else self.rewards[list(numbers)],
            given=some(self.given) if self.given else [],
            experts=some(self.experts) if self.experts else [],
            masks=some(self.masks) if self.masks else [],
            has_tools=self.has_tools,
        )

    @classmethod
    def concat(cls, parts: Sequence[Completions]) -> Completions:
        """Return the completions of several batches of prompts in their order, without scores."""

        def join(name: str) -> list[Any]:
            return [value for part in parts for value in getattr(part, name)]

        field_names = dict.fromkeys(name for part in parts for name in part.fields)
        ends = np.cumsum([len(part) for part in parts])

        def encode_prompt(row: int, prompt: PromptContent) -> list[int]:
            index = int(np.searchsorted(ends, row, side="right"))
            encode = parts[index].encode
            assert encode is not None, "all batches of a loader encode prompts, or none does"
            return encode(row - int(ends[index]) + len(parts[index]), prompt)

        def list_documents() -> list[list[int]]:
            return [ids for part in parts if part.documents for ids in part.documents()]

        reward_parts = [part.rewards for part in parts if part.rewards is not None]
        return cls(
            prompts=join("prompts"),
            prompt_ids=join("prompt_ids"),
            completion_ids=join("completion_ids"),
            logprobs=join("logprobs"),
            completions=join("completions"),
            ended=join("ended"),
            fields={
                name: [
                    value for part in parts for value in part.fields.get(name, [None] * len(part))
                ]
                for name in field_names
            },
            images={
                name: _concat_padded([part.images[name] for part in parts])
                for name in parts[0].images
            },
            documents=None if parts[0].documents is None else list_documents,
            encode=None if parts[0].encode is None else encode_prompt,
            rewards=np.concatenate(reward_parts) if reward_parts else None,
            given=join("given"),
            experts=join("experts"),
            masks=join("masks"),
            has_tools=parts[0].has_tools,
        )

    def rows(self, length: int) -> Prepared:
        """Return one row for each completion: the prompt, then the completion with weights of 1.

        Args:
            length: s.

        Returns:
            `input_ids`, `segment_ids`, `position_ids`, `targets` int32 [n, s] and `weights` float32
            [n, s]: 1 where the next token was sampled. With images also their arrays,
            and `token_type_ids` int32 [n, s]: 0 for the tokens of prompts. With recorded experts
            also `routed_experts` int16 [n, s, layers, k], -1 where the router chooses.
        """
        shape = (len(self), length)
        rows: dict[str, np.ndarray] = {
            "input_ids": np.zeros(shape, np.int32),
            "segment_ids": np.zeros(shape, np.int32),
            "labels": np.full(shape, -100, np.int32),
        }
        for row, (prompt, answer) in enumerate(
            zip(self.prompt_ids, self.completion_ids, strict=True)
        ):
            end = len(prompt) + len(answer)
            rows["input_ids"][row, :end] = [*prompt, *answer]
            rows["segment_ids"][row, :end] = 1
            rows["labels"][row, len(prompt) : end] = answer
            for first, count in self.given[row] if self.given else ():
                begin = len(prompt) + first
                rows["labels"][row, begin : begin + count] = -100
        if self.experts:
            routed_experts = np.full((*shape, *self.experts[0].shape[1:]), -1, np.int16)
            for row, row_experts in enumerate(self.experts):
                routed_experts[row, : len(row_experts)] = row_experts
            rows[ROUTED_EXPERTS] = routed_experts
        if self.images:
            prompts = np.asarray([len(prompt) for prompt in self.prompt_ids])[:, None]
            rows["token_type_ids"] = (np.arange(length) >= prompts).astype(np.int32)
        return next_token_batch({**rows, **self.images})

    def rows_to_score(self, length: int) -> Prepared:
        """Return one row for each completion, for a reward model.

        A reward model scores the last token of a row, so the rows have the tokens with which the
        model was trained. These may differ from the sampled tokens: a chat template may write a
        line end after the end token.

        Args:
            length: s of `rows`; longer documents get longer rows.

        Returns:
            `input_ids`, `segment_ids` and `position_ids`, int32 [n, s].
        """
        documents = self.documents() if self.documents is not None else self._sampled_documents()
        longest = max(map(len, documents))
        if longest > length:  # in steps, to compile few shapes
            length += -(-(longest - length) // _LONGER) * _LONGER
        ids, segments = np.zeros((2, len(self), length), np.int32)
        for row, document in enumerate(documents):
            ids[row, : len(document)] = document
            segments[row, : len(document)] = 1
        inputs = next_token_batch({"input_ids": ids, "segment_ids": segments})
        return inputs.select(("input_ids", "segment_ids", "position_ids"))

    def _sampled_documents(self) -> list[list[int]]:
        pairs = zip(self.prompt_ids, self.completion_ids, strict=True)
        return [[*prompt, *answer] for prompt, answer in pairs]

    def token_masks(self, length: int, vocabulary: int) -> np.ndarray:
        """Return the recorded masks at the positions that predict the tokens, int32 [n, s, w].

        A number has the bits of 32 tokens, the lowest bit first. Positions without a record have
        all bits.

        Args:
            length: s.
            vocabulary: number of tokens; w is a 32nd, rounded up.
        """
        words = -(-vocabulary // 32)
        placed = np.full((len(self), length, words), -1, np.int32)
        for row, (prompt, masks) in enumerate(zip(self.prompt_ids, self.masks, strict=True)):
            for place, allowed_tokens in enumerate(masks, len(prompt) - 1):
                if len(allowed_tokens):
                    bits = np.zeros(words * 32, np.uint8)
                    bits[allowed_tokens] = 1
                    placed[row, place] = np.packbits(bits, bitorder="little").view(np.int32)
        return placed

    def at_tokens(self, values: Sequence[Sequence[float]], length: int) -> np.ndarray:
        """Return values of tokens at the positions that predict them, float32 [n, s]; 0 elsewhere.

        Args:
            values: one value per token of each completion.
            length: s.
        """
        placed = np.zeros((len(self), length), np.float32)
        for row, (prompt, row_values) in enumerate(zip(self.prompt_ids, values, strict=True)):
            begin = len(prompt) - 1
            placed[row, begin : begin + len(row_values)] = row_values
        return placed

    def to_samples(self, generation: int, count: int) -> list[dict[str, object]]:
        """Return the first completions with their rewards, for `completions.jsonl`.

        Args:
            generation: number of the generation.
            count: maximum number of completions.
        """
        samples: list[dict[str, object]] = []
        for row in range(min(count, len(self))):
            values = {name: _to_number(column[row]) for name, column in self.scores.items()}
            sample: dict[str, object] = {"generation": generation}
            sample |= {"prompt": _to_plain(self.prompts[row])}
            sample |= {"completion": _to_plain(self.completions[row])}
            sample |= {"reward": values.pop(TOTAL)} if TOTAL in values else {}
            sample |= {"rewards": values} if values else {}
            samples.append(sample | {"tokens": len(self.completion_ids[row])})
        return samples

    def figures(self) -> dict[str, float]:
        """Return means and extremes of the lengths for the log, with TRL's names."""
        lengths = np.asarray([len(ids) for ids in self.completion_ids], np.float64)
        ended = np.asarray(self.ended, bool)
        ended_lengths = lengths[ended] if ended.any() else np.zeros(1)
        return {
            "completions/mean_length": float(lengths.mean()),
            "completions/min_length": float(lengths.min()),
            "completions/max_length": float(lengths.max()),
            "completions/clipped_ratio": float(1 - ended.mean()),
            "completions/mean_terminated_length": float(ended_lengths.mean()),
            **(count_calls(self.completions) if self.has_tools else {}),
        }


class SampledPrompts(NamedTuple):
    """The prompts of a generation that are trained.

    Attributes:
        completions: their completions.
        figures: figures for the log, which replace those of the completions.
        tokens: number of all sampled tokens.
    """

    completions: Completions
    figures: Mapping[str, float]
    tokens: int


def _concat_padded(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Concatenate arrays along the rows; shorter ones are padded with zeros."""
    shape = np.max([array.shape[1:] for array in arrays], axis=0)
    padded = [
        np.pad(x, [(0, 0), *((0, n - own) for n, own in zip(shape, x.shape[1:], strict=True))])
        for x in arrays
    ]
    return np.concatenate(padded)


def get_images(batch: PromptRows) -> Mapping[str, np.ndarray]:
    """Return the arrays of the images of prompts by name; empty for prompts of text."""
    return getattr(batch, "images", {})


def get_prompt_rows(batch: PromptRows, prompt_ids: list[list[int]]) -> list[dict[str, Any]]:
    """Return the fields of each prompt, and `prompt`, the prompt as written."""
    prompts: Sequence[PromptContent] = getattr(batch, "prompts", prompt_ids)
    fields: Mapping[str, list[Any]] = getattr(batch, "fields", {})
    return [
        {**{name: values[row] for name, values in fields.items()}, "prompt": prompt}
        for row, prompt in enumerate(prompts)
    ]


def build_completions(
    batch: PromptRows,
    prompt_ids: list[list[int]],
    sampled: Sequence[Sampled],
    copies: int,
    tokenizer: object | None,
    read: ReadReply | None = None,
) -> Completions:
    """Return the completions of a batch of prompts.

    Args:
        batch: the prompts.
        prompt_ids: tokens of the prompts, at most `max_prompt_length`.
        sampled: the continuations, ordered by prompt, `copies` for each prompt.
        copies: number of continuations per prompt.
        tokenizer: decodes the continuations; without it, completions are token ids.
        read: reads messages of a model with tools; None: there are no tools.
    """
    prompts: list[PromptContent] = list(getattr(batch, "prompts", prompt_ids))
    images = get_images(batch)
    fields: Mapping[str, list[Any]] = getattr(batch, "fields", {})
    completions = [
        write_completion(prompts[i // copies], list(one.token_ids), one.given, tokenizer, read)
        for i, one in enumerate(sampled)
    ]

    def repeat_values(values: Sequence[Any]) -> list[Any]:
        return [value for value in values for _ in range(copies)]

    encode: Callable[[int, list[PromptContent]], list[list[int]]]
    encode = getattr(batch, "with_answers", None)  # type: ignore[assignment] - used if present

    def documents() -> list[list[int]]:
        groups = [completions[at : at + copies] for at in range(0, len(completions), copies)]
        return [ids for number, group in enumerate(groups) for ids in encode(number, group)]

    encode_prompt: Callable[[int, PromptContent], list[int]] | None = getattr(
        batch, "with_prompt", None
    )
    return Completions(
        prompts=repeat_values(prompts),
        prompt_ids=repeat_values(prompt_ids),
        completion_ids=[list(one.token_ids) for one in sampled],
        logprobs=[list(one.logprobs) for one in sampled],
        completions=completions,
        ended=[one.ended for one in sampled],
        fields={name: repeat_values(values) for name, values in fields.items()},
        images={name: np.repeat(x, copies, axis=0) for name, x in images.items()},
        documents=documents if encode is not None and hasattr(tokenizer, "decode") else None,
        encode=None
        if encode_prompt is None
        else lambda row, prompt: encode_prompt(row // copies, prompt),
        rewards=_get_rewards(sampled),
        given=[one.given for one in sampled],
        experts=[one.experts for one in sampled if one.experts is not None],
        masks=[one.masks for one in sampled if one.masks is not None],
        has_tools=read is not None,
    )


def _get_rewards(sampled: Sequence[Sampled]) -> np.ndarray | None:
    sample_rewards = [one.rewards for one in sampled if one.rewards is not None]
    return (
        np.asarray(sample_rewards, np.float32)
        if sample_rewards and len(sample_rewards) == len(sampled)
        else None
    )


def write_completion(
    prompt: PromptContent,
    ids: list[int],
    given: Sequence[tuple[int, int]],
    tokenizer: object | None,
    read: ReadReply | None,
) -> PromptContent:
    """Return a completion in the kind of its prompt, or the messages of a model with tools.

    Args:
        prompt: the prompt as written.
        ids: the sampled tokens.
        given: see `Sampled.given`.
        tokenizer: decodes the tokens; None returns them.
        read: reads messages of a model with tools; None: there are no tools.
    """
    if read is not None:
        return split_completion(ids, given, cast("ChatTokenizer", tokenizer), read)
    decode = getattr(tokenizer, "decode", None)
    if decode is None or (isinstance(prompt, list) and not _is_chat(prompt)):
        return ids
    text = str(decode(ids, skip_special_tokens=True))
    return [{"role": "assistant", "content": text}] if _is_chat(prompt) else text


def _to_plain(content: PromptContent) -> object:
    """Return a prompt or a completion for JSON; an image is the name of its type."""
    return json.loads(json.dumps(content, default=lambda value: f"<{type(value).__name__}>"))


def _to_number(value: np.floating) -> float | None:
    return float(value) if np.isfinite(value) else None


def _is_chat(content: PromptContent) -> bool:
    return isinstance(content, list) and bool(content) and isinstance(content[0], dict)
