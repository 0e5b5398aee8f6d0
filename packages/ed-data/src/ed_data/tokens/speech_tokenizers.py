"""Tokenizers and processors of new models of speech, from their transcripts."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_data.errors import DataError
from ed_data.languages import LANGUAGES
from ed_data.tokens.bpe import train_bpe

if TYPE_CHECKING:
    from transformers import Wav2Vec2Processor, WhisperProcessor

END, WORD, UNKNOWN, PAD = "<|endoftext|>", "|", "<unk>", "<pad>"
#: Special tokens that follow those of all languages; transformers computes ids from this order.
_WHISPER = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")


def train_ctc(texts: Iterable[str], vocab_size: int) -> Wav2Vec2Processor:
    """Return a processor whose labels are the characters of texts; `|` separates words.

    Args:
        texts: the training texts.
        vocab_size: largest number of labels.

    Raises:
        DataError: there is no text, or there are more characters.
    """
    from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    characters = {character for text in texts for character in text}
    if not characters:
        raise DataError("cannot create labels: the texts are empty")
    letters = sorted(character for character in characters if not character.isspace())
    labels = [PAD, UNKNOWN, WORD, *(letter for letter in letters if letter != WORD)]
    if len(labels) > vocab_size:
        raise DataError(
            f"the texts have {len(labels)} labels, their characters and special labels, and "
            f"vocab_size is {vocab_size}: raise it, or clean the texts in preprocessing_fn"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "vocab.json")
        file.write_text(json.dumps({label: i for i, label in enumerate(labels)}), "utf-8")
        # transcripts have no first and no last token
        without: dict[str, Any] = {"bos_token": None, "eos_token": None}
        tokenizer = Wav2Vec2CTCTokenizer(str(file), unk_token=UNKNOWN, pad_token=PAD, **without)
    return Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True), tokenizer)


def train_whisper(
    texts: Iterable[str],
    vocab_size: int,
    *,
    min_frequency: int = 2,
    mel_bins: int = 80,
    positions: int = 1500,
) -> WhisperProcessor:
    """Return a processor of Whisper with byte-level tokens of texts.

    Args:
        texts: the training texts.
        vocab_size: number of tokens of texts; special tokens and those of times are added.
        min_frequency: minimum number of occurrences of a merged pair.
        mel_bins: features of a frame.
        positions: positions of the encoder; 50 are a second.

    Raises:
        DataError: the window is no number of seconds, the vocabulary is too small, or there is no
            text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import (
        AddedToken,
        WhisperFeatureExtractor,
        WhisperProcessor,
        WhisperTokenizer,
    )

    if positions % 50:
        raise DataError(
            f"max_source_positions={positions} is no number of seconds: use a multiple of 50"
        )
    if vocab_size < 257:
        raise DataError(
            f"vocab_size={vocab_size} is too small: 256 bytes and an end token need 257"
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=min_frequency,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    every = list(texts)
    if not any(every):
        raise DataError("cannot train a tokenizer: the texts are empty")
    backend.train_from_iterator(every, trainer)
    with tempfile.TemporaryDirectory() as folder:
        backend.model.save(folder)
        vocab = json.loads(Path(folder, "vocab.json").read_text("utf-8"))
        vocab[END] = len(vocab)
        Path(folder, "vocab.json").write_text(json.dumps(vocab), "utf-8")
        names = ("unk_token", "bos_token", "eos_token", "pad_token")
        files = str(Path(folder, "vocab.json")), str(Path(folder, "merges.txt"))
        tokenizer = WhisperTokenizer(*files, **dict.fromkeys(names, END))
    special = [f"<|{name}|>" for name in ("startoftranscript", *LANGUAGES, *_WHISPER)]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    times = [f"<|{number * 0.02:.2f}|>" for number in range(positions + 1)]
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    extractor = WhisperFeatureExtractor(feature_size=mel_bins, chunk_length=positions // 50)
    return WhisperProcessor(extractor, tokenizer)


def train_moonshine(
    texts: Iterable[str], vocab_size: int, min_frequency: int = 2
) -> Wav2Vec2Processor:
    """Return a processor of Moonshine: samples, and byte-level tokens of texts.

    Raises:
        DataError: the vocabulary is too small, or there is no text.
    """
    from transformers import Wav2Vec2FeatureExtractor, Wav2Vec2Processor

    tokenizer = train_bpe(texts, vocab_size, min_frequency=min_frequency, chat_template=None)
    return Wav2Vec2Processor(Wav2Vec2FeatureExtractor(return_attention_mask=True), tokenizer)
