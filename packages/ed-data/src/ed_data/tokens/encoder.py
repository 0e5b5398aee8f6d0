"""Encode documents in batches: texts, chat messages and ids; each sequence ends with a token."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ed_data.config import Tokenization
from ed_data.errors import DataError
from ed_data.rows.contents import get_kind, is_ids, unify_kinds
from ed_data.rows.example import Example
from ed_data.schema import NO_VALUE, TEXT, Column, Schema
from ed_data.tokens.audio import AudioEncoder
from ed_data.tokens.chats import ChatEncoder
from ed_data.tokens.encoded import EncodedDocuments
from ed_data.tokens.items import (
    DocumentField,
    MediumEncoder,
    TokenSequence,
    WhiteSpace,
    append_eos,
    check_embedding_rows,
    get_placeholder,
    mask_prompt,
    with_blame,
)
from ed_data.tokens.media import prepare_media
from ed_data.tokens.parts import by_words, in_pairs, mark_answer, windows
from ed_data.tokens.tokenizers import (
    chat_template,
    count_ids,
    encode_texts,
    tokenizer_fingerprint,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger("ed_data")

#: Increased when the same rows produce different tokens, which invalidates older caches.
_VERSION = 4


class Skipped(Protocol):
    """Counts dropped documents: `ed_data.rows.documents.Tally`."""

    def drop(self, reason: str, location: str) -> None: ...


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with the options that determine the tokens of a document.

    Attributes:
        tokenizer: a tokenizer of transformers; None for documents without text.
        add_special_tokens: whether the tokenizer adds its own special tokens (for most, a
            beginning-of-text token).
        eos: id that ends each document. It is not added if the tokens already end with it, or if
            a chat ends with an end token of its template.
        assistant_only_loss: create loss masks of chats, from `{% generation %}` in the template or
            as `answers` finds them.
        batch_size: documents per call of the tokenizer.
        schema: the columns of a document.
        media: encodes the images or the recordings of documents; None refuses chats with media.
        audio: encodes recordings and transcripts; None for schemas without recordings.
        embedding_rows: number of rows of the model's embedding, if the tokenizer has ids without a
            row. Documents with such ids are errors.
        max_length: number of tokens at which documents are truncated, to truncate the longer text
            of a pair, and to check that truncation removes no medium and no part of a transcript.
    """

    tokenizer: Any  # None without texts
    add_special_tokens: bool
    eos: int
    assistant_only_loss: bool
    batch_size: int
    schema: Schema = TEXT
    media: MediumEncoder | None = None
    max_length: int | None = None
    audio: AudioEncoder | None = None
    embedding_rows: int | None = None

    @classmethod
    def create(
        cls,
        tokenizer: PreTrainedTokenizerBase | None,
        options: Tokenization,
        eos: int | None,
        schema: Schema = TEXT,
        media: MediumEncoder | None = None,
        max_length: int | None = None,
        audio: AudioEncoder | None = None,
        embedding_rows: int | None = None,
    ) -> Encoder:
        """Validate the options against the tokenizer and return the encoder.

        Args:
            tokenizer: a tokenizer of transformers.
            options: the section `tokenization`.
            eos: id that ends each document; None for the tokenizer's end-of-text token, or its
                separator.
            schema: the columns of a document.
            media: see `Encoder.media`.
            max_length: see `Encoder.max_length`.
            audio: see `Encoder.audio`.
            embedding_rows: number of rows of the model's embedding; None = unknown.

        Raises:
            DataError: there is no end-of-document id, `assistant_only_loss` needs a chat template,
                or the schema does not support media.
        """
        if tokenizer is None:
            return cls(None, False, 0, False, options.batch_size, schema, media)
        if eos is None:
            # Tokenizers of encoders end a text with a separator.
            end_ids = (tokenizer.eos_token_id, tokenizer.sep_token_id)
            if audio is not None and not audio.kind.has_decoder:  # transcripts have no end token
                end_ids = (*end_ids, tokenizer.pad_token_id)
            eos = next((token for token in end_ids if isinstance(token, int)), None)
        if eos is None:
            raise DataError(
                "the tokenizer has neither an end-of-text token nor a separator: set "
                "mixture.pack_eos_token_id to the id that ends a document",
                ("pack_eos_token_id",),
            )
        count = count_ids(tokenizer)
        if not 0 <= eos < count:
            raise DataError(
                f"pack_eos_token_id={eos} is invalid: the ids of the tokenizer are 0 to "
                f"{count - 1}",
                ("pack_eos_token_id",),
            )
        if embedding_rows is not None and eos >= embedding_rows:
            raise DataError(
                f"the token {tokenizer.convert_ids_to_tokens(eos)!r}, which ends documents, has "
                f"the id {eos}, and the model has {embedding_rows} rows of embeddings: use the "
                "tokenizer of the model, set mixture.pack_eos_token_id, or add rows to the model "
                "(model: {resize_token_embeddings: true})",
                ("pack_eos_token_id",),
            )
        if options.assistant_only_loss and not chat_template(tokenizer):
            raise DataError(
                "assistant_only_loss requires a chat template, but the tokenizer has none",
                ("tokenization", "assistant_only_loss"),
            )
        parts = any(column.in_parts for column in schema.columns)
        pairs = any(column.second is not None for column in schema.columns)
        # The media of a row belong to its prompt, with which every sequence begins.
        contexts = {column.context for column in schema.columns}
        shared = len(schema.columns) == 1 or (len(contexts) == 1 and None not in contexts)
        if media is not None and (not shared or parts or pairs):
            raise DataError(
                "a processor is supported for documents with one sequence of tokens, such as "
                "messages, or with several answers to one prompt, such as prompt, chosen and "
                "rejected; this schema has the columns "
                f"{[column.name for column in schema.columns]}"
            )
        return cls(
            tokenizer,
            options.add_special_tokens,
            int(eos),
            options.assistant_only_loss,
            options.batch_size,
            schema,
            media,
            max_length if media is not None or pairs or audio is not None else None,
            audio,
            embedding_rows if embedding_rows is not None and embedding_rows < count else None,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens and holes."""
        return 1 if self.tokenizer is None else self._id_count

    @cached_property
    def _id_count(self) -> int:
        return count_ids(self.tokenizer)

    @property
    def has_loss_mask(self) -> bool:
        """Whether some tokens have no loss."""
        with_context = any(column.context is not None for column in self.schema.columns)
        return self.assistant_only_loss or with_context or self._has_placeholders

    @property
    def _has_placeholders(self) -> bool:
        return self.media is not None and self.media.token is not None

    @cached_property
    def _chats(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer, self.eos, self.assistant_only_loss)

    @cached_property
    def _spaces(self) -> WhiteSpace:
        return WhiteSpace(self.tokenizer)

    @cached_property
    def _warned(self) -> list[bool]:
        return []

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that the tokens of a document depend on."""
        options: list[object] = [self.add_special_tokens, self.eos, self.assistant_only_loss]
        options.append(_VERSION)
        if not self.schema.kind.is_text:
            options.append(self.schema.as_json())
        if self.media is not None:
            options += [self.media.fingerprint, self.max_length]
        elif self.audio is not None:
            options += [self.audio.fingerprint, self.max_length]
        elif self.max_length is not None:
            options.append(self.max_length)
        if self.embedding_rows is not None:
            options.append(["embedding_rows", self.embedding_rows])
        tokenizer_hash = "" if self.tokenizer is None else tokenizer_fingerprint(self.tokenizer)
        return f"{tokenizer_hash}:{json.dumps(options)}"

    def encode(
        self, documents: list[Example], label: str, skip: Skipped | None = None
    ) -> EncodedDocuments:
        """Encode documents of one inform.

        Args:
            documents: at least one.
            label: name of the inform, for messages.
            skip: counts the documents that cannot be encoded, which then have no tokens; None
                raises their errors.

        Raises:
            DataError: there is no chat template, the template rejects the messages, a text cannot
                be encoded, an id is out of range, or an image is invalid. The message names the
                row.
        """
        if skip is not None:
            return self._encode_what_can_be(documents, label, skip)
        documents = self._prepare_media(documents, label)
        if self.tokenizer is None:  # one token represents the image
            columns = [[TokenSequence([self.eos]) for _ in documents]]
        elif self.schema.kind.has_windows:
            documents, columns = self._windows(documents, label)
        else:
            columns = [self._column(documents, column, label) for column in self.schema.columns]
        if self._has_placeholders:
            columns = [self._with_media(documents, column, label) for column in columns]
        for sequences in columns:
            check_embedding_rows(self, documents, sequences, label)
        arrays, values = [], []
        for column, sequences, prompts in zip(
            self.schema.columns, columns, self._prompt_lengths(columns), strict=True
        ):
            arrays.append([mask_prompt(t, n) for t, n in zip(sequences, prompts, strict=True)])
            if self.schema.values:
                values.append(
                    [
                        self._values(column, document, tokens)
                        for document, tokens in zip(documents, sequences, strict=True)
                    ]
                )
        sequences = [sequence for document in zip(*arrays, strict=True) for sequence in document]
        has_single_field = len(self.schema.fields) == 1 and not self.schema.values
        return EncodedDocuments(
            [tokens for tokens, _ in sequences],
            [mask for _, mask in sequences] if self.has_loss_mask else None,
            [document.digest for document in documents],
            None if has_single_field else [d.content_digest for d in documents],
            [v for document_values in zip(*values, strict=True) for v in document_values]
            if values
            else None,
        )

    def _with_media(
        self, documents: list[Example], sequences: list[TokenSequence], label: str
    ) -> list[TokenSequence]:
        """Expand the placeholders of media, and check that truncation removes none of them."""
        media = self.media
        assert media is not None
        limit, result = self.max_length, list[TokenSequence]()
        placeholders = {t for t in (media.token, media.video_token) if t is not None}
        features = {media.feature, media.video_token}
        for document, sequence in zip(documents, sequences, strict=True):
            location = f"inform {label!r}, {document.place}"
            tokens = [token for token in sequence.ids if token in placeholders]
            expected = [get_placeholder(media, medium) for medium in document.media]
            if tokens != expected:
                video = media.video_token in (*tokens, *expected)
                noun, part = ("video", "video") if video else (media.noun, media.part)
                token = media.video_token if video else media.token
                assert token is not None, "the media have placeholders"
                raise DataError(
                    f"{location}: the row has {expected.count(token)} {noun}s, but its tokens "
                    f"contain the {part} token {self.tokenizer.convert_ids_to_tokens(token)!r} "
                    f"{tokens.count(token)} times; correct the row, or use a chat template that "
                    f'writes the token for each part {{"type": "{part}"}}. '
                    f"{noun.capitalize()}s of rows with several answers belong to the prompt"
                )
            expanded = sequence.with_media(
                placeholders, [media.tokens(medium).ids for medium in document.media], self._spaces
            )
            if limit is not None and not features.isdisjoint(expanded.ids[limit:]):
                raise DataError(
                    f"{location}: the row has {len(expanded.ids)} tokens, and truncation at "
                    f"{limit} tokens would remove {media.noun} tokens; increase the sequence "
                    "length, shorten the row, or set on_error: skip"
                )
            result.append(expanded)
        return result

    def _prepare_media(self, documents: list[Example], label: str) -> list[Example]:
        """Return documents whose texts have placeholders of their media; see `prepare_media`."""
        if self.audio is not None:
            return documents
        media = self.media if self._has_placeholders else None
        return prepare_media(documents, media, self.tokenizer, self.schema.content, label)

    def _prompt_lengths(self, columns: list[list[TokenSequence]]) -> list[list[int]]:
        """Return the prompt length of each sequence, equal for columns of one prompt, as in TRL."""
        contexts = [column.context for column in self.schema.columns]
        return [
            [
                min(
                    other_column[i].prompt
                    for other_column, its in zip(columns, contexts, strict=True)
                    if its == context
                )
                for i in range(len(column))
            ]
            for column, context in zip(columns, contexts, strict=True)
        ]

    def _values(
        self, column: Column, document: Example, tokens: TokenSequence
    ) -> NDArray[np.float32]:
        result = np.full((len(tokens.ids), len(self.schema.values)), NO_VALUE, np.float32)
        for i, value in enumerate(self.schema.values):
            if value.token_types:
                result[:, i] = tokens.types if value.column == column.name else NO_VALUE
            elif tokens.span is not None:
                result[:, i] = tokens.span[(self.schema.kind.labels or ()).index(value.name)]
            elif value.column == column.name and column.in_parts:
                places = np.array(tokens.places)
                result[places[places >= 0], i] = np.array(document.values[i])[places >= 0]
            elif value.column == column.name:
                result[:, i] = document.values[i]
        return result

    def encode_prompts(self, documents: list[Example], label: str) -> list[list[int]]:
        """Encode prompts without an end-of-text token; a chat ends with the start of an answer.

        Raises:
            DataError: as `encode`.
        """
        documents = self._prepare_media(documents, label)
        items = [
            DocumentField(d.content, f"inform {label!r}, {d.place}, prompt", d.template)
            for d in documents
        ]
        prompts = self._prompts(items)
        check_embedding_rows(self, documents, list(map(TokenSequence, prompts)), label)
        if not self._has_placeholders:
            return prompts
        sequences = self._with_media(documents, list(map(TokenSequence, prompts)), label)
        return [sequence.ids for sequence in sequences]

    def _encode_what_can_be(
        self, documents: list[Example], label: str, skip: Skipped
    ) -> EncodedDocuments:
        try:
            if self.media is not None:  # errors of decoding are found while rows can be skipped
                self._prepare_media(documents, label)
                for medium in (medium for document in documents for medium in document.media):
                    self.media.check(medium)
            return self.encode(documents, label)
        except DataError as error:
            if len(documents) == 1:
                skip.drop("skipped, because of an error", str(error))
                (document,) = documents
                empty = [np.empty(0, np.int64)] * len(self.schema.columns)
                masks = [np.empty(0, np.uint8)] * len(self.schema.columns)
                has_single_field = len(self.schema.fields) == 1 and not self.schema.values
                values = [np.empty((0, len(self.schema.values)), np.float32)] * len(empty)
                return EncodedDocuments(
                    empty,
                    masks if self.has_loss_mask else None,
                    [document.digest],
                    None if has_single_field else [document.content_digest],
                    values if self.schema.values else None,
                )
        half = len(documents) // 2
        first, second = (
            self._encode_what_can_be(part, label, skip)
            for part in (documents[:half], documents[half:])
        )
        return EncodedDocuments._make(
            None if a is None or b is None else [*a, *b] for a, b in zip(first, second, strict=True)
        )

    def _windows(
        self, documents: list[Example], label: str
    ) -> tuple[list[Example], list[list[TokenSequence]]]:
        """Return the document of each window, and the windows as the only column."""
        (column,) = self.schema.columns
        assert column.stride is not None
        assert self.max_length is not None
        items = self._items(documents, column, label)
        seconds = [document.fields[str(column.second)] for document in documents]
        context_windows = windows(
            self.tokenizer, items, seconds, self.eos, self.max_length, column.stride
        )
        token, result = self.tokenizer.cls_token_id, []
        cls = token if isinstance(token, int) else None
        for window in context_windows:
            start, stop, *_ = documents[window.pair].values
            answer = int(start), int(stop)  # type: ignore[arg-type]
            result.append(mark_answer(window, cls, answer))
        return [documents[window.pair] for window in context_windows], [result]

    def _items(self, documents: list[Example], column: Column, label: str) -> list[DocumentField]:
        """Return the field of a column of each document."""
        name = "content_field" if column.field == self.schema.content else repr(column.field)
        items = []
        for document in documents:
            content = document.fields[column.field]
            if column.listed == column.field:
                content = content[column.item]  # type: ignore[index]
            location = f"inform {label!r}, {document.place}, {name}"
            items.append(DocumentField(content, location, document.template))
        return items

    def _column(self, documents: list[Example], column: Column, label: str) -> list[TokenSequence]:
        """Encode one column of each document."""
        items = self._items(documents, column, label)
        if column.steps:
            return self._step_by_step(documents, items, column)
        if column.words:
            return by_words(self.tokenizer, items, self.eos, special=self.add_special_tokens)
        if column.second is not None:
            seconds: list[Any] = [document.fields[column.second] for document in documents]
            if column.item is not None:
                seconds = [texts[column.item] for texts in seconds]
            return in_pairs(self.tokenizer, items, seconds, self.eos, self.max_length)
        if self.audio is not None:
            return self._transcripts(documents, items, label)
        if column.context is None:
            return self._encode_documents(items)
        heads, bodies = [], []
        for document, item in zip(documents, items, strict=True):
            context, body = unify_kinds(
                document.fields[column.context], item.content, item.location
            )
            heads.append(item._replace(content=context))
            if get_kind(context) == "ids" and context[-1:] == [self.eos]:
                context = context[:-1]
            # Prompt and answer are tokenized as one text, or rendered as one chat, as in TRL.
            bodies.append(item._replace(content=context + body))  # type: ignore[operator]
        result: list[TokenSequence] = []
        for head, sequence in zip(
            self._prompts(heads), self._encode_documents(bodies), strict=True
        ):
            pairs = zip(head, sequence.ids, strict=False)
            prompt = next((i for i, (a, b) in enumerate(pairs) if a != b), len(head))
            if prompt < len(head):
                self._warn_of_prompt(head[prompt:])
            result.append(sequence._replace(prompt=prompt))
        return result

    def _transcripts(
        self, documents: list[Example], items: list[DocumentField], label: str
    ) -> list[TokenSequence]:
        """Encode transcripts, and check that they fit the model."""
        assert self.audio is not None
        result: list[TokenSequence] = []
        texts = self._texts(items, self.add_special_tokens)
        for document, tokens in zip(documents, texts, strict=True):
            labels = self.audio.labels(tokens, self.eos)
            self.audio.check(document, labels, self.max_length, label)
            result.append(TokenSequence(labels))
        return result

    def _warn_of_prompt(self, prompt_end: list[int]) -> None:
        """Warn once that the tokens of a prompt alone differ from those in the document."""
        if not self._warned:
            self._warned.append(True)
            log.warning(
                "the tokens of a prompt are not a prefix of the tokens of prompt and answer, "
                "because tokens merge at the boundary, or because the chat template renders a "
                "prompt alone differently. The answer begins at the first token that differs; the "
                "document does not contain the last tokens of the prompt alone, %r. This warning "
                "is logged once",
                self.tokenizer.decode(prompt_end),
            )

    def _step_by_step(
        self, documents: list[Example], items: list[DocumentField], column: Column
    ) -> list[TokenSequence]:
        """Encode the context and each step separately, so that each step ends at a token."""
        texts = [
            DocumentField(f"{step}\n", item.location) for item in items for step in item.content
        ]
        steps = iter(self._texts(texts, special=False))
        heads: list[list[int]] = [[]] * len(items)
        if column.context is not None:
            heads = self._prompts(
                [
                    item._replace(content=document.fields[column.context])
                    for document, item in zip(documents, items, strict=True)
                ]
            )
        result: list[TokenSequence] = []
        for item, head in zip(items, heads, strict=True):
            ids, places = list(head), []
            for step in islice(steps, len(item.content)):
                ids += step
                places.append(len(ids) - 1)
            result.append(TokenSequence(append_eos(ids, self.eos), None, len(head), tuple(places)))
        return result

    def _prompts(self, items: list[DocumentField]) -> list[list[int]]:
        """Encode prompts of any kind; a chat ends with the start of an answer."""

        def without_end(sequences: list[list[int]]) -> list[TokenSequence]:
            return [TokenSequence(ids[:-1] if ids[-1:] == [self.eos] else ids) for ids in sequences]

        sequences = self._by_kind(
            items,
            {
                "text": lambda kind_items: without_end(
                    self._texts(kind_items, self.add_special_tokens)
                ),
                "chat": lambda kind_items: self._chats.prompts(kind_items),
                "ids": lambda kind_items: without_end(self._ids(kind_items)),
            },
        )
        return [list(sequence.ids) for sequence in sequences]

    def _encode_documents(self, items: list[DocumentField]) -> list[TokenSequence]:
        """Encode documents of any kind, each with an end token."""

        def build_sequences(sequences: list[list[int]]) -> list[TokenSequence]:
            return [TokenSequence(append_eos(ids, self.eos)) for ids in sequences]

        return self._by_kind(
            items,
            {
                "text": lambda kind_items: build_sequences(
                    self._texts(kind_items, self.add_special_tokens)
                ),
                "chat": lambda kind_items: self._chats.encode_chats(kind_items),
                "ids": lambda kind_items: build_sequences(self._ids(kind_items)),
            },
        )

    def _by_kind(
        self,
        items: list[DocumentField],
        encoders: dict[str, Callable[[list[DocumentField]], list[TokenSequence]]],
    ) -> list[TokenSequence]:
        kinds = [get_kind(item.content) for item in items]
        result = [TokenSequence([])] * len(items)
        for kind, encode in encoders.items():
            at = [i for i, item_kind in enumerate(kinds) if item_kind == kind]
            for i, sequence in zip(at, encode([items[i] for i in at]) if at else (), strict=True):
                result[i] = sequence
        return result

    def _texts(self, items: list[DocumentField], special: bool) -> list[list[int]]:
        def encode(items: list[DocumentField]) -> list[list[int]]:
            return encode_texts(self.tokenizer, [item.content for item in items], special)

        return with_blame(encode, items, "the tokenizer cannot encode the text")

    def _ids(self, items: list[DocumentField]) -> list[list[int]]:
        last = self.vocab_size - 1
        result: list[list[int]] = []
        for item in items:
            tokens = item.content
            assert is_ids(tokens)
            ends = (min(tokens), max(tokens)) if tokens else ()
            wrong = next((t for t in ends if not 0 <= t <= last), None)
            if wrong is not None:
                raise DataError(
                    f"{item.location}: token id {wrong} is invalid: the ids of the tokenizer are 0 "
                    "to "
                    f"{last}; the ids may belong to another tokenizer"
                )
            result.append(tokens)
        return result
