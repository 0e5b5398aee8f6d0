"""One row to tokens: EasyDeL's `SFTPreprocessTransform` and its relatives.

A transform reads a row and encodes it as the loader of a trainer does, and returns the tokens under
EasyDeL's names, cut and padded to its lengths. Trainers need no transform: they prepare rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from ed_data import Inform, Tokenization
from ed_data.rows.documents import Documents
from ed_data.schema import COMPLETION, PREFERENCE, PROMPT, TEXT, Schema
from ed_data.sources.python import GivenRows
from ed_data.tokens.encoded import SequenceArrays
from ed_data.tokens.encoder import Encoder
from ed_infra.errors import ConfigError

if TYPE_CHECKING:
    from ed_data import Example
    from transformers import PreTrainedTokenizerBase

#: A row with its tokens.
TokenRow = dict[str, object]
#: Label of a token without a loss.
_IGNORED = -100


class RowTransform:
    """Reads and encodes rows.

    Args:
        tokenizer: a tokenizer of transformers.
        add_special_tokens: whether the tokenizer adds its own special tokens.
        assistant_only_loss: whether only the answers of a chat have a loss.
        tools: tools of rows without the field `tools`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        add_special_tokens: bool = False,
        assistant_only_loss: bool = False,
        tools: Sequence[object] | None = None,
    ) -> None:
        self.tokenizer, self.tools = tokenizer, tools
        self.options = Tokenization(
            add_special_tokens=add_special_tokens, assistant_only_loss=assistant_only_loss
        )
        pad = tokenizer.pad_token_id
        self.pad_id = pad if isinstance(pad, int) else 0

    def read_row(
        self, row: Mapping[str, object], schema: Schema, content_field: str | None = None
    ) -> list[Example]:
        """Return the documents of a row.

        Raises:
            DataError: the row lacks a field, or a value is invalid.
        """
        row = dict(row) if self.tools is None else {"tools": list(self.tools), **row}
        given = GivenRows([row])  # released at the end of this function
        inform = Inform(type="python", data_files=given.address, name="row")
        if content_field is not None:
            inform = Inform(
                type="python", data_files=given.address, name="row", content_field=content_field
            )
        return list(Documents(inform, schema=schema))

    def encode_row(
        self, row: Mapping[str, object], schema: Schema, content_field: str | None = None
    ) -> list[SequenceArrays]:
        """Return the tokens of the columns of a row, with 1 for tokens that have a loss."""
        encoder = Encoder.create(self.tokenizer, self.options, None, schema)
        return encoder.encode(self.read_row(row, schema, content_field), "row").sequences()


