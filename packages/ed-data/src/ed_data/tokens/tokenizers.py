"""Tokenizers of transformers: loading, hashing, the Rust tokenizer, and chat templates."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ed_data.config import Mixture
from ed_data.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    mixture: Mixture, tokenizer: PreTrainedTokenizerBase | None
) -> PreTrainedTokenizerBase:
    """Return the tokenizer that the mixture names, otherwise the argument.

    Raises:
        DataError: both are missing, or the named tokenizer cannot be loaded.
    """
    path = ("tokenization", "tokenizer")
    name = mixture.tokenization.tokenizer
    if name is None:
        if tokenizer is None:
            raise DataError(
                "the tokenizer is missing: pass one, or set mixture.tokenization.tokenizer", path
            )
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenization.tokenizer: cannot load {name!r}: {error}", path) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of a tokenizer's behavior, which does not depend on its location."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # Settings of the most recent call, which this package sets at every call.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    templates = getattr(tokenizer, "chat_template", None) or ""
    text = json.dumps([state, special, templates], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def count_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the largest id of a tokenizer plus one.

    `len(tokenizer)` is the number of tokens, which is less if the ids have holes.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return max((*tokenizer.get_vocab().values(), *added, -1)) + 1


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """Return the Rust tokenizer, or None if transformers changes its result or there is none.

    Direct calls are a third faster, because they skip unused offsets and masks.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    if (
        not isinstance(tokenizer, PreTrainedTokenizerFast)
        or kind.__call__ is not PreTrainedTokenizerBase.__call__
        or kind._encode_plus is not PreTrainedTokenizerFast._encode_plus
    ):
        return None
    backend = tokenizer.backend_tokenizer
    # transformers sets these again at each of its calls.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def chat_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool = False) -> str:
    """Return the chat template that transformers uses, or an empty text.

    Args:
        tokenizer: a tokenizer of transformers; it may have several named templates.
        has_tools: whether the chat has tools, for which there may be a separate template.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        name = "tool_use" if has_tools and "tool_use" in template else "default"
        template = template.get(name)
    return template or ""


def end_tokens(tokenizer: PreTrainedTokenizerBase, eos: int) -> dict[int, str]:
    """Return the special tokens that may end a turn of a chat, by id.

    These are all special tokens except the beginning-of-text token and the unknown token.

    Args:
        tokenizer: a tokenizer of transformers.
        eos: id that ends a document, which may always end a turn.
    """
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    eos_id = tokenizer.eos_token_id
    excluded_ids: list[Any] = [tokenizer.bos_token_id, tokenizer.unk_token_id]
    special_ids = {
        i for i in (*added, *tokenizer.all_special_ids) if i == eos_id or i not in excluded_ids
    }
    ids = sorted(special_ids | {eos})
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[Any], special: bool) -> list[Any]:
    """Return the ids of texts.

    Args:
        tokenizer: a tokenizer of transformers.
        texts: the texts.
        special: whether the tokenizer adds its own special tokens.
    """
    backend = plain_backend(tokenizer)
    if backend is not None:
        encodings = backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in encodings]
    return tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        truncation=False,
        verbose=False,
    )["input_ids"]
