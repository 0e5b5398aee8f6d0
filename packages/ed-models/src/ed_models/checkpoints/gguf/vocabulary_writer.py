"""The metadata of a tokenizer for a GGUF file, from its files in Hugging Face layout.

`tokenizer.huggingface.json` contains the whole tokenizer.json, so the tokenizer that is read again
is the same. llama.cpp reads the other keys.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError
from ed_infra.logging import get_logger, once

from ed_models.checkpoints.gguf.pretokenizers import find_division_name
from ed_models.checkpoints.gguf.vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    SPECIAL_TOKENS,
    TEMPLATE,
    TOKENIZER_KEY,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE,
)

logger = get_logger(__name__)
#: Metadata of a file without a tokenizer.
NO_TOKENIZER: Mapping[str, str] = {f"{TOKENIZER_KEY}.model": "none"}
_LIMIT = 2**28  # bytes of tokenizer.json
_SCORE_OF_UNUSED = -10_000.0


def tokenizer_metadata(directory: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in a directory, or `NO_TOKENIZER`.

    Args:
        directory: contains tokenizer.json and, perhaps, tokenizer_config.json and a chat template.
        vocab_size: rows of the embedding; the list of tokens is filled up to this number.

    Raises:
        CheckpointError: the tokenizer is damaged, or of a kind that llama.cpp lacks.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return dict(NO_TOKENIZER)
    if path.stat().st_size > _LIMIT:
        raise CheckpointError(f"{path} is larger than {_LIMIT} bytes; that is no tokenizer")
    try:
        tokenizer_json = path.read_text(encoding="utf-8")
        content = json.loads(tokenizer_json)
        settings = _settings(directory)
        kind = str(content["model"].get("type") or "BPE")
        metadata = _KINDS.get(kind, _unknown_kind)(content)
        tokens = metadata[f"{TOKENIZER_KEY}.tokens"]
        _add(metadata, content, vocab_size)
        ids = {token: number for number, token in enumerate(tokens)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} is no tokenizer ({error!r}); replace it") from error
    for name, key in SPECIAL_TOKENS.items():
        token = settings.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if token in ids:
            metadata[f"{TOKENIZER_KEY}.{key}"] = ids[token]
    added = _around(content.get("post_processor"))
    metadata[f"{TOKENIZER_KEY}.add_bos_token"] = added[0]
    metadata[f"{TOKENIZER_KEY}.add_eos_token"] = added[1]
    metadata[WHOLE] = tokenizer_json
    template = _template(directory, settings)
    if template:
        metadata[TEMPLATE] = template
    return metadata


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings if isinstance(settings, dict) else {}


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    return template if isinstance(template, str) else None


def _add(metadata: dict[str, Any], content: Mapping[str, Any], vocab_size: int) -> None:
    """Add tokens outside the vocabulary, and fill the list up to the size of the embedding."""
    tokens, types = metadata[f"{TOKENIZER_KEY}.tokens"], metadata[f"{TOKENIZER_KEY}.token_type"]
    scores = metadata.get(f"{TOKENIZER_KEY}.scores")
    added = {int(token["id"]): token for token in content.get("added_tokens") or ()}
    size = max(vocab_size, len(tokens), *(number + 1 for number in added), 0)
    if size > 2 * max(vocab_size, len(tokens)) + len(added):
        raise CheckpointError(f"an added token has the id {size - 1}, and {len(tokens)} tokens")
    for number in range(len(tokens), size):
        tokens.append(f"[PAD{number}]")
        types.append(UNUSED)
        if scores is not None:
            scores.append(_SCORE_OF_UNUSED)
    for number, token in added.items():
        tokens[number] = token["content"]
        if types[number] != UNKNOWN:
            types[number] = CONTROL if token.get("special") else USER_DEFINED


def _list_tokens(vocab: Mapping[str, int]) -> list[str]:
    tokens = [f"[PAD{number}]" for number in range(max(vocab.values(), default=-1) + 1)]
    if len(tokens) > 2 * len(vocab) + 1024:
        raise CheckpointError(f"a token has the id {len(tokens) - 1}, and {len(vocab)} tokens")
    for token, number in vocab.items():
        tokens[number] = token
    return tokens


def _build_bpe_metadata(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    tokens = _list_tokens(model["vocab"])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    if model.get("byte_fallback"):
        return _pieces(content, tokens, merges)
    name = find_division_name(
        content.get("pre_tokenizer"), ignore_merges=bool(model.get("ignore_merges"))
    )
    if name is None:
        once(
            logger,
            "llama.cpp has no name for the pre-tokenizer of this model: the GGUF file names "
            "'default', with which llama.cpp divides some texts in another way. This package reads "
            "the tokenizer unchanged",
        )
    vocabulary = set(model["vocab"])
    return {
        f"{TOKENIZER_KEY}.model": "gpt2",
        f"{TOKENIZER_KEY}.pre": name or "default",
        f"{TOKENIZER_KEY}.tokens": tokens,
        f"{TOKENIZER_KEY}.token_type": [
            NORMAL if token in vocabulary else UNUSED for token in tokens
        ],
        f"{TOKENIZER_KEY}.merges": merges,
    }


def _pieces(content: Mapping[str, Any], tokens: list[str], merges: list[str]) -> dict[str, Any]:
    """Pieces of SentencePiece: the first merge that gives a token determines its score."""
    ids = {token: number for number, token in enumerate(tokens)}
    scores = [0.0] * len(tokens)
    rank = 0
    for merge in merges:
        number = ids.get(merge.replace(" ", "", 1))
        if number is not None and scores[number] == 0.0:
            rank += 1
            scores[number] = -float(rank)
    unknown = content["model"].get("unk_token")
    types = [_type_of_piece(token, unknown) for token in tokens]
    return {
        f"{TOKENIZER_KEY}.model": "llama",
        f"{TOKENIZER_KEY}.pre": "default",
        f"{TOKENIZER_KEY}.tokens": tokens,
        f"{TOKENIZER_KEY}.scores": scores,
        f"{TOKENIZER_KEY}.token_type": types,
        f"{TOKENIZER_KEY}.add_space_prefix": _has_prefix(content),
    }


def _type_of_piece(token: str, unknown: str | None) -> int:
    if token == unknown:
        return UNKNOWN
    is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
    return BYTE if is_byte else NORMAL


def _has_prefix(content: Mapping[str, Any]) -> bool:
    """Whether a space is put in front of a text."""
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    return (
        '"Prepend"' in steps
        or '"prepend_scheme": "always"' in steps
        or ('"prepend_scheme": "first"' in steps)
    )


def _words(content: Mapping[str, Any]) -> dict[str, Any]:
    model, special = content["model"], {t["content"] for t in content.get("added_tokens") or ()}
    prefix = model.get("continuing_subword_prefix") or "##"

    def mark_token(token: str) -> str:
        if token in special or (token.startswith("[") and token.endswith("]")):
            return token
        return token.removeprefix(prefix) if token.startswith(prefix) else SPACE + token

    tokens = [mark_token(token) for token in _list_tokens(model["vocab"])]
    normalizer = content.get("normalizer") or {}
    return {
        f"{TOKENIZER_KEY}.model": "bert",
        f"{TOKENIZER_KEY}.pre": "default",
        f"{TOKENIZER_KEY}.tokens": tokens,
        f"{TOKENIZER_KEY}.token_type": [NORMAL] * len(tokens),
        f"{TOKENIZER_KEY}.normalizer.lowercase": bool(normalizer.get("lowercase", True)),
    }


def _unigram(content: Mapping[str, Any]) -> dict[str, Any]:
    model = content["model"]
    tokens = [str(token) for token, _ in model["vocab"]]
    types = [NORMAL] * len(tokens)
    if model.get("unk_id") is not None:
        types[model["unk_id"]] = UNKNOWN
    metadata = {
        f"{TOKENIZER_KEY}.model": "t5",
        f"{TOKENIZER_KEY}.pre": "default",
        f"{TOKENIZER_KEY}.tokens": tokens,
        f"{TOKENIZER_KEY}.scores": [float(score) for _, score in model["vocab"]],
        f"{TOKENIZER_KEY}.token_type": types,
        f"{TOKENIZER_KEY}.add_space_prefix": _has_prefix(content),
        f"{TOKENIZER_KEY}.remove_extra_whitespaces": " {2,}"
        in json.dumps(content.get("normalizer")),
    }
    steps = content.get("normalizer") or {}
    for step in steps.get("normalizers", [steps]):
        if step.get("type") == "Precompiled":
            metadata[f"{TOKENIZER_KEY}.precompiled_charsmap"] = base64.b64decode(
                step["precompiled_charsmap"]
            )
    return metadata


def _unknown_kind(content: Mapping[str, Any]) -> dict[str, Any]:
    raise CheckpointError(
        f"the tokenizer has a model of type {content['model'].get('type')!r}, which llama.cpp "
        f"lacks (known: {', '.join(_KINDS)})"
    )


def _around(processor: object) -> tuple[bool, bool]:
    """Whether special tokens are put before and after a text."""
    if not isinstance(processor, dict):
        return False, False
    if processor.get("type") in ("BertProcessing", "RobertaProcessing"):
        return True, True
    for step in processor.get("processors", [processor]):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            return "SpecialToken" in single[0], "SpecialToken" in single[-1]
    return False, False


#: Kind of the model of tokenizer.json -> function that returns the metadata.
_KINDS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "BPE": _build_bpe_metadata,
    "WordPiece": _words,
    "Unigram": _unigram,
}