class SFTPreprocessTransform(RowTransform):
    """A text, a chat, or a prompt with its completion, cut and padded on the right.

    Args:
        tokenizer: a tokenizer of transformers.
        max_length: number of tokens of a row.
        text_field, messages_field: names of the fields with texts and chats.
        mask_prompt: whether to return `completion_mask`, 1 for tokens with a loss.
        add_eos: only True; each document ends with the end-of-text token.
        truncation: whether longer rows are cut.
        formatting_func: returns a text or a row, given a row.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        text_field: str = "text",
        messages_field: str = "messages",
        mask_prompt: bool = False,
        add_eos: bool = True,
        truncation: bool = True,
        formatting_func: Callable[[Mapping[str, object]], object] | None = None,
    ) -> None:
        if not add_eos:
            raise ConfigError(
                "add_eos=False: documents end with the end-of-text token; remove the last id of "
                "input_ids instead"
            )
        super().__init__(tokenizer, assistant_only_loss=mask_prompt)
        self.max_length, self.fields = max_length, (messages_field, text_field)
        self.mask_prompt, self.truncation = mask_prompt, truncation
        self.formatting_func = formatting_func

    def __call__(self, example: Mapping[str, object]) -> TokenRow:
        """Return `input_ids`, `attention_mask`, and with `mask_prompt` the `completion_mask`."""
        if "input_ids" in example:
            return dict(example)
        if self.formatting_func is not None:
            value = self.formatting_func(example)
            example = value if isinstance(value, Mapping) else {self.fields[1]: str(value)}
        field = next((name for name in self.fields if name in example), None)
        if field is None and {"prompt", "completion"} <= example.keys():
            (sequence,) = self.encode_row(example, COMPLETION)
        else:
            if self.mask_prompt and isinstance(example.get(field or ""), str):
                raise ConfigError(
                    f"mask_prompt: the text in {field!r} has no prompt; pass messages, or prompt "
                    "and completion"
                )
            (sequence,) = self.encode_row(example, TEXT, field)
        count = self.max_length if self.truncation else None
        ids, losses = sequence.tokens.tolist()[:count], sequence.mask.tolist()[:count]
        ones = [1] * len(ids)
        row: TokenRow = {
            "input_ids": _pad_right(ids, self.max_length, self.pad_id),
            "attention_mask": _pad_right(ones, self.max_length, 0),
        }
        if self.mask_prompt:
            row["completion_mask"] = _pad_right(losses or ones, self.max_length, 0)
        return row


class GRPOPreprocessTransform(RowTransform):
    """A prompt, which keeps its last tokens and is padded on the left.

    Args:
        tokenizer: a tokenizer of transformers.
        max_prompt_length: number of tokens of a prompt; None: neither cut nor padded.
        tools: tools of rows without the field `tools`.
        skip_apply_chat_template: only False; a prompt of messages needs the template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int | None = None,
        tools: Sequence[object] | None = None,
        skip_apply_chat_template: bool = False,
    ) -> None:
        if skip_apply_chat_template:
            raise ConfigError(
                "skip_apply_chat_template=True: a prompt of messages always gets the chat "
                "template; pass the prompt as a text"
            )
        super().__init__(tokenizer, tools=tools)
        self.max_prompt_length = max_prompt_length

    def __call__(self, example: Mapping[str, object]) -> TokenRow:
        """Return `input_ids` and `attention_mask`, with the `tools` of the row."""
        if "input_ids" in example:
            return dict(example)
        encoder = Encoder.create(self.tokenizer, self.options, None, PROMPT)
        (ids,) = encoder.encode_prompts(self.read_row(example, PROMPT), "row")
        row = _pad_left(ids, self.max_prompt_length, self.pad_id)
        return row | ({"tools": example["tools"]} if "tools" in example else {})


class PPOPreprocessTransform(GRPOPreprocessTransform):
    """As `GRPOPreprocessTransform`."""


class AnswerTransform(RowTransform):
    """Answers to a prompt, each within its limits.

    Args:
        tokenizer: a tokenizer of transformers.
        max_prompt_length: number of tokens of a prompt, which keeps its last tokens.
        max_completion_length: number of tokens of an answer, which keeps its first tokens.
        add_special_tokens: whether the tokenizer adds its own special tokens.
        tools: tools of rows without the field `tools`.
        label_pad_token_id: label of the tokens of prompts and of padding.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int | None = None,
        max_completion_length: int | None = None,
        add_special_tokens: bool = False,
        tools: Sequence[object] | None = None,
        label_pad_token_id: int = _IGNORED,
    ) -> None:
        super().__init__(tokenizer, add_special_tokens=add_special_tokens, tools=tools)
        self.limits = max_prompt_length, max_completion_length
        self.label_pad_id = label_pad_token_id

    def split_sequence(self, sequence: SequenceArrays) -> tuple[list[int], list[int]]:
        """Return the ids of the prompt and of the answer, each within its limit."""
        start = int(np.argmax(sequence.mask)) if len(sequence.mask) else 0
        ids, (most, longest) = sequence.tokens.tolist(), self.limits
        prompt = ids[:start]
        return prompt if most is None else prompt[-most:], ids[start:][:longest]

    def build_prompt(self, prompt: list[int], length: int | None) -> TokenRow:
        """Return the ids and the mask of a prompt, padded on the left to a length."""
        row = _pad_left(prompt, length, self.pad_id)
        return {f"prompt_{name}": value for name, value in row.items()}

    def build_answer(self, name: str, prompt: list[int], answer: list[int], size: int) -> TokenRow:
        """Return ids, mask and labels of a prompt with its answer, padded to a size."""
        labels = [self.label_pad_id] * len(prompt) + answer
        ones = [1] * len(labels)
        return {
            f"{name}_input_ids": _pad_right(prompt + answer, size, self.pad_id),
            f"{name}_attention_mask": _pad_right(ones, size, 0),
            f"{name}_labels": _pad_right(labels, size, self.label_pad_id),
        }


class DPOPreprocessTransform(AnswerTransform):
    """A prompt with a better and a worse answer; arguments of `AnswerTransform`."""

    def __call__(self, example: Mapping[str, object]) -> TokenRow:
        """Return ids and masks of the prompt; and ids, masks and labels of both answers."""
        if "prompt_input_ids" in example:
            return dict(example)
        sequences = [self.split_sequence(one) for one in self.encode_row(example, PREFERENCE)]
        row = self.build_prompt(sequences[0][0], self.limits[0])
        size = sum(limit or 0 for limit in self.limits)
        for name, (prompt, answer) in zip(("chosen", "rejected"), sequences, strict=True):
            row |= self.build_answer(name, prompt, answer, size)
        return row


class ORPOPreprocessTransform(DPOPreprocessTransform):
    """As `DPOPreprocessTransform`."""


CPOPreprocessTransform = DPOPreprocessTransform


class LabelledTransform(AnswerTransform):
    """A prompt with a completion that is good or not.

    Args:
        tokenizer, max_prompt_length, max_completion_length, add_special_tokens,
            label_pad_token_id, tools: see `AnswerTransform`.
        embedding_tokenizer: only None; `bco` has no classifier of prompts.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int | None = None,
        max_completion_length: int | None = None,
        add_special_tokens: bool = False,
        label_pad_token_id: int = _IGNORED,
        embedding_tokenizer: None = None,
        tools: Sequence[object] | None = None,
    ) -> None:
        if embedding_tokenizer is not None:
            raise ConfigError("embedding_tokenizer: bco has no classifier of prompts; omit it")
        limits = max_prompt_length, max_completion_length
        super().__init__(tokenizer, *limits, add_special_tokens, tools, label_pad_token_id)

    def build_row(self, sequence: SequenceArrays, label: bool) -> TokenRow:
        """Return ids and masks of prompt and completion, the labels, and the `label`."""
        prompt, completion = self.split_sequence(sequence)
        answer = self.build_answer("completion", prompt, completion, 0)
        return {**self.build_prompt(prompt, None), **answer, "label": label}


