"""Tiny models and batches of the methods that train encoders and encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from ed_infra import registry
from ed_trainers.arguments import METHODS

ROWS, LENGTH, VOCAB = 8, 24, 64
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.2,
}
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.2,
}
VISION = {**TOWER, "image_size": 8, "patch_size": 4}
T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "dropout_rate": 0.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}
WAV2VEC2 = {
    "vocab_size": 17,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": [16, 16, 24],
    "conv_kernel": [10, 8, 4],
    "conv_stride": [5, 8, 4],
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "initializer_range": 0.2,
    **dict.fromkeys(
        ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout"), 0.0
    ),
    **dict.fromkeys(("final_dropout", "layerdrop", "mask_time_prob"), 0.0),
}


class Tokens:
    """The attributes of a tokenizer that masks and sentinels read."""

    mask_token_id, unk_token_id, eos_token_id, all_special_ids = 2, 3, 1, [0, 1, 2, 3]

    def __len__(self) -> int:
        return VOCAB

    def get_vocab(self) -> dict[str, int]:
        return {f"<extra_id_{number}>": VOCAB - 1 - number for number in range(12)}


def packed() -> dict[str, np.ndarray]:
    """Rows of two documents and padding."""
    random = np.random.default_rng(0)
    ids = random.integers(5, 40, (ROWS, LENGTH)).astype(np.int32)
    segments = np.where(np.arange(LENGTH) < random.integers(8, 12, (ROWS, 1)), 1, 2)
    segments[:, 20:] = 0
    return {"input_ids": ids, "segment_ids": segments.astype(np.int32)}


def pairs(seed: int = 0) -> dict[str, np.ndarray]:
    """Rows of one pair of texts each."""
    batch = packed()
    ids = np.random.default_rng(seed).permuted(batch["input_ids"], axis=1)
    segments = batch["segment_ids"]
    types = {"token_type_ids": (segments == 2).astype(np.int32)}
    return {"input_ids": ids, "attention_mask": (segments > 0).astype(np.int32), **types}


def words() -> dict[str, np.ndarray]:
    """Rows with a class at some tokens."""
    batch = packed()
    here = (batch["input_ids"] % 4 > 0) & (batch["segment_ids"] > 0)
    return {**batch, "labels": np.where(here, batch["input_ids"] % 3, -100)}


def choices() -> dict[str, np.ndarray]:
    """Rows of several texts with the number of the right one."""
    named = {
        f"choice_{number + 1}_{name}": array
        for number in range(METHODS["multiple_choice"].arguments().num_choices)
        for name, array in pairs(number).items()
    }
    return {**named, "labels": np.arange(ROWS) % 3}


def images(**arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Images with other arrays of their rows."""
    pixels = np.random.default_rng(0).normal(size=(ROWS, 1, 3, 8, 8))
    return {"pixel_values": pixels.astype(np.float32), **arrays}


def captions() -> dict[str, np.ndarray]:
    """Texts of images, with their last token."""
    ids = np.random.default_rng(1).integers(3, 60, (ROWS, 12)).astype(np.int32)
    ids[:, -1] = VOCAB - 1
    return {"input_ids": ids, "segment_ids": np.ones_like(ids)}


def recordings() -> dict[str, np.ndarray]:
    """Recordings of different lengths with labels."""
    random = np.random.default_rng(0)
    samples = random.integers(2000, 4000, (ROWS, 1))
    mask = (np.arange(4000) < samples).astype(np.int32)
    values = random.normal(size=mask.shape).astype(np.float32) * mask
    labels = random.integers(4, 17, (ROWS, 5))
    labels[:, 3:][np.arange(ROWS) % 2 > 0] = -100
    return {"input_values": values, "attention_mask": mask, "labels": labels}


class Case(NamedTuple):
    """A model type with its fields, and a batch."""

    family: str
    fields: dict[str, Any]
    batch: Callable[[], dict[str, np.ndarray]]
    tokenizer: Any = None


CASES = {
    "mlm": Case("bert", BERT, packed, Tokens()),
    "span_corruption": Case("t5", T5, packed, Tokens()),
    "cross_encoder": Case(
        "bert", {**BERT, "num_labels": 1}, lambda: {**pairs(), "labels": np.arange(ROWS) % 3 / 2}
    ),
    "question_answering": Case(
        "bert",
        BERT,
        lambda: {
            **pairs(),
            "start_positions": np.arange(ROWS) + 3,
            "end_positions": np.arange(ROWS) % 3 + 10,
        },
    ),
    "multiple_choice": Case("bert", BERT, choices),
    "ctc": Case("wav2vec2", WAV2VEC2, recordings),
    "sequence_classification": Case(
        "bert", {**BERT, "num_labels": 3}, lambda: {**pairs(), "labels": np.arange(ROWS) % 3}
    ),
    "token_classification": Case("bert", {**BERT, "num_labels": 3}, words),
    "image_classification": Case(
        "vit", {**VISION, "num_labels": 3}, lambda: images(labels=np.arange(ROWS) % 3)
    ),
    "contrastive": Case(
        "clip",
        {
            "text_config": {
                **TOWER,
                "vocab_size": VOCAB,
                "max_position_embeddings": 12,
                "eos_token_id": VOCAB - 1,
            },
            "vision_config": VISION,
            "projection_dim": 12,
        },
        lambda: images(**captions()),
    ),
}


def build_encoder(
    method: str, *, scan: bool = True, seed: int = 0, dims: tuple[int, ...] = (1, 1, 1, 1, 1)
) -> Any:
    """Return the tiny model of a method."""
    case = CASES[method]
    config = registry.get_config(case.family)(
        **case.fields, scan_layers=scan, sharding_axis_dims=dims
    )
    return registry.get_module(METHODS[method].task, case.family).create(config, seed=seed)
