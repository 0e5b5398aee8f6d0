"""Documents to tokens, in batches: texts, chat messages and given ids; a marker ends each one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ed_data.config import Tokenization
from ed_data.errors import DataError
from ed_data.transforms import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[NDArray[Any]], list[NDArray[Any]] | None, list[int]]
_GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Encoder:
    """A tokenizer with the options that decide what a document's tokens are.

    Attributes:
        tokenizer: a tokenizer of transformers.
        add_special_tokens: let it add its own (a beginning-of-text marker, for most).
        eos: id that ends each document; not added where the tokens end with it already.
        assistant_only_loss: make loss masks from the chat template's `{% generation %}`.
        batch_size: documents per call of the tokenizer.
    """

    tokenizer: PreTrainedTokenizerBase
    add_special_tokens: bool
    eos: int
    assistant_only_loss: bool
    batch_size: int

    @classmethod
    def create(
        cls, tokenizer: PreTrainedTokenizerBase, options: Tokenization, eos: int | None
    ) -> Encoder:
        """Check the options against the tokenizer.

        Raises:
            DataError: there is no end-of-document id, or the chat template marks no answers.
        """
        own = tokenizer.eos_token_id
        if eos is None and isinstance(own, int):
            eos = own
        if eos is None:
            raise DataError(
                "the tokenizer has no end-of-text token; set mixture.pack_eos_token_id to the id "
                "that ends a document"
            )
        if not 0 <= eos < len(tokenizer):
            raise DataError(
                f"pack_eos_token_id is {eos}, and the tokenizer has the ids 0 to "
                f"{len(tokenizer) - 1}"
            )
        if options.assistant_only_loss and not _GENERATION.search(_template(tokenizer)):
            raise DataError(
                "assistant_only_loss needs a chat template that marks the answers with "
                "{% generation %} … {% endgeneration %}; this tokenizer's template does not"
            )
        return cls(
            tokenizer,
            options.add_special_tokens,
            int(eos),
            options.assistant_only_loss,
            options.batch_size,
        )

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return len(self.tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """Changes when the tokens of some document may."""
        options = [self.add_special_tokens, self.eos, self.assistant_only_loss]
        return f"{tokenizer_fingerprint(self.tokenizer)}:{json.dumps(options)}"

    def encode_all(self, documents: Iterable[Document], label: str) -> Iterator[Encoded]:
        """Encode documents batch by batch, in their order."""
        stream = iter(documents)
        while batch := list(islice(stream, self.batch_size)):
            yield self.encode(batch, label)

    def encode(self, documents: list[Document], label: str) -> Encoded:
        """Encode documents: token arrays, loss masks (or None), content hashes.

        Raises:
            DataError: there is no chat template, messages do not fit it, or an id is out of range.
        """
        ids: list[Any] = [None] * len(documents)
        masks: list[Any] = [None] * len(documents)
        kinds = [_kind(document) for document in documents]
        texts = [i for i, kind in enumerate(kinds) if kind == "text"]
        chats = [i for i, kind in enumerate(kinds) if kind == "chat"]
        if texts:
            found = self._encode_texts([documents[i].content for i in texts])  # type: ignore[misc]
            for i, tokens in zip(texts, found, strict=True):
                ids[i] = tokens
        if chats:
            found, found_masks = self._encode_chats([documents[i] for i in chats], label)
            for i, tokens, mask in zip(chats, found, found_masks, strict=True):
                ids[i], masks[i] = tokens, mask
        for i, document in enumerate(documents):
            if kinds[i] == "ids":
                ids[i] = self._check_ids(document, label)
            ids[i], masks[i] = self._end(np.asarray(ids[i], np.int64), masks[i])
        return (
            ids,
            masks if self.assistant_only_loss else None,
            [document.digest for document in documents],
        )

    def _encode_texts(self, texts: list[str]) -> list[list[int]]:
        backend = _plain_backend(self.tokenizer)
        if backend is not None:
            found = backend.encode_batch_fast(texts, add_special_tokens=self.add_special_tokens)
            return [encoding.ids for encoding in found]
        return self.tokenizer(
            texts,
            add_special_tokens=self.add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            truncation=False,
            verbose=False,
        )["input_ids"]

    def _encode_chats(
        self, documents: list[Document], label: str
    ) -> tuple[list[list[int]], list[list[int] | None]]:
        if not _template(self.tokenizer):
            raise DataError(
                f"inform {label!r} has chat messages, and the tokenizer has no chat template"
            )
        try:
            found: Any = self.tokenizer.apply_chat_template(
                [document.content for document in documents],  # pyright: ignore[reportArgumentType]
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=self.assistant_only_loss,
            )
        except Exception as error:  # whatever a template raises: jinja's own, and Python's
            first, last = documents[0].row, documents[-1].row
            raise DataError(
                f"inform {label!r}, rows {first} to {last}: the chat template cannot show the "
                f"messages: {error}"
            ) from error
        if not self.assistant_only_loss:
            return found["input_ids"], [None] * len(documents)
        return found["input_ids"], found["assistant_masks"]

    def _check_ids(self, document: Document, label: str) -> list[int]:
        tokens: list[int] = document.content  # type: ignore[assignment]
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.vocab_size:
            raise DataError(
                f"inform {label!r}, row {document.row}: token id {low if low < 0 else high}, and "
                f"the tokenizer has the ids 0 to {self.vocab_size - 1}"
            )
        return tokens

    def _end(
        self, tokens: NDArray[np.int64], mask: list[int] | None
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """End a document; the loss on the marker is that of the token before it."""
        flags = np.ones(len(tokens), np.uint8) if mask is None else np.asarray(mask, np.uint8)
        if len(tokens) and tokens[-1] == self.eos:
            return tokens, flags
        last = flags[-1:] if len(flags) else np.ones(1, np.uint8)
        return np.append(tokens, self.eos), np.concatenate([flags, last])


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash what a tokenizer does with text; loading it from elsewhere does not change it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # The last caller's settings: this package sets them at every call.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    text = json.dumps([state, special, _template(tokenizer)], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _plain_backend(tokenizer: Any) -> Any:
    """The Rust tokenizer, where transformers adds nothing of its own to what it does.

    It skips offsets and masks that nobody reads here, which takes a third of the time. None where
    a class has its own way of encoding, or there is no Rust tokenizer.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    plain = (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind.__call__ is PreTrainedTokenizerBase.__call__
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
    )
    if not plain:
        return None
    backend = tokenizer.backend_tokenizer
    # transformers sets these anew at each of its own calls.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("default")
    return template or ""


def _kind(document: Document) -> str:
    if isinstance(document.content, str):
        return "text"
    return "chat" if isinstance(document.content[0], dict) else "ids"
