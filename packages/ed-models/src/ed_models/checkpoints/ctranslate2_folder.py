"""A folder of CTranslate2 with a Whisper, as a directory in Hugging Face layout.

    config.json, model.bin, vocabulary.json or vocabulary.txt, tokenizer.json,
    preprocessor_config.json

faster-whisper reads such folders. `config.json` has no `model_type`: the sizes of the arrays are
those of the model. The last two files are optional. Without tokenizer.json, the merges follow from
the order of the vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ed_infra.errors import CheckpointError

from ed_models.checkpoints.ctranslate2_files import (
    FILE_NAME,
    CTranslate2Arrays,
    read_ctranslate2_arrays,
)
from ed_models.checkpoints.gguf.directory import write_settings_folder, write_settings_json

_SETTINGS, _TOKENIZER, _FEATURES = "config.json", "tokenizer.json", "preprocessor_config.json"
_VOCABULARIES = ("vocabulary.json", "vocabulary.txt")
_MAX_SETTINGS, _MAX_VOCABULARY = 2**20, 2**26  # bytes
_MAX_TOKENS, _MAX_TOKEN = 2**20, 256
#: Sum of the squared lengths of the tokens of a vocabulary: the work to derive its merges.
_MAX_SQUARES = 2**24
_START, _END, _NO_TIMES = "<|startoftranscript|>", "<|endoftext|>", "<|notimestamps|>"
#: Size of the vocabulary of the models that only transcribe English.
_ENGLISH_TOKENS = 51864
#: Frames of a second of the spectrogram, and frames of a position of the encoder.
_FRAMES, _STRIDE = 100, 2
#: The latest first time of a window, in steps of 0.02 seconds: CTranslate2's default.
_MOST_INITIAL = 50


def is_ctranslate2_folder(directory: Path) -> bool:
    """Return whether a directory has the files of a model of CTranslate2."""
    settings = directory / _SETTINGS
    if not settings.is_file() or not any((directory / name).is_file() for name in _VOCABULARIES):
        return False
    if settings.stat().st_size > _MAX_SETTINGS or any(directory.glob("*.safetensors")):
        return False
    try:
        stored = json.loads(settings.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return False
    return isinstance(stored, dict) and "model_type" not in stored


def write_ctranslate2_settings(folder: Path) -> Path:
    """Return a directory with the settings of a folder of CTranslate2 in Hugging Face layout.

    Raises:
        CheckpointError: a file is damaged or absent, or the model is no Whisper.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {FILE_NAME}, the weights of CTranslate2's layout")

    def write_files(directory: Path) -> None:
        arrays = read_ctranslate2_arrays(file)
        tokens = _read_vocabulary(folder)
        stored = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
        config = describe_whisper(arrays, tokens, file)
        write_settings_json(directory / _SETTINGS, config)
        write_settings_json(
            directory / "generation_config.json", describe_transcripts(stored, tokens, config)
        )
        if (folder / _FEATURES).is_file():
            shutil.copy(folder / _FEATURES, directory / _FEATURES)
        else:
            write_settings_json(directory / _FEATURES, _describe_features(config))
        if (folder / _TOKENIZER).is_file():
            shutil.copy(folder / _TOKENIZER, directory / _TOKENIZER)
        else:
            _build_tokenizer(tokens).save(str(directory / _TOKENIZER))
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        write_settings_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "WhisperTokenizer",
                "processor_class": "WhisperProcessor",
                "model_max_length": config["max_target_positions"],
                **dict.fromkeys(names, _END),
            },
        )

    return write_settings_folder(file, write_files)


def read_ctranslate2_config(folder: Path) -> dict[str, Any]:
    """Return config.json of the model in a folder of CTranslate2, without jax.

    Raises:
        CheckpointError: a file is damaged or absent, or the model is no Whisper.
    """
    file = folder / FILE_NAME
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {FILE_NAME}, the weights of CTranslate2's layout")
    return describe_whisper(read_ctranslate2_arrays(file), _read_vocabulary(folder), file)


