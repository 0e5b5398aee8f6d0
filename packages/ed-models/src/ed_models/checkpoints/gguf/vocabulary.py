"""The tokenizer of a GGUF file, as tokenizer.json and tokenizer_config.json.

llama.cpp has four kinds of vocabularies: `gpt2` (merges of bytes), `llama` (SentencePiece with
scores, where a higher score merges first), `bert` (WordPiece) and `t5` (Unigram).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError, did_you_mean

from ed_models.checkpoints.gguf.header import GGUFValue, get_text_value, get_text_values, numbers
from ed_models.checkpoints.gguf.pretokenizers import DIVISIONS, SYNONYMS, build_pretokenizer_steps

TOKENIZER_KEY = "tokenizer.ggml"
#: Key of a whole tokenizer.json.
WHOLE = "tokenizer.huggingface.json"
TEMPLATE = "tokenizer.chat_template"
#: `tokenizer.ggml.token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
#: Name of a special token of `transformers` -> key.
SPECIAL_TOKENS: Mapping[str, str] = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # the spelling of the specification
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
SPACE = "\u2581"
_LONGEST = 256  # characters of a token that is the result of merges
#: Merges that follow from scores, for each token, and their characters for each character of the
#: vocabulary. Vocabularies of SentencePiece have about 2 merges for each token.
_MAX_MERGES, _MAX_CHARACTERS = 6, 8
_FREE_MERGES, _FREE_CHARACTERS = 2**14, 2**18  # for small vocabularies
_MAX_ADDED = 2**17  # tokens that are found before a text is divided


class TokenTable:
    """The tokens of a file."""

    def __init__(self, metadata: Mapping[str, GGUFValue]):
        self.metadata = metadata
        self.tokens = get_text_values(metadata, f"{TOKENIZER_KEY}.tokens")
        self.types = numbers(metadata, f"{TOKENIZER_KEY}.token_type") or [NORMAL] * len(self.tokens)
        self.scores = numbers(metadata, f"{TOKENIZER_KEY}.scores") or [0.0] * len(self.tokens)
        if not len(self.tokens) == len(self.types) == len(self.scores):
            raise CheckpointError(
                f"{TOKENIZER_KEY} has {len(self.tokens)} tokens, {len(self.types)} types and "
                f"{len(self.scores)} scores: the file is damaged"
            )
        self.ids: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            self.ids.setdefault(token, number)

    def flag(self, name: str, *, default: bool) -> bool:
        """Return an option of the tokenizer."""
        return bool(self.metadata.get(f"{TOKENIZER_KEY}.{name}", default))

    def special(self, name: str) -> str | None:
        """Return the text of a special token."""
        number = self.metadata.get(f"{TOKENIZER_KEY}.{SPECIAL_TOKENS[name]}")
        if not isinstance(number, int) or not 0 <= number < len(self.tokens):
            return None
        return self.tokens[number]

    def list_added_tokens(self) -> list[dict[str, Any]]:
        """Return the tokens that are found before a text is divided."""
        kinds = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
        count = sum(kind in kinds for kind in self.types)
        if count > _MAX_ADDED:
            raise CheckpointError(
                f"{TOKENIZER_KEY}.token_type marks {count} tokens as special or user-defined, and "
                f"{_MAX_ADDED} are allowed: the file is damaged"
            )
        return [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kinds[kind],
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in kinds and token
        ]

    def ends(self, *, bos: bool, eos: bool) -> dict[str, Any] | None:
        """Return the post-processor that adds special tokens around a text."""
        start = self.special("cls_token") or self.special("bos_token")
        end = self.special("sep_token") or self.special("eos_token")
        bos_token = start if self.flag("add_bos_token", default=bos) else None
        eos_token = end if self.flag("add_eos_token", default=eos) else None
        if not (bos_token or eos_token):
            return None

        def around(kind: str, first: str | None) -> list[dict[str, Any]]:
            type_id = 0 if kind == "A" else 1
            return [
                *([{"SpecialToken": {"id": first, "type_id": type_id}}] if first else []),
                {"Sequence": {"id": kind, "type_id": type_id}},
                *([{"SpecialToken": {"id": eos_token, "type_id": type_id}}] if eos_token else []),
            ]

        second = None if self.special("cls_token") else bos_token
        return {
            "type": "TemplateProcessing",
            "single": around("A", bos_token),
            "pair": [*around("A", bos_token), *around("B", second)],
            "special_tokens": {
                token: {"id": token, "ids": [self.ids[token]], "tokens": [token]}
                for token in (bos_token, eos_token)
                if token is not None
            },
        }


def write_tokenizer(directory: Path, metadata: Mapping[str, GGUFValue]) -> None:
    """Write the files of the tokenizer; nothing if the file has none.

    Raises:
        CheckpointError: the vocabulary is damaged or of an unknown kind.
    """
    kind = get_text_value(metadata, f"{TOKENIZER_KEY}.model")
    tokenizer_json = get_text_value(metadata, WHOLE)
    if (kind is None or kind == "none") and tokenizer_json is None:
        return
    vocabulary = TokenTable(metadata)
    content = tokenizer_json or json.dumps(_content(vocabulary, str(kind)), ensure_ascii=False)
    (directory / "tokenizer.json").write_text(content, encoding="utf-8")
    special = {name: vocabulary.special(name) for name in SPECIAL_TOKENS}
    settings: dict[str, Any] = {name: token for name, token in special.items() if token is not None}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if kind == "bert":
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    template = get_text_value(metadata, TEMPLATE)
    if template:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")


def _content(vocabulary: TokenTable, kind: str) -> dict[str, Any]:
    if kind not in _KINDS:
        raise CheckpointError(
            f"the file has a vocabulary of the kind {kind!r}, which is not read"
            f"{did_you_mean(kind, _KINDS)} (known: {', '.join(_KINDS)}): put the tokenizer.json of "
            "the original checkpoint next to the model, and load a directory"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.list_added_tokens(),
        **_KINDS[kind](vocabulary),
    }


def _bytes(vocabulary: TokenTable) -> dict[str, Any]:
    """Merges of bytes."""
    name = get_text_value(vocabulary.metadata, f"{TOKENIZER_KEY}.pre", "default") or "default"
    name = SYNONYMS.get(name, name)
    if name not in DIVISIONS:
        raise CheckpointError(
            f"{TOKENIZER_KEY}.pre is {name!r}, a division of texts that is not known"
            f"{did_you_mean(name, [*DIVISIONS, *SYNONYMS])}: update this package, or use the "
            "checkpoint in Hugging Face layout"
        )
    division = DIVISIONS[name]
    steps = build_pretokenizer_steps(division)
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": vocabulary.ends(bos=division.bos, eos=False),
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": division.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": list(_merges(vocabulary)),
        },
    }


def _merges(vocabulary: TokenTable) -> Iterator[list[str]]:
    """Return the merges whose parts and result are tokens."""
    for merge in get_text_values(vocabulary.metadata, f"{TOKENIZER_KEY}.merges"):
        at = merge.find(" ", 1)
        first_token, right = merge[:at], merge[at + 1 :]
        if at < 0 or not right:
            raise CheckpointError(
                f"{TOKENIZER_KEY}.merges contains {merge[:40]!r}, which is no merge"
            )
        if {first_token, right, first_token + right} <= vocabulary.ids.keys():
            yield [first_token, right]


def _pieces(vocabulary: TokenTable, merges: list[list[str]] | None = None) -> dict[str, Any]:
    """Pieces of SentencePiece, merged by their scores, or by merges in order."""
    prefix = vocabulary.flag("add_space_prefix", default=True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*normalizers, replace]},
        "pre_tokenizer": None,
        "post_processor": vocabulary.ends(bos=True, eos=False),
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": vocabulary.special("unk_token") or _unknown(vocabulary),
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.ids,
            "merges": merges_of_scores(vocabulary) if merges is None else merges,
        },
    }


def _lines(vocabulary: TokenTable) -> dict[str, Any]:
    """Merges of characters within lines, with bytes for other characters, as in Gemma 4."""
    content = _pieces(vocabulary, list(_merges(vocabulary)))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    content["normalizer"] = replace
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": r"\n+"},
        "behavior": "Isolated",
        "invert": False,
    }
    return content


def merges_of_scores(vocabulary: TokenTable) -> list[list[str]]:
    """Return merges in the order in which SentencePiece makes them: by the score of the result."""
    usable = {
        token: score
        for token, score, kind in zip(
            vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True
        )
        if kind in (NORMAL, USER_DEFINED, UNUSED)
    }
    # The merges are counted before any is stored: all parts of one text of 250 characters as tokens
    # would have 2.6 million merges.
    most = _FREE_MERGES + _MAX_MERGES * len(usable)
    longest = _FREE_CHARACTERS + _MAX_CHARACTERS * sum(map(len, usable))
    count = characters = 0
    for token, _ in _cuts(usable):
        count, characters = count + 1, characters + len(token)
        if count > most or characters > longest:
            raise CheckpointError(
                f"the {len(usable)} tokens of {TOKENIZER_KEY} have more than {most} merges, or "
                f"merges of more than {longest} characters: the file is damaged"
            )
    merges = sorted((-usable[token], vocabulary.ids[token], cut) for token, cut in _cuts(usable))
    tokens = vocabulary.tokens
    return [[tokens[number][:cut], tokens[number][cut:]] for _, number, cut in merges]


def _cuts(usable: Mapping[str, float]) -> Iterator[tuple[str, int]]:
    """Yield the tokens that are two tokens, and the length of the first one."""
    for token in usable:
        for cut in range(1, min(len(token), _LONGEST)):
            if token[:cut] in usable and token[cut:] in usable:
                yield token, cut


def _unknown(vocabulary: TokenTable) -> str | None:
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    return next((token for token, kind in pairs if kind == UNKNOWN), None)


def _words(vocabulary: TokenTable) -> dict[str, Any]:
    """WordPiece: llama.cpp marks the start of a word instead of its continuation."""
    specials = {entry["content"] for entry in vocabulary.list_added_tokens()}
    vocab = {
        token
        if token in specials or (token.startswith("[") and token.endswith("]"))
        else (token.removeprefix(SPACE) if token.startswith(SPACE) else f"##{token}"): number
        for number, token in enumerate(vocabulary.tokens)
    }
    unknown = vocabulary.special("unk_token") or "[UNK]"
    if unknown not in vocab:  # the tokenizer would fail at the first unknown word
        raise CheckpointError(
            f"{TOKENIZER_KEY}.tokens has no token {unknown!r:.80} for unknown words: "
            "the file is damaged"
        )
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": vocabulary.flag("normalizer.lowercase", default=True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": vocabulary.ends(bos=True, eos=True),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": vocab,
        },
    }


def _unigram(vocabulary: TokenTable) -> dict[str, Any]:
    """Pieces of SentencePiece, chosen by the sum of their scores."""
    charsmap: Sequence[int] = numbers(vocabulary.metadata, f"{TOKENIZER_KEY}.precompiled_charsmap")
    steps: list[dict[str, Any]] = []
    if len(charsmap):
        coded = base64.b64encode(bytes(n % 256 for n in charsmap)).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": coded})
    if vocabulary.flag("remove_extra_whitespaces", default=False):
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    scheme = "always" if vocabulary.flag("add_space_prefix", default=True) else "never"
    metaspace = {"replacement": SPACE, "prepend_scheme": scheme, "split": True}
    unknown = vocabulary.ids.get(vocabulary.special("unk_token") or _unknown(vocabulary) or "", 0)
    pairs = zip(vocabulary.tokens, vocabulary.scores, strict=True)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": {"type": "Metaspace", **metaspace},
        "post_processor": vocabulary.ends(bos=False, eos=True),
        "decoder": {"type": "Metaspace", **metaspace},
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [[token, float(score)] for token, score in pairs],
            "byte_fallback": False,
        },
    }


#: `tokenizer.ggml.model` -> normalizer, division, model and so on of tokenizer.json.
_KINDS: Mapping[str, Callable[[TokenTable], dict[str, Any]]] = {
    "gpt2": _bytes,
    "llama": _pieces,
    "gemma4": _lines,
    "bert": _words,
    "t5": _unigram,
}
