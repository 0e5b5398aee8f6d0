"""Compare methods that train models of speech with the models of transformers on torch."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from tests.parity.method_cases import harness

_ROWS, _SAMPLES = 3, 4000


@cache
def folder(kind: str) -> Path:
    """Save a tiny random model of transformers: `Wav2Vec2ForCTC`, …."""
    import torch
    import transformers

    torch.manual_seed(0)
    path = Path(tempfile.mkdtemp(prefix="speech-"))
    if kind == "Wav2Vec2ForCTC":
        config = transformers.Wav2Vec2Config(
            vocab_size=harness.VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            conv_dim=[16, 16, 24],
            conv_kernel=[10, 8, 4],
            conv_stride=[5, 8, 4],
            feat_extract_norm="layer",
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            ctc_loss_reduction="mean",
            mask_time_prob=0.0,
            pad_token_id=0,
        )
    else:
        config = transformers.WhisperConfig(
            vocab_size=harness.VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=20,
            max_source_positions=50,
            max_target_positions=32,
            init_std=0.1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 2),
            decoder_start_token_id=1,
        )
    getattr(transformers, kind)(config).save_pretrained(path)
    return path


def compare(method: str, kind: str, model_type: str, batch: harness.Arrays) -> dict[str, float]:
    """Compare a method with the loss of a model of transformers, in float64."""
    import jax.numpy as jnp
    import torch
    import transformers
    from ed_infra import registry
    from ed_trainers.arguments import METHODS

    entry = METHODS[method]
    task = next(t for t in (*entry.other_tasks, entry.task) if t in ("ctc", _SEQ2SEQ))
    model = registry.get_module(task, model_type).from_pretrained(
        folder(kind),
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    ours = trained(harness.our_outcome(harness.trainer_of(method, model), batch))
    theirs = getattr(transformers, kind).from_pretrained(folder(kind)).eval().double()
    tensors = {name: torch.tensor(array) for name, array in batch.items()}
    tensors["labels"] = tensors["labels"].long()
    for name in {"input_values", "input_features"} & {*tensors}:
        tensors[name] = tensors[name].double()
    wanted = trained(harness.their_outcome(theirs, theirs(**tensors).loss, {}))
    return harness.errors(ours, wanted)


_SEQ2SEQ = "speech-sequence-to-sequence"


def trained(outcome: harness.Outcome) -> harness.Outcome:
    """Return an outcome without the positions of Whisper's encoder, which are not trained."""
    fixed = "model.encoder.embed_positions.weight"
    gradients = {name: array for name, array in outcome.gradients.items() if name != fixed}
    return replace(outcome, gradients=gradients)


def labels(rng: np.random.Generator, width: int) -> np.ndarray:
    """Return labels of several lengths, with equal neighbours."""
    found = rng.integers(3, harness.VOCAB, (_ROWS, width))
    found[:, 1] = found[:, 0]
    for row in range(1, _ROWS):
        found[row, width - 2 * row :] = -100
    return found.astype(np.int32)


def ctc() -> dict[str, float]:
    """Compare `ctc` with `Wav2Vec2ForCTC` on recordings of several lengths."""
    rng = np.random.default_rng(0)
    mask = (np.arange(_SAMPLES) < np.array([[4000], [3500], [3000]])).astype(np.int32)
    values = rng.normal(size=(_ROWS, _SAMPLES)).astype(np.float32) * mask
    batch = {"input_values": values, "attention_mask": mask, "labels": labels(rng, 8)}
    return compare("ctc", "Wav2Vec2ForCTC", "wav2vec2", batch)


def whisper() -> dict[str, float]:
    """Compare `sft` with `WhisperForConditionalGeneration`."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(_ROWS, 20, 100)).astype(np.float32)
    batch = {"input_features": features, "labels": labels(rng, 8)}
    return compare("sft", "WhisperForConditionalGeneration", "whisper", batch)


CASES = {
    "ctc": harness.Case("`Wav2Vec2ForCTC` of transformers", ctc),
    "sft speech": harness.Case("`WhisperForConditionalGeneration` of transformers", whisper),
}