def describe_whisper(
    arrays: CTranslate2Arrays, tokens: Sequence[str], file: Path
) -> dict[str, Any]:
    """Return config.json of a Whisper, from the shapes of its arrays.

    Raises:
        CheckpointError: an array that states a size is absent.
    """
    entries = {**arrays.entries}
    entries |= {alias: entries[name] for alias, name in arrays.aliases.items()}

    def get_size(name: str, axis: int) -> int:
        entry = entries.get(name)
        if entry is None or len(entry.shape) <= axis:
            raise CheckpointError(f"{file} has no array {name}, which states a size of the model")
        return entry.shape[axis]

    def get_number(name: str) -> int:
        if name not in entries or entries[name].shape or entries[name].dtype.kind != "i":
            raise CheckpointError(f"{file} has no number {name}: convert the model again")
        number = int(arrays.read(name)[0])
        if number < 1:
            raise CheckpointError(f"{file} has {name}={number}: convert the model again")
        return number

    def count_layers(stack: str) -> int:
        names = (name.split("/") for name in entries if name.startswith(f"{stack}/layer_"))
        return len({parts[1] for parts in names} - {"layer_norm"})

    ids = {token: number for number, token in enumerate(tokens)}
    rows = get_size("decoder/embeddings/weight", 0)
    if len(tokens) > rows or not {_START, _END, _NO_TIMES} <= ids.keys():
        raise CheckpointError(
            f"the vocabulary beside {file.name} has {len(tokens)} tokens for {rows} embeddings, "
            f"or lacks {_START}: copy the vocabulary of this model"
        )
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "vocab_size": rows,
        "d_model": get_size("decoder/embeddings/weight", 1),
        "num_mel_bins": get_size("encoder/conv1/weight", 1),
        "max_source_positions": get_size("encoder/position_encodings/encodings", 0),
        "max_target_positions": get_size("decoder/position_encodings/encodings", 0),
        **{f"{stack}_layers": count_layers(stack) for stack in ("encoder", "decoder")},
        **{
            f"{stack}_attention_heads": get_number(f"{stack}/num_heads")
            for stack in ("encoder", "decoder")
        },
        **{
            f"{stack}_ffn_dim": get_size(f"{stack}/layer_0/ffn/linear_0/weight", 0)
            for stack in ("encoder", "decoder")
        },
        "activation_function": "gelu",
        "decoder_start_token_id": ids[_START],
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ids[_END]),
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }


