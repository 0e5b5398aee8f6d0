"""Requests of a load test: random prompts, recorded conversations, and shared prefixes.

The names of the data sets and their options are those of `vllm bench serve`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ed_infra.errors import ConfigError
from ed_infra.options import Options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TEXT: str = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night"
)
WORDS = _TEXT.split()
# vLLM's limits of the tokens of a recorded conversation.
MIN_TOKENS, MAX_PROMPT, MAX_BOTH = 4, 1024, 2048
MAX_FILE_BYTES = 2**31


@dataclass(frozen=True)
class LoadRequest:
    """A request: text or token ids, and the number of tokens to generate."""

    prompt: str | list[int]
    output_len: int


class DatasetOptions(Options):
    """The requests of a load test."""

    dataset_name: Literal["random", "sharegpt", "prefix_repetition"] = "random"
    """Kind of the requests."""
    dataset_path: str | None = None
    """JSON file of conversations in ShareGPT's layout."""
    num_prompts: int = 100
    """Number of requests."""
    tokenizer: str | None = None
    """Counts and creates tokens; without a tokenizer, lengths are numbers of words."""
    random_input_len: int = 1024
    """Tokens of a prompt."""
    random_output_len: int = 128
    """Tokens of an answer."""
    prefix_repetition_prefix_len: int = 256
    """Tokens of a shared prefix."""
    prefix_repetition_suffix_len: int = 256
    """Tokens after the prefix."""
    prefix_repetition_num_prefixes: int = 10
    """Number of different prefixes."""
    prefix_repetition_output_len: int = 128
    """Tokens of an answer."""
    sharegpt_output_len: int | None = None
    """Tokens of an answer, instead of the recorded lengths."""
    random_range_ratio: float = 0.0
    """Ratio by which lengths vary in both directions."""


def build_requests(values: DatasetOptions, seed: int) -> list[LoadRequest]:
    """Return the requests of the arguments. Equal seeds produce equal requests.

    Raises:
        ConfigError: an argument is out of bounds, or the file cannot be read.
    """
    lengths = {name: value for name, value in values if name.endswith("_len")}
    lengths |= {"num_prompts": values.num_prompts}
    lengths |= {"num_prefixes": values.prefix_repetition_num_prefixes}
    for name, value in lengths.items():
        if value is not None and not 1 <= value <= 10**7:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be from 1 to 10,000,000")
    if not 0 <= values.random_range_ratio < 1:
        raise ConfigError(f"--random-range-ratio {values.random_range_ratio} must be in [0, 1)")
    draw = random.Random(seed)
    tokenizer = None
    if values.tokenizer:
        from ed_models.checkpoints.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(values.tokenizer)
    if values.dataset_name == "sharegpt":
        return _conversations(values, draw, tokenizer)
    piece = _pieces(draw, tokenizer)
    if values.dataset_name == "random":
        ratio = values.random_range_ratio

        def draw_length(length: int) -> int:
            return max(1, draw.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))

        return [
            LoadRequest(
                _join_pieces([piece(draw_length(values.random_input_len))]),
                draw_length(values.random_output_len),
            )
            for _ in range(values.num_prompts)
        ]
    prefixes = [
        piece(values.prefix_repetition_prefix_len)
        for _ in range(values.prefix_repetition_num_prefixes)
    ]
    requests = [
        LoadRequest(
            _join_pieces([prefixes[n % len(prefixes)], piece(values.prefix_repetition_suffix_len)]),
            values.prefix_repetition_output_len,
        )
        for n in range(values.num_prompts)
    ]
    draw.shuffle(requests)
    return requests


PromptPiece = list[int] | list[str]


def _pieces(
    draw: random.Random, tokenizer: PreTrainedTokenizerBase | None
) -> Callable[[int], PromptPiece]:
    """Return a function that draws a number of tokens, or of words without a tokenizer."""
    if tokenizer is None:
        return lambda count: draw.choices(WORDS, k=count)
    special = set(tokenizer.all_special_ids)
    usual = [token for token in range(len(tokenizer)) if token not in special]
    return lambda count: draw.choices(usual, k=count)


def _join_pieces(pieces: list[PromptPiece]) -> str | list[int]:
    items = [item for piece in pieces for item in piece]
    tokens = [item for item in items if isinstance(item, int)]
    return tokens or " ".join(map(str, items))


def _conversations(
    values: DatasetOptions, draw: random.Random, tokenizer: PreTrainedTokenizerBase | None
) -> list[LoadRequest]:
    if values.dataset_path is None:
        raise ConfigError("--dataset-name sharegpt requires --dataset-path, a JSON file")

    def count(text: str) -> int:
        return len(text.split()) if tokenizer is None else len(tokenizer(text)["input_ids"])

    turns = [*_turns(Path(values.dataset_path))]
    draw.shuffle(turns)
    requests = []
    for prompt, answer in turns:
        if len(requests) == values.num_prompts:
            break
        length = count(prompt)
        output = values.sharegpt_output_len or count(answer)
        short = length < MIN_TOKENS or (not values.sharegpt_output_len and output < MIN_TOKENS)
        if not short and length <= MAX_PROMPT and length + output <= MAX_BOTH:
            requests.append(LoadRequest(prompt, output))
    if len(requests) < values.num_prompts:
        raise ConfigError(
            f"{values.dataset_path} has {len(requests)} usable conversations, and --num-prompts is "
            f"{values.num_prompts}: request fewer"
        )
    return requests


def _turns(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first two messages of each conversation.

    Raises:
        ConfigError: the file cannot be read, or has another layout.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        rows = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        for row in rows:
            said = row.get("conversations") or row.get("conversation") or []
            if len(said) >= 2:
                yield str(said[0]["value"]), str(said[1]["value"])
    except (AttributeError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not in ShareGPT's layout: a list of objects with `conversations`, whose "
            "messages have a `value`"
        ) from error
