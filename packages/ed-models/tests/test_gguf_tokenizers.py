"""Tokenizers of GGUF files give the token ids of the tokenizers that they were written from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_models.checkpoints.gguf.pretokenizers import (
    DIVISIONS,
    SYNONYMS,
    build_pretokenizer_steps,
    find_division_name,
)
from ed_models.checkpoints.gguf.vocabulary import TOKENIZER_KEY, WHOLE, write_tokenizer
from ed_models.checkpoints.gguf.vocabulary_writer import tokenizer_metadata
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = (
    "The quick brown fox jumps over 12345 lazy dogs, doesn't it?\n\n  Indented text.",
    "Größe, naïve café, 東京 2024年, emoji 🙂 and\ttabs",
    "<s>special</s> tokens<extra> inside",
    "x = [i ** 2 for i in range(100)]  # comment\r\n",
    "",
)
CORPUS = [*TEXTS, *("the cat sat on the mat and looked at the other cats " * 3,) * 3]
SPECIAL = ["<unk>", "<s>", "</s>"]


def of_bytes(division: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=DIVISIONS[division].ignore_merges))
    steps = []
    for step in build_pretokenizer_steps(DIVISIONS[division]):
        if step["type"] == "Split":
            steps.append(pre_tokenizers.Split(Regex(step["pattern"]["Regex"]), "isolated"))
        elif step["type"] == "Digits":
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=step["use_regex"])
            )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<extra>", normalized=False)])
    return tokenizer


def of_pieces() -> Tokenizer:
    """Merges of characters, with bytes for other characters, as Llama 2 has them."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    in_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=[*SPECIAL, *in_bytes], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS[3:], trainer)
    # The trainer makes the bytes special tokens, which Llama's are not.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def of_words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