class KTOPreprocessTransform(LabelledTransform):
    """A prompt with a completion and its `label`; arguments of `LabelledTransform`."""

    def __call__(self, example: Mapping[str, object]) -> TokenRow:
        """Return the row of a completion, without padding."""
        if "prompt_input_ids" in example:
            return dict(example)
        (sequence,) = self.encode_row(example, COMPLETION)
        return self.build_row(sequence, bool(example["label"]))


class BCOPreprocessTransform(LabelledTransform):
    """A completion with its `label`, or a pair of answers; arguments of `LabelledTransform`."""

    def __call__(self, example: Mapping[str, object]) -> Iterator[TokenRow]:
        """Yield the row of a completion, or the rows of a better and a worse answer."""
        if "prompt_input_ids" in example:
            yield dict(example)
        elif "completion" in example:
            (sequence,) = self.encode_row(example, COMPLETION)
            yield self.build_row(sequence, bool(example["label"]))
        else:
            sequences = self.encode_row(example, PREFERENCE)
            for sequence, label in zip(sequences, (True, False), strict=True):
                yield self.build_row(sequence, label)


class RewardPreprocessTransform(RowTransform):
    """A better and a worse answer, each with its prompt.

    Args:
        tokenizer: a tokenizer of transformers.
        max_length: number of tokens of a row, which is padded on the right.
        truncation: whether longer rows are cut.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, truncation: bool = True
    ) -> None:
        super().__init__(tokenizer)
        self.max_length, self.truncation = max_length, truncation

    def __call__(self, example: Mapping[str, object]) -> TokenRow:
        """Return ids and masks of both answers."""
        if "input_ids_chosen" in example:
            return dict(example)
        row: TokenRow = {}
        count = self.max_length if self.truncation else None
        sequences = self.encode_row(example, PREFERENCE)
        for name, sequence in zip(("chosen", "rejected"), sequences, strict=True):
            ids = sequence.tokens.tolist()[:count]
            row[f"input_ids_{name}"] = _pad_right(ids, self.max_length, self.pad_id)
            row[f"attention_mask_{name}"] = _pad_right([1] * len(ids), self.max_length, 0)
        return row


def _pad_right(values: list[int], length: int, value: int) -> list[int]:
    return values + [value] * (length - len(values))


def _pad_left(ids: list[int], length: int | None, pad_id: int) -> TokenRow:
    """Return the last ids of a prompt and their mask, padded on the left."""
    ids = ids if length is None else ids[-length:]
    missing = max((length or 0) - len(ids), 0)
    return {
        "input_ids": [pad_id] * missing + ids,
        "attention_mask": [0] * missing + [1] * len(ids),
    }
