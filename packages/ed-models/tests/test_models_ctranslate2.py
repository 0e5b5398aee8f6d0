"""Whisper models of CTranslate2 (faster-whisper): values, settings, vocabulary, damaged files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_infra.enums import TaskType
from ed_infra.errors import CheckpointError
from ed_models.checkpoints import hub
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.ctranslate2_files import CTranslate2Files
from ed_models.checkpoints.ctranslate2_folder import derive_merges
from ed_models.checkpoints.pickled_files import open_tensors
from ed_models.checkpoints.tokenizers import load_processor
from ed_models.conformance import ONE
from tokenizers import Tokenizer, models, trainers

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
SIZES = {"encoder": 2, "decoder": 3}
WIDTH, FFN, MELS, POSITIONS, LENGTH = 8, 12, 4, 50, 16
WORDS = ["a", "b", "c", "ab", "abc"]
SPECIAL = ["endoftext", "startoftranscript", "en", "de", "translate", "transcribe"]
SPECIAL += ["startoflm", "startofprev", "nospeech", "notimestamps", "0.00", "0.02"]
TOKENS = [*WORDS, *(f"<|{name}|>" for name in SPECIAL)]
Arrays = dict[str, np.ndarray]


def encode_text(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def write_file(path: Path, arrays: Mapping[str, np.ndarray], aliases: Mapping[str, str]) -> None:
    """Write the layout, in the words of its documentation."""
    data = struct.pack("<I", 6) + encode_text("WhisperSpec") + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        data += encode_text(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        kind = TYPES.index(array.dtype.type)
        data += struct.pack("<BI", kind, array.nbytes) + array.tobytes()
    data += struct.pack("<I", len(aliases))
    data += b"".join(encode_text(alias) + encode_text(name) for alias, name in aliases.items())
    path.write_bytes(data)


def build_arrays(tokens: int = len(TOKENS)) -> tuple[Arrays, Arrays]:
    """Return the arrays of a tiny model in CTranslate2's layout, and Hugging Face's tensors."""
    rng = np.random.default_rng(0)
    theirs: Arrays = {}
    tensors: Arrays = {}

    def add(stack: str, module: str, targets: list[str], shape: tuple[int, ...]) -> None:
        place, _, inner = module.partition("/")
        path = inner or module
        layer = f"layers.{place.removeprefix('layer_')}." if inner else ""
        kinds = ("gamma", "beta") if path.endswith("layer_norm") else ("weight", "bias")
        if path in ("embeddings", "position_encodings"):
            kinds = ("weight" if path == "embeddings" else "encodings",)
        for number, kind in enumerate(kinds):
            dims = shape if number == 0 else shape[:1]
            parts = [rng.normal(size=dims).astype(np.float32) for _ in targets]
            for part, target in zip(parts, targets, strict=True):
                if number == 1 and target.endswith("k_proj"):
                    part[:] = 0
                    continue
                tensors[f"model.{stack}.{layer}{target}.{('weight', 'bias')[number]}"] = part
            theirs[f"{stack}/{module}/{kind}"] = np.concatenate(parts)

    square = (WIDTH, WIDTH)
    for stack, layers in SIZES.items():
        add(stack, "layer_norm", ["layer_norm"], (WIDTH,))
        positions = POSITIONS if stack == "encoder" else LENGTH
        add(stack, "position_encodings", ["embed_positions"], (positions, WIDTH))
        for layer in range(layers):
            path = f"layer_{layer}"
            attention = [f"self_attn.{part}_proj" for part in "qkv"]
            add(stack, f"{path}/self_attention/linear_0", attention, square)
            add(stack, f"{path}/self_attention/linear_1", ["self_attn.out_proj"], square)
            add(stack, f"{path}/self_attention/layer_norm", ["self_attn_layer_norm"], (WIDTH,))
            add(stack, f"{path}/ffn/linear_0", ["fc1"], (FFN, WIDTH))
            add(stack, f"{path}/ffn/linear_1", ["fc2"], (WIDTH, FFN))
            add(stack, f"{path}/ffn/layer_norm", ["final_layer_norm"], (WIDTH,))
            if stack == "encoder":
                continue
            cross = [f"encoder_attn.{part}_proj" for part in "qkv"]
            add(stack, f"{path}/attention/linear_0", cross[:1], square)
            add(stack, f"{path}/attention/linear_1", cross[1:], square)
            add(stack, f"{path}/attention/linear_2", ["encoder_attn.out_proj"], square)
            add(stack, f"{path}/attention/layer_norm", ["encoder_attn_layer_norm"], (WIDTH,))
        theirs[f"{stack}/num_heads"] = np.int16(2).reshape(())
    add("encoder", "conv1", ["conv1"], (WIDTH, MELS, 3))
    add("encoder", "conv2", ["conv2"], (WIDTH, WIDTH, 3))
    add("decoder", "embeddings", ["embed_tokens"], (tokens, WIDTH))
    theirs["decoder/activation"] = np.int8(3).reshape(())
    theirs["decoder/pre_norm"] = np.int8(1).reshape(())
    return theirs, tensors


def quantize_arrays(arrays: Arrays, kind: str) -> Arrays:
    """Return arrays as CTranslate2 stores them: matrices as codes, and their scales."""
    stored: Arrays = {}
    for name, array in arrays.items():
        if array.ndim < 2 or not name.endswith("weight"):
            half = kind == "float16" and array.ndim > 0
            stored[name] = array.astype(np.float16) if half else array
        elif kind in ("float32", "float16"):
            stored[name] = array.astype(kind)
        else:
            rows = np.abs(array.reshape(len(array), -1))
            scale = 127 / rows.max(1) if kind == "int8" else np.float32(2**10 / rows.max())
            spread = np.reshape(scale, (-1, *[1] * (array.ndim - 1)))
            stored[name] = np.rint(array * spread).astype(kind)
            stored[f"{name}_scale"] = np.asarray(scale, np.float32)
    return stored


HEAD = {"decoder/projection/weight": "decoder/embeddings/weight"}


def write_folder(folder: Path, arrays: Arrays, aliases: Mapping[str, str] = HEAD) -> Path:
    write_file(folder / "model.bin", arrays, aliases)
    settings = {"suppress_ids": [1, 2], "suppress_ids_begin": [3], "lang_ids": [7, 8]}
    (folder / "config.json").write_text(json.dumps({**settings, "alignment_heads": [[1, 0]]}))
    (folder / "vocabulary.json").write_text(json.dumps(TOKENS))
    return folder


@pytest.mark.parametrize("kind", ["float32", "float16", "int8", "int16"])
def test_each_type_of_weights_has_the_values_of_the_original(kind: str, tmp_path: Path) -> None:
    theirs, tensors = build_arrays()
    stored = quantize_arrays(theirs, kind)
    aliases = dict(HEAD)
    if kind in ("int8", "int16"):
        aliases |= {f"{alias}_scale": f"{name}_scale" for alias, name in HEAD.items()}
    files = open_tensors(hub.resolve(write_folder(tmp_path, stored, aliases)))
    assert files.keys() == tensors.keys()
    limits = {"float32": 0, "float16": 2e-3, "int8": 0.5 / 127, "int16": 0.5 / 2**10}
    bound = limits[kind] * max(float(np.abs(array).max()) for array in tensors.values())
    for name, expected in tensors.items():
        values = files.read(name)
        assert values.shape == files[name].shape == expected.shape
        assert np.abs(values.astype(np.float32) - expected).max() <= bound * 1.01, name
        np.testing.assert_array_equal(files.read(name, (slice(1, 3),)), values[1:3])


def test_settings_and_vocabulary_are_those_of_a_whisper(tmp_path: Path) -> None:
    theirs, _ = build_arrays()
    folder = hub.resolve(write_folder(tmp_path, theirs))
    config: Any = hub.read_config(folder)
    assert config.model_type == "whisper"
    assert detect_task(folder) == TaskType.SPEECH_SEQUENCE_TO_SEQUENCE
    assert (config.encoder_layers, config.decoder_layers) == (2, 3)
    assert (config.d_model, config.encoder_ffn_dim, config.num_mel_bins) == (WIDTH, FFN, MELS)
    assert config.decoder_attention_heads == 2
    assert (config.max_source_positions, config.max_target_positions) == (POSITIONS, LENGTH)
    stored = json.loads((folder / "generation_config.json").read_text())
    assert stored["lang_to_id"] == {"<|en|>": 7, "<|de|>": 8}
    assert stored["task_to_id"] == {"translate": 9, "transcribe": 10}
    assert (stored["prev_sot_token_id"], stored["no_timestamps_token_id"]) == (12, 14)
    assert (stored["suppress_tokens"], stored["begin_suppress_tokens"]) == ([1, 2], [3])
    assert stored["alignment_heads"] == [[1, 0]]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("abcab").ids == [4, 3]
    assert tokenizer.decode([6, 4, 3, 5]) == "abcab"
    assert tokenizer.token_to_id("<|de|>") == 8


@pytest.mark.nightly
def test_model_and_processor_are_loaded(tmp_path: Path) -> None:
    theirs, tensors = build_arrays()
    write_folder(tmp_path, theirs)
    model: Any = hub.from_pretrained(
        tmp_path, task=TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, sharding_axis_dims=ONE
    )
    np.testing.assert_array_equal(
        model.model.embed_tokens.embedding[...], tensors["model.decoder.embed_tokens.weight"]
    )
    assert model.config.name_or_path == str(tmp_path.resolve())
    processor: Any = load_processor(str(tmp_path), part="feature_extractor")
    assert processor.feature_extractor.n_samples == 16000
    assert processor.tokenizer("abcab", add_special_tokens=False)["input_ids"] == [4, 3]


def test_merges_follow_from_the_order_of_the_vocabulary() -> None:
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    words = ["banana bandana", "panama canal", "an analysis", "canasta", "anagram banal"] * 3
    tokenizer.train_from_iterator(words, trainer)
    stored = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    assert derive_merges(tokens) == [tuple(pair) for pair in stored["merges"]]


def set_array(name: str, value: np.ndarray) -> Callable[[Arrays], None]:
    return lambda arrays: arrays.__setitem__(name, value)


def set_codes(scales: np.ndarray) -> Callable[[Arrays], None]:
    codes = np.ones((8, 4, 3), np.int8)
    name = "encoder/conv1/weight"
    return lambda arrays: arrays.update({name: codes, f"{name}_scale": scales})


KEYS = "decoder/layer_0/attention/linear_1/bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_array("decoder/activation", np.int8(0).reshape(())), "decoder/activation=0"),
        (set_array("decoder/pre_norm", np.int8(0).reshape(())), "decoder/pre_norm=0"),
        (set_array(KEYS, np.ones(2 * WIDTH, np.float32)), "bias of keys"),
        (set_array(KEYS, np.zeros(3, np.float32)), "no 2 equal parts"),
        (set_array("decoder/layer_0/rotary/weight", np.ones(3, np.float32)), "no Whisper has"),
        (set_array("decoder/projection/weight", np.ones((3, 3), np.float32)), "differs from its"),
        (set_array("encoder/conv1/weight", np.ones((8, 4, 3), np.int8)), "weight_scale"),
        (set_array("decoder/pre_norm", np.float32("nan").reshape(())), "decoder/pre_norm=nan"),
        (set_array("decoder/alibi", np.float32("inf").reshape(())), "decoder/alibi=inf"),
        (set_array("encoder/layer_norm/gamma", np.ones(0, np.float32)), "does not fit"),
        *(
            (set_codes(np.full(8, scale, np.float32)), "no positive numbers")
            for scale in (0, -1, float("nan"), float("inf"))
        ),
    ],
)
def test_arrays_of_other_models_are_refused(
    change: Callable[[Arrays], None], message: str, tmp_path: Path
) -> None:
    theirs, _ = build_arrays()
    change(theirs)
    write_folder(tmp_path, theirs, {})
    with pytest.raises(CheckpointError, match=message):
        CTranslate2Files.open(tmp_path / "model.bin")


def test_files_cut_short_and_other_files_are_refused(tmp_path: Path) -> None:
    theirs, _ = build_arrays()
    write_folder(tmp_path, theirs)
    path = tmp_path / "model.bin"
    data = path.read_bytes()
    for size in (0, 3, 5, 20, 31, 60, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.bin"):
            hub.resolve(tmp_path)
    damaged = {
        b"\x05\0\0\0" + data[4:]: "version 6",
        data.replace(b"WhisperSpec", b"WhisperSpeck"[1:]): "architecture",
        data[:18] + b"\x02" + data[19:]: "revision 2",
        data[:22] + b"\xff\xff\xff\xff" + data[26:]: "at most 100000",
    }
    for changed, message in damaged.items():
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match=message):
            hub.resolve(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"no model\.bin"):
        hub.resolve(tmp_path)


def test_model_without_attention_heads_is_refused(tmp_path: Path) -> None:
    theirs, _ = build_arrays()
    theirs["decoder/num_heads"] = np.int16(0).reshape(())
    write_folder(tmp_path, theirs)
    with pytest.raises(CheckpointError, match="num_heads=0"):
        hub.resolve(tmp_path)


def test_merges_of_many_long_tokens_are_not_derived() -> None:
    tokens = [f"{number:0256}" for number in range(300)]
    with pytest.raises(CheckpointError, match="too long to derive their merges"):
        derive_merges(tokens)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocabulary.json", "[1, 2]", "no list of tokens"),
        ("vocabulary.json", '["a", "a"]', "equal"),
        ("vocabulary.json", "{", "no vocabulary"),
        ("vocabulary.json", '["a"]', "copy the vocabulary"),
        ("config.json", '{"suppress_ids": "x"}', "suppress_ids"),
        ("config.json", '{"suppress_ids_begin": [99]}', "suppress_ids_begin"),
        ("config.json", '{"alignment_heads": [1]}', "alignment_heads"),
    ],
)
def test_damaged_settings_are_named(name: str, content: str, message: str, tmp_path: Path) -> None:
    theirs, _ = build_arrays()
    write_folder(tmp_path, theirs)
    (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        hub.resolve(tmp_path)
