"""The names of parameters in checkpoints of T5, BART, and their relatives."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import numpy as np

from ed_models.body.bart import shares_embeddings
from ed_models.checkpoints.tensor_files import Computed, TensorFiles, compute_arrays
from ed_models.weights.blocks import ArchitectureFields, Relation, Shapes, TheirName
from ed_models.weights.rules import STANDARD, Rule, equal, ignore, renamed, transpose


def up_projection(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Relate `up_proj` to the second of two input projections, or to the only one."""
    name = "wi_1" if config.is_gated_act else "wi"
    return transpose(ours, lambda **more: hf(up=name, **more), config)


def t5_names() -> dict[str, str]:
    """Return the names of the parameters in checkpoints."""
    names = {"model.embed_tokens": "shared"}
    for side in ("encoder", "decoder"):
        ours, theirs = f"model.{side}.layers.{{i}}", f"{side}.block.{{i}}.layer"
        last = 1 if side == "encoder" else 2
        names |= {
            f"{ours}.self_attn.{p}_proj": f"{theirs}.0.SelfAttention.{p}"
            for p in ("q", "k", "v", "o")
        }
        names |= {
            f"{ours}.cross_attn.{p}_proj": f"{theirs}.1.EncDecAttention.{p}"
            for p in ("q", "k", "v", "o")
        }
        names |= {
            f"{ours}.input_layernorm": f"{theirs}.0.layer_norm",
            f"{ours}.cross_attention_layernorm": f"{theirs}.1.layer_norm",
            f"{ours}.post_attention_layernorm": f"{theirs}.{last}.layer_norm",
            f"{ours}.mlp.gate_proj": f"{theirs}.{last}.DenseReluDense.wi_0",
            f"{ours}.mlp.down_proj": f"{theirs}.{last}.DenseReluDense.wo",
            f"{ours}.mlp": f"{theirs}.{last}.DenseReluDense",
            f"{ours}.self_attn.relative_attention_bias": (
                f"{theirs}.0.SelfAttention.relative_attention_bias.weight"
            ),
            f"model.{side}.norm": f"{side}.final_layer_norm",
            f"model.{side}.relative_attention_bias": (
                f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            ),
        }
    return names


def with_head(files: TensorFiles, model_names: Collection[str]) -> TensorFiles:
    """Return a checkpoint in which a missing separate head is a copy of the embedding.

    `transformers` omits the head of T5 v1.1 from files if it equals the embedding.
    """
    if (
        "lm_head.weight" not in model_names
        or "lm_head.weight" in files
        or "shared.weight" not in files
    ):
        return files
    head = Computed(files["shared.weight"], partial(files.read, "shared.weight"))
    return files.add_tensors({"lm_head.weight": head})


T5_WEIGHTS = renamed(
    t5_names(),
    Rule("{path}.mlp.up_proj.kernel", "{path}.mlp.{up}.weight", up_projection),
    *STANDARD,
    # Copies of the shared embedding, and a table of positions that no attention reads.
    ignore("encoder.embed_tokens.weight"),
    ignore("decoder.embed_tokens.weight"),
    ignore("{path}.EncDecAttention.relative_attention_bias.weight"),
)


def decoder_table(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Relate the decoder's embeddings to the shared table, or to the decoder's own."""
    name = "shared" if shares_embeddings(config) else "decoder.embed_tokens"
    return equal(ours, lambda **more: hf(table=name, **more), config)


def with_bias(files: TensorFiles, model_names: Collection[str]) -> TensorFiles:
    """Return a checkpoint in which a missing bias of the logits is zero."""
    name, tables = "final_logits_bias", ("model.shared.weight", "model.decoder.embed_tokens.weight")
    vocab_sizes = [files[table].shape[0] for table in tables if table in files]
    if name not in model_names or name in files or not vocab_sizes:
        return files
    return files.add_tensors(
        compute_arrays(files, {name: np.zeros((1, vocab_sizes[0]), np.float32)})
    )


BART_WEIGHTS = (
    Rule("model.embed_tokens.embedding", "model.{table}.weight", decoder_table),
    *renamed(
        {
            "model.encoder_embed_tokens": "model.encoder.embed_tokens",
            "model.encoder.norm": "model.encoder.layer_norm",
            "model.decoder.norm": "model.decoder.layer_norm",
            "embed_norm": "layernorm_embedding",
            "o_proj": "out_proj",
            "cross_attn": "encoder_attn",
            "input_layernorm": "self_attn_layer_norm",
            "cross_attention_layernorm": "encoder_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
        },
        *STANDARD,
    ),
    # Copies of the shared table, and computed positions.
    ignore("model.encoder.embed_tokens.weight"),
    ignore("model.decoder.embed_tokens.weight"),
    ignore("model.shared.weight"),
    ignore("{path}.embed_positions.weight"),
    ignore("{path}.embed_positions.weights"),
)
