"""Tiny checkpoints for speech, written by `transformers`, and recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

RATE = 16000


def byte_letters() -> list[str]:
    """Return the letter of each byte in a byte-level vocabulary."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in own]
    letters = {byte: chr(byte) for byte in own}
    letters |= {byte: chr(256 + number) for number, byte in enumerate(rest)}
    return [letters[byte] for byte in (*own, *rest)]


def recording(seconds: float, seed: int = 0) -> np.ndarray:
    """Return a rising tone with noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(int(seconds * RATE)) / RATE
    tone = 0.4 * np.sin(2 * np.pi * (200 + 300 * rng.random() * t) * t)
    return (tone + 0.05 * rng.normal(size=len(t))).astype(np.float32)


def write_whisper(folder: Path, seed: int = 0) -> Any:
    """Write a tiny Whisper with windows of one second, and return the torch model."""
    import torch
    from transformers import (
        AddedToken,
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizer,
    )

    vocab = {letter: number for number, letter in enumerate(byte_letters())}
    end = len(vocab)
    (folder / "vocab.json").write_text(json.dumps({**vocab, "<|endoftext|>": end}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    names = ("unk_token", "bos_token", "eos_token", "pad_token")
    tokenizer = WhisperTokenizer(
        str(folder / "vocab.json"),
        str(folder / "merges.txt"),
        **dict.fromkeys(names, "<|endoftext|>"),
    )
    special = ["startoftranscript", "en", "de", "translate", "transcribe", "startoflm"]
    special = [f"<|{name}|>" for name in (*special, "startofprev", "nospeech", "notimestamps")]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    times = [f"<|{number * 0.02:.2f}|>" for number in range(51)]
    tokenizer.add_tokens([AddedToken(time, special=False, normalized=False) for time in times])
    extractor = WhisperFeatureExtractor(feature_size=20, chunk_length=1)
    WhisperProcessor(extractor, tokenizer).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in _names(special)}
    tokens = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    tokens["decoder_start_token_id"] = ids["startoftranscript"]
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=20,
        max_source_positions=50,
        max_target_positions=64,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **tokens,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config).eval()
    for value in model.parameters():
        factors = value.ndim == 1 and float(value.detach().mean()) > 0.5
        value.data.normal_(1.0 if factors else 0.0, 0.25)
    settings: dict[str, Any] = {
        **tokens,
        "is_multilingual": True,
        "lang_to_id": {f"<|{name}|>": ids[name] for name in ("en", "de")},
        "task_to_id": {name: ids[name] for name in ("transcribe", "translate")},
        "no_timestamps_token_id": ids["notimestamps"],
        "prev_sot_token_id": ids["startofprev"],
        "max_length": 64,
        "return_timestamps": False,
        "suppress_tokens": [1, 2, 3, *range(end + 1, end + 9)],
        "begin_suppress_tokens": [220, end],
        "max_initial_timestamp_index": 20,
    }
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    return model


def write_wav2vec2(folder: Path, seed: int = 0) -> Any:
    """Write a tiny Wav2Vec2 with a CTC head, and return the torch model."""
    import torch
    from transformers import (
        Wav2Vec2Config,
        Wav2Vec2CTCTokenizer,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2ForCTC,
        Wav2Vec2Processor,
    )

    labels = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAONIHSRDLU"]
    (folder / "vocab.json").write_text(json.dumps({x: i for i, x in enumerate(labels)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    config = Wav2Vec2Config(
        vocab_size=len(labels),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=[16, 16, 24],
        conv_kernel=[10, 8, 4],
        conv_stride=[5, 8, 4],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
    )
    torch.manual_seed(seed)
    model = Wav2Vec2ForCTC(config).eval()
    model.lm_head.weight.data.normal_(0, 1)
    model.save_pretrained(folder)
    return model


def write_moonshine(folder: Path, seed: int = 0) -> Any:
    """Write a tiny Moonshine, and return the torch model."""
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import (
        MoonshineConfig,
        MoonshineForConditionalGeneration,
        PreTrainedTokenizerFast,
        Wav2Vec2FeatureExtractor,
        Wav2Vec2Processor,
    )

    vocab = {x: i for i, x in enumerate(["<unk>", "<s>", "</s>", *byte_letters()])}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    Wav2Vec2Processor(Wav2Vec2FeatureExtractor(), tokenizer).save_pretrained(folder)
    config = MoonshineConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
    )
    torch.manual_seed(seed)
    model = MoonshineForConditionalGeneration(config).eval()
    for value in model.parameters():
        factors = value.ndim == 1 and float(value.detach().mean()) > 0.5
        value.data.normal_(1.0 if factors else 0.0, 0.25)
    model.save_pretrained(folder)
    return model


def _names(special: list[str]) -> list[str]:
    return [token.strip("<|>") for token in special]