def describe_transcripts(
    stored: Mapping[str, Any], tokens: Sequence[str], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return generation_config.json of a Whisper: its special tokens, and heads for alignment.

    Args:
        stored: config.json of CTranslate2.
        tokens: the vocabulary.
        config: config.json in Hugging Face layout.
    """
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TASK_IDS

    ids = {token: number for number, token in enumerate(tokens)}
    multilingual = len(tokens) != _ENGLISH_TOKENS
    names = ("decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id")
    settings = {
        **{name: config[name] for name in names},
        "is_multilingual": multilingual,
        "no_timestamps_token_id": ids[_NO_TIMES],
        "prev_sot_token_id": ids.get("<|startofprev|>"),
        "suppress_tokens": _read_ids(stored, "suppress_ids", config["vocab_size"]),
        "begin_suppress_tokens": _read_ids(stored, "suppress_ids_begin", config["vocab_size"]),
        "alignment_heads": _read_heads(stored),
        "max_initial_timestamp_index": _MOST_INITIAL,
        "max_length": config["max_target_positions"],
    }
    if multilingual:
        languages = {f"<|{code}|>" for code in LANGUAGES} & ids.keys()
        settings["lang_to_id"] = {
            name: ids[name] for name in sorted(languages, key=ids.__getitem__)
        }
        settings["task_to_id"] = {
            task: ids[f"<|{task}|>"] for task in TASK_IDS if f"<|{task}|>" in ids
        }
    return {name: value for name, value in settings.items() if value is not None}


def _read_ids(stored: Mapping[str, Any], name: str, count: int) -> list[int]:
    """Return a list of tokens of config.json; an absent list is empty."""
    ids = stored.get(name) or []
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < count for i in ids):
        raise CheckpointError(
            f"{name} of config.json is no list of tokens from 0 to {count - 1}: copy the file of "
            "this model again"
        )
    return ids


def _read_heads(stored: Mapping[str, Any]) -> list[list[int]] | None:
    """Return the pairs of layer and head that align words with times; None without them."""
    heads = stored.get("alignment_heads")
    pairs = heads if isinstance(heads, list) else []
    is_valid = all(isinstance(pair, list) and [*map(type, pair)] == [int, int] for pair in pairs)
    if heads is not None and (pairs is not heads or not is_valid):
        raise CheckpointError(
            "alignment_heads of config.json is no list of pairs [layer, head]: copy the file of "
            "this model again"
        )
    return heads


def _describe_features(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return preprocessor_config.json: the spectrogram of each Whisper."""
    seconds = config["max_source_positions"] * _STRIDE // _FRAMES
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": seconds,
        "n_samples": seconds * 16000,
        "nb_max_frames": seconds * _FRAMES,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _read_vocabulary(folder: Path) -> list[str]:
    """Return the tokens of a vocabulary in the order of their numbers."""
    file = next(folder / name for name in _VOCABULARIES if (folder / name).is_file())
    if file.stat().st_size > _MAX_VOCABULARY:
        raise CheckpointError(f"{file} is larger than {_MAX_VOCABULARY} bytes: no vocabulary")
    try:
        text = file.read_text(encoding="utf-8")
        # A token may contain other ends of lines of Unicode.
        tokens = json.loads(text) if file.suffix == ".json" else text.removesuffix("\n").split("\n")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is no vocabulary ({error}): copy it again") from error
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise CheckpointError(f"{file} is no list of tokens: copy the file of this model again")
    if len(tokens) > _MAX_TOKENS or len(set(tokens)) != len(tokens):
        raise CheckpointError(
            f"{file} has {len(tokens)} tokens, of which some are equal, or more than {_MAX_TOKENS}"
        )
    return tokens


def derive_merges(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """Return the merges of a byte-level vocabulary whose tokens have the order of their merges.

    The last merge of a token joins the two parts that the earlier merges leave.

    Raises:
        CheckpointError: a token has more than 256 characters, or many tokens are long.
    """
    if sum(len(token) ** 2 for token in tokens) > _MAX_SQUARES:
        raise CheckpointError(
            f"the {len(tokens)} tokens of the vocabulary are too long to derive their merges: put "
            f"{_TOKENIZER} of the original model beside the vocabulary"
        )
    ranks = {token: number for number, token in enumerate(tokens)}
    merges = []
    for number, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN:
            raise CheckpointError(f"a token of the vocabulary has {len(token)} characters")
        parts = list(token)
        while len(parts) > 2:
            pair_ranks = [ranks.get(a + b, number) for a, b in pairwise(parts)]
            place = pair_ranks.index(min(pair_ranks))
            if pair_ranks[place] >= number:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def _build_tokenizer(tokens: Sequence[str]) -> Any:
    """Return a byte-level tokenizer; the tokens from `<|endoftext|>` on are special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    end = tokens.index(_END)
    text_tokens, others = tokens[:end], tokens[end:]
    vocabulary = {token: number for number, token in enumerate(text_tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, derive_merges(text_tokens)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    last = tokens.index(_NO_TIMES)
    for number, token in enumerate(others, end):
        special = number <= last
        added = AddedToken(token, special=special, normalized=False)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    return tokenizer
