"""A tokenizer of transformers: loaded by name, hashed, and its Rust tokenizer where it has one."""

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
    """Return the tokenizer that the mixture names, else the other one.

    Raises:
        DataError: there is neither, or the named one cannot be loaded.
    """
    path = ("tokenization", "tokenizer")
    name = mixture.tokenization.tokenizer
    if name is None:
        if tokenizer is None:
            raise DataError("no tokenizer: pass one, or set mixture.tokenization.tokenizer", path)
        return tokenizer
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise DataError(f"tokenization.tokenizer: cannot load {name!r}: {error}", path) from error


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash the way a tokenizer treats text; loading it from elsewhere does not change the hash."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        state = json.loads(backend.to_str())
        # The last caller's settings: this package sets them at every call.
        state.pop("truncation", None)
        state.pop("padding", None)
    else:
        state = {"class": type(tokenizer).__name__, "vocab": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    templates = getattr(tokenizer, "chat_template", None) or ""
    text = json.dumps([state, special, templates], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer | None:
    """The Rust tokenizer, where transformers adds nothing of its own to its work.

    Calling it directly skips offsets and masks that nobody reads here: a third of the time. None
    where a class has its own way of encoding, or there is no Rust tokenizer.
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
    # transformers sets these anew at each of its own calls.
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    return backend


def chat_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool = False) -> str:
    """Return the chat template that transformers takes, or an empty text.

    Args:
        tokenizer: one of transformers; it may have several templates by name.
        has_tools: whether the chat has tools, for which there may be a template of its own.
    """
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        name = "tool_use" if has_tools and "tool_use" in template else "default"
        template = template.get(name)
    return template or ""


def end_tokens(tokenizer: PreTrainedTokenizerBase, eos: int) -> dict[int, str]:
    """Return the special tokens that may end a turn of a chat, by id.

    These are the special tokens but the one that begins a text and the one for unknown text.

    Args:
        tokenizer: one of transformers.
        eos: the id that ends a document, which may end a turn in any case.
    """
    added = [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]
    own = tokenizer.eos_token_id
    other: list[Any] = [tokenizer.bos_token_id, tokenizer.unk_token_id]
    kept = {i for i in (*added, *tokenizer.all_special_ids) if i == own or i not in other}
    ids = sorted(kept | {eos})
    return dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
