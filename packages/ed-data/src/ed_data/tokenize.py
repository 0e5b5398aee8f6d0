"""Documents to tokens, in batches: texts, chat messages and ids; a marker ends each sequence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.answers import with_answers
from ed_data.config import Tokenization
from ed_data.errors import DataError
from ed_data.kinds import Item, kind_of, of_one_kind, with_blame
from ed_data.pretrained import chat_template, plain_backend, tokenizer_fingerprint
from ed_data.schema import NO_VALUE, TEXT, Column, Example, Schema

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_GENERATION = re.compile(r"\{%-?\s*generation\b")


class Encoded(NamedTuple):
    """Some documents as tokens.

    Attributes:
        tokens: one array for each column of each document, document after document.
        masks: 1 where a token has loss, likewise; None where each has.
        digests: `Example.digest` of each document.
        contents: `Example.content_digest` of each document; None where they are the digests.
        values: float32 [tokens, values] of each sequence, as `schema.Value`; None where the schema
            has none.
    """

    tokens: list[NDArray[np.int64]]
    masks: list[NDArray[np.uint8]] | None
    digests: list[int]
    contents: list[int] | None = None
    values: list[NDArray[np.float32]] | None = None


class Skipped(Protocol):
    """Counts what is left out: `ed_data.transforms.Tally`."""

    def drop(self, reason: str, where: str) -> None: ...


#: Ids, and the loss mask where something has already decided on one.
_Sequence = tuple[list[int], list[int] | None]
#: Where the steps of a sequence end: after so many tokens.
_Ends = list[int]


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with the options that decide on the tokens of a document.

    Attributes:
        tokenizer: a tokenizer of transformers.
        add_special_tokens: let it add its own (a beginning-of-text marker, for most).
        eos: id that ends each document; not added where the tokens end with it already.
        assistant_only_loss: make loss masks of chats: from the template's `{% generation %}`, or
            as `answers` tells them.
        batch_size: documents per call of the tokenizer.
        schema: the columns that a document has.
    """

    tokenizer: PreTrainedTokenizerBase
    add_special_tokens: bool
    eos: int
    assistant_only_loss: bool
    batch_size: int
    schema: Schema = TEXT

    @classmethod
    def create(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        options: Tokenization,
        eos: int | None,
        schema: Schema = TEXT,
    ) -> Encoder:
        """Check the options against the tokenizer.

        Raises:
            DataError: there is no end-of-document id, or no chat template that could tell answers.
        """
        own = tokenizer.eos_token_id
        if eos is None and isinstance(own, int):
            eos = own
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-text token; set mixture.pack_eos_token_id to the id "
                "that ends a document",
                ("pack_eos_token_id",),
            )
        if not 0 <= eos < len(tokenizer):
            raise DataError(
                f"pack_eos_token_id is {eos}, and the tokenizer has the ids 0 to "
                f"{len(tokenizer) - 1}",
                ("pack_eos_token_id",),
            )
        if options.assistant_only_loss and not chat_template(tokenizer):
            raise DataError(
                "assistant_only_loss is about chats, and the tokenizer has no chat template",
                ("tokenization", "assistant_only_loss"),
            )
        return cls(
            tokenizer,
            options.add_special_tokens,
            int(eos),
            options.assistant_only_loss,
            options.batch_size,
            schema,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.tokenizer)

    @property
    def has_loss_mask(self) -> bool:
        """Whether there are tokens without loss."""
        with_context = any(column.context is not None for column in self.schema.columns)
        return self.assistant_only_loss or with_context

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the tokens of some document may."""
        options: list[object] = [self.add_special_tokens, self.eos, self.assistant_only_loss]
        if self.schema != TEXT:
            options.append(self.schema.as_json())
        return f"{tokenizer_fingerprint(self.tokenizer)}:{json.dumps(options)}"

    def encode(self, documents: list[Example], label: str, skip: Skipped | None = None) -> Encoded:
        """Encode documents of the inform `label`.

        Args:
            documents: at least one.
            label: for messages.
            skip: counts the documents that cannot be encoded, which then have no tokens; None
                raises their errors.

        Raises:
            DataError: there is no chat template, messages do not fit it, a text cannot be encoded,
                or an id is out of range; the message names the row.
        """
        if skip is not None:
            return self._encode_what_can_be(documents, label, skip)
        columns, values = [], []
        for column in self.schema.columns:
            sequences = self._column(documents, column, label)
            ended = [self._end(tokens, mask) for tokens, mask, _ in sequences]
            columns.append(ended)
            if self.schema.values:
                values.append(
                    [
                        self._values(column, document, len(tokens), ends)
                        for document, (tokens, _), (_, _, ends) in zip(
                            documents, ended, sequences, strict=True
                        )
                    ]
                )
        sequences = [sequence for document in zip(*columns, strict=True) for sequence in document]
        own = len(self.schema.fields) == 1 and not self.schema.values
        return Encoded(
            [tokens for tokens, _ in sequences],
            [mask for _, mask in sequences] if self.has_loss_mask else None,
            [document.digest for document in documents],
            None if own else [d.content_digest for d in documents],
            [v for each in zip(*values, strict=True) for v in each] if values else None,
        )

    def _values(
        self, column: Column, document: Example, length: int, ends: _Ends
    ) -> NDArray[np.float32]:
        result = np.full((length, len(self.schema.values)), NO_VALUE, np.float32)
        for i, value in enumerate(self.schema.values):
            if value.column == column.name and column.steps:
                result[np.array(ends) - 1, i] = document.values[i]
            elif value.column == column.name:
                result[:, i] = document.values[i]
        return result

    def encode_prompts(self, documents: list[Example], label: str) -> list[list[int]]:
        """Encode prompts alone: no end of text follows, and a chat ends with the head of an answer.

        Raises:
            DataError: as `encode`.
        """
        items = [Item(d.content, f"inform {label!r}, {d.place}, prompt") for d in documents]
        sequences = self._tokens(items, begins_answer=True)
        return [ids[:-1] if ids[-1:] == [self.eos] else list(ids) for ids, _ in sequences]

    def _encode_what_can_be(self, documents: list[Example], label: str, skip: Skipped) -> Encoded:
        try:
            return self.encode(documents, label)
        except DataError as error:
            if len(documents) == 1:
                skip.drop("skipped, because of an error", str(error))
                (document,) = documents
                empty = [np.empty(0, np.int64)] * len(self.schema.columns)
                masks = [np.empty(0, np.uint8)] * len(self.schema.columns)
                own = len(self.schema.fields) == 1 and not self.schema.values
                values = [np.empty((0, len(self.schema.values)), np.float32)] * len(empty)
                return Encoded(
                    empty,
                    masks if self.has_loss_mask else None,
                    [document.digest],
                    None if own else [document.content_digest],
                    values if self.schema.values else None,
                )
        half = len(documents) // 2
        first, second = (
            self._encode_what_can_be(part, label, skip)
            for part in (documents[:half], documents[half:])
        )
        joined = (
            None if a is None or b is None else [*a, *b] for a, b in zip(first, second, strict=True)
        )
        return Encoded(*joined)  # type: ignore[arg-type]

    def _column(
        self, documents: list[Example], column: Column, label: str
    ) -> list[tuple[list[int], list[int] | None, _Ends]]:
        """The sequences of a column, without their ends; and where the steps of each end."""
        name = "content_field" if column.field == self.schema.content else repr(column.field)
        items = [
            Item(d.fields[column.field], f"inform {label!r}, {d.place}, {name}") for d in documents
        ]
        if column.steps:
            return self._step_by_step(documents, items, column)
        if column.context is None:
            return [(*sequence, []) for sequence in self._tokens(items)]
        contexts, bodies = [], []
        for document, item in zip(documents, items, strict=True):
            context, body = of_one_kind(document.fields[column.context], item.content, item.where)
            contexts.append(Item(context, item.where))
            bodies.append(Item(body, item.where))
        heads = self._tokens(contexts, begins_answer=True)
        # Messages are joined before the template sees them; texts and ids are joined as tokens.
        wholes = self._tokens(
            [
                body._replace(content=[*context.content, *body.content])
                if kind_of(body.content) == "chat"
                else body
                for context, body in zip(contexts, bodies, strict=True)
            ],
            add_special_tokens=False,
        )
        result: list[tuple[list[int], list[int] | None, _Ends]] = []
        for body, (head, _), (tokens, mask) in zip(bodies, heads, wholes, strict=True):
            if kind_of(body.content) != "chat":
                head = head[:-1] if head[-1:] == [self.eos] else head
                tokens = [*head, *tokens]
            shared = takewhile(lambda pair: pair[0] == pair[1], zip(head, tokens, strict=False))
            start = sum(1 for _ in shared)
            learned = [1] * len(tokens) if mask is None else mask
            result.append((tokens, [0] * start + learned[start:], []))
        return result

    def _step_by_step(
        self, documents: list[Example], items: list[Item], column: Column
    ) -> list[tuple[list[int], list[int] | None, _Ends]]:
        """Context, and steps that are encoded each by itself, so that each ends with a token."""
        texts = [Item(f"{step}\n", item.where) for item in items for step in item.content]
        steps = iter(self._tokens(texts, add_special_tokens=False))
        heads: list[_Sequence] = [([], None)] * len(items)
        if column.context is not None:
            contexts = [
                item._replace(content=document.fields[column.context])
                for document, item in zip(documents, items, strict=True)
            ]
            heads = self._tokens(contexts, begins_answer=True)
        result: list[tuple[list[int], list[int] | None, _Ends]] = []
        for item, (head, _) in zip(items, heads, strict=True):
            tokens = head[:-1] if head[-1:] == [self.eos] else list(head)
            start, ends = len(tokens), []
            for ids, _ in islice(steps, len(item.content)):
                tokens = [*tokens, *ids]
                ends.append(len(tokens))
            result.append((tokens, [0] * start + [1] * (len(tokens) - start), ends))
        return result

    def _tokens(
        self,
        items: list[Item],
        *,
        add_special_tokens: bool | None = None,
        begins_answer: bool = False,
    ) -> list[_Sequence]:
        """Encode fields of any kind; `begins_answer` ends chats with the head of an answer."""
        special = self.add_special_tokens if add_special_tokens is None else add_special_tokens
        encoders: dict[str, Callable[[list[Item]], list[_Sequence]]] = {
            "text": partial(self._texts, special=special),
            "chat": partial(self._chats, begins_answer=begins_answer),
            "ids": self._ids,
        }
        kinds = [kind_of(item.content) for item in items]
        result: list[_Sequence] = [([], None)] * len(items)
        for kind, encode in encoders.items():
            at = [i for i, other in enumerate(kinds) if other == kind]
            for i, sequence in zip(at, encode([items[i] for i in at]) if at else (), strict=True):
                result[i] = sequence
        return result

    def _texts(self, items: list[Item], special: bool) -> list[_Sequence]:
        def encode(texts: list[Any]) -> list[list[int]]:
            backend = plain_backend(self.tokenizer)
            if backend is not None:
                encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
                return [encoding.ids for encoding in encodings]
            return self.tokenizer(
                texts,
                add_special_tokens=special,
                return_attention_mask=False,
                return_token_type_ids=False,
                truncation=False,
                verbose=False,
            )["input_ids"]

        encoded = with_blame(encode, items, "the tokenizer cannot encode the text")
        return [(ids, None) for ids in encoded]

    def _chats(self, items: list[Item], begins_answer: bool) -> list[_Sequence]:
        if not chat_template(self.tokenizer):
            raise DataError(
                f"{items[0].where}: these are chat messages, and the tokenizer has no chat template"
            )
        masked = self.assistant_only_loss and not begins_answer

        if masked and not _GENERATION.search(chat_template(self.tokenizer)):

            def marked(chats: list[Any]) -> list[_Sequence]:
                return [with_answers(self.tokenizer, chat) for chat in chats]

            return with_blame(marked, items, "the answers of the chat cannot be told")

        def encode(chats: list[Any]) -> list[_Sequence]:
            output: Any = self.tokenizer.apply_chat_template(
                chats,
                tokenize=True,
                return_dict=True,
                add_generation_prompt=begins_answer,
                return_assistant_tokens_mask=masked,
            )
            masks = output["assistant_masks"] if masked else [None] * len(chats)
            return list(zip(output["input_ids"], masks, strict=True))

        return with_blame(encode, items, "the chat template cannot show the messages")

    def _ids(self, items: list[Item]) -> list[_Sequence]:
        last = self.vocab_size - 1
        result: list[_Sequence] = []
        for content, where in items:
            tokens: list[int] = content  # type: ignore[assignment]
            wrong = next((t for t in (min(tokens), max(tokens)) if not 0 <= t <= last), None)
            if wrong is not None:
                raise DataError(
                    f"{where}: token id {wrong}, and the tokenizer has the ids 0 to {last}; the "
                    "ids may be another tokenizer's"
                )
            result.append((tokens, None))
        return result

    def _end(
        self, tokens: list[int], mask: list[int] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """End a sequence; the loss on the marker is that of the token before it."""
        ids = np.asarray(tokens, np.int64)
        flags = np.ones(len(ids), np.uint8) if mask is None else np.asarray(mask, np.uint8)
        if len(ids) and ids[-1] == self.eos:
            return ids, flags
        last = flags[-1:] if len(flags) else np.ones(1, np.uint8)
        return np.append(ids, self.eos), np.concatenate([flags, last])