def of_scores() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=120,
        special_tokens=["<pad>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    **{f"bytes: {name}": (lambda name=name: of_bytes(name)) for name in DIVISIONS},
    "pieces": of_pieces,
    "words": of_words,
    "scores": of_scores,
}
TOKENS: dict[str, dict[str, str]] = {
    "words": {
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
        "mask_token": "[MASK]",
    },
    "scores": {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"},
}
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def saved(tokenizer: Tokenizer, folder: Path, kind: str) -> Path:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= TOKENS.get(kind, LLAMA_TOKENS)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


@pytest.mark.daily("bytes: llama-bpe", "pieces", "words", "scores")
@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_of_gguf_metadata_gives_same_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = KINDS[kind]()
    source = saved(tokenizer, tmp_path / "source", kind)
    metadata = tokenizer_metadata(source, tokenizer.get_vocab_size())
    assert json.loads(metadata[WHOLE]) == json.loads(tokenizer.to_str())
    if kind.startswith("bytes: "):
        written = metadata[f"{TOKENIZER_KEY}.pre"]
        assert DIVISIONS[written]._replace(bos=False) == DIVISIONS[kind[7:]]._replace(bos=False)
    del metadata[WHOLE]  # which llama.cpp does not write
    target = tmp_path / "target"
    target.mkdir()
    write_tokenizer(target, as_read(metadata))
    own = Tokenizer.from_file(str(target / "tokenizer.json"))
    for text in TEXTS:
        expected = tokenizer.encode(text)
        assert own.encode(text).ids == expected.ids, text
        assert own.decode(expected.ids) == tokenizer.decode(expected.ids)
    assert (target / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def as_read(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata as a file has them: arrays of numbers."""

    def stored(value: Any) -> Any:
        if isinstance(value, bytes):
            return np.frombuffer(value, np.uint8)
        is_numbers = isinstance(value, list) and not (value and isinstance(value[0], str))
        if not is_numbers:
            return value
        has_floats = any(isinstance(item, float) for item in value)
        return np.asarray(value, np.float32 if has_floats else np.int32)

    return {key: stored(value) for key, value in metadata.items()}


def test_tokenizer_of_gguf_loads_with_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = saved(of_pieces(), tmp_path / "source", "pieces")
    metadata = tokenizer_metadata(source, 600)
    assert len(metadata[f"{TOKENIZER_KEY}.tokens"]) == 600
    target = tmp_path / "target"
    target.mkdir()
    write_tokenizer(target, as_read(metadata))
    loaded = AutoTokenizer.from_pretrained(target)
    expected = AutoTokenizer.from_pretrained(source)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (1, 2)
    for text in TEXTS:
        assert loaded(text).input_ids == expected(text).input_ids
    assert loaded.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_every_division_has_its_own_name() -> None:
    for name, division in DIVISIONS.items():
        sequence = {"type": "Sequence", "pretokenizers": build_pretokenizer_steps(division)}
        found = find_division_name(sequence, ignore_merges=division.ignore_merges)
        assert found is not None
        assert DIVISIONS[found]._replace(bos=False) == division._replace(bos=False), name
    assert set(SYNONYMS.values()) <= DIVISIONS.keys()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{TOKENIZER_KEY}.model": "rwkv"}, "rwkv"),
        ({f"{TOKENIZER_KEY}.model": "gpt2", f"{TOKENIZER_KEY}.pre": "qwen3"}, "division"),
        ({f"{TOKENIZER_KEY}.tokens": ["a"]}, "damaged"),
        ({f"{TOKENIZER_KEY}.tokens": "text"}, "array of texts"),
    ],
)
def test_damaged_vocabulary_raises_checkpoint_error(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    metadata = tokenizer_metadata(saved(of_pieces(), tmp_path / "source", "pieces"), 0)
    del metadata[WHOLE]
    with pytest.raises(CheckpointError, match=message):
        write_tokenizer(tmp_path, as_read(metadata) | change)


@pytest.mark.parametrize(
    ("pre", "text", "parts"),
    [
        ("falcon", "in 1234 or 3", ["in", " ", "123", "4", " or", " 3"]),
        (None, "in 1234 or 3", ["in", " ", "123", "4", " or", " ", "3"]),
        ("default", "a12345.6", ["a", "123", "45", ".", "6"]),
        ("deepseek-llm", "in 12\n東京", ["in", " ", "12", "\n", "東京"]),
        ("gpt-2", "in 1234", ["in", " 1234"]),
    ],
)
def test_digits_are_divided_as_in_llama_cpp(
    pre: str | None, text: str, parts: list[str], tmp_path: Path
) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    metadata = {
        f"{TOKENIZER_KEY}.model": "gpt2",
        f"{TOKENIZER_KEY}.tokens": alphabet,
        f"{TOKENIZER_KEY}.merges": [],
    }
    metadata |= {} if pre is None else {f"{TOKENIZER_KEY}.pre": pre}
    write_tokenizer(tmp_path, as_read(metadata))
    division = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    assert division is not None
    spans = [span for _, span in division.pre_tokenize_str(text)]
    assert [text[start:end] for start, end in spans] == parts


def test_vocabulary_of_gemma_4_merges_within_lines(tmp_path: Path) -> None:
    pieces = ["<unk>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "\n", "▁", "a", "b"]
    pieces += ["\n\n", "▁a", "ab", "▁ab"]
    types = [3, 3, *(6,) * 256, *(1,) * 8]
    merges = ["\n \n", "▁ a", "a b", "▁a b"]
    metadata = {
        f"{TOKENIZER_KEY}.model": "gemma4",
        f"{TOKENIZER_KEY}.tokens": pieces,
        f"{TOKENIZER_KEY}.merges": merges,
        f"{TOKENIZER_KEY}.scores": [0.0] * len(pieces),
        f"{TOKENIZER_KEY}.token_type": types,
        f"{TOKENIZER_KEY}.bos_token_id": 1,
        f"{TOKENIZER_KEY}.add_space_prefix": False,
    }
    write_tokenizer(tmp_path, as_read(metadata))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "ab ab\n\n a é"
    encoded = tokenizer.encode(text)
    byte_tokens = ["▁", "<0xC3>", "<0xA9>"]
    assert encoded.tokens == ["<bos>", "ab", "▁ab", "\n\n", "▁a", *byte_tokens]
    assert tokenizer.decode(encoded.ids, skip_special_tokens=True) == text
