"""Layouts of parameters in GGUF files: rules like those of `ed_models.weights.rules`.

A rule relates a parameter of a model to a tensor of a GGUF file. The names of parameters are equal
in all families, so one table (`TENSOR_NAMES`) fits most architectures.

llama.cpp rotates adjacent pairs (2r, 2r + 1) of a head in some architectures, where Hugging Face
rotates (r, r + head_dim / 2); the rows of queries and keys are then stored in llama.cpp's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ed_infra.errors import ConfigError

from ed_models.weights.blocks import ArchitectureFields, Piece, Relation, Shapes, TheirName
from ed_models.weights.rules import Rule, TensorLayout, equal, permute, split, transpose

#: One layer of ours, and of a file.
LAYER, BLOCK = "model.layers.{i}", "blk.{i}"

#: Module of ours -> tensor of a file, without `.weight` and `.bias`; `L` is a layer, `B` a block.
TENSOR_NAMES: Mapping[str, str] = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "L.input_layernorm": "B.attn_norm",
    "L.post_attention_layernorm": "B.ffn_norm",
    "L.self_attn.q_proj": "B.attn_q",
    "L.self_attn.k_proj": "B.attn_k",
    "L.self_attn.v_proj": "B.attn_v",
    "L.self_attn.o_proj": "B.attn_output",
    "L.self_attn.q_norm": "B.attn_q_norm",
    "L.self_attn.k_norm": "B.attn_k_norm",
    "L.mlp.gate_proj": "B.ffn_gate",
    "L.mlp.up_proj": "B.ffn_up",
    "L.mlp.down_proj": "B.ffn_down",
    "L.mlp.gate": "B.ffn_gate_inp",
    "L.mlp.experts.gate_proj": "B.ffn_gate_exps",
    "L.mlp.experts.up_proj": "B.ffn_up_exps",
    "L.mlp.experts.down_proj": "B.ffn_down_exps",
    "L.mlp.shared_experts.gate_proj": "B.ffn_gate_shexp",
    "L.mlp.shared_experts.up_proj": "B.ffn_up_shexp",
    "L.mlp.shared_experts.down_proj": "B.ffn_down_shexp",
}
#: Norms after attention and feed-forward, as Gemma 2 has them.
SANDWICH: Mapping[str, str] = {
    "L.post_attention_layernorm": "B.post_attention_norm",
    "L.pre_feedforward_layernorm": "B.ffn_norm",
    "L.post_feedforward_layernorm": "B.post_ffw_norm",
}
#: Norms after attention and feed-forward only, as OLMo 2 has them.
NORMED_LAST: Mapping[str, str] = {
    "L.post_attention_layernorm": "B.post_attention_norm",
    "L.post_feedforward_layernorm": "B.post_ffw_norm",
}
_QKV = ("q_proj", "k_proj", "v_proj")


def build_module_rules(names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of modules with weights in torch's layout, and of norms and embeddings."""
    rules: list[Rule] = []
    for ours, theirs in names.items():
        name, stored = _full(ours), _full(theirs)
        rules += [
            Rule(f"{name}.kernel", f"{stored}.weight", transpose),
            Rule(f"{name}.weight", f"{stored}.weight", equal),
            Rule(f"{name}.embedding", f"{stored}.weight", equal),
            Rule(f"{name}.bias", f"{stored}.bias", equal),
        ]
    return tuple(rules)


def values(names: Mapping[str, str]) -> tuple[Rule, ...]:
    """Return the rules of parameters that are stored unchanged: full name -> full name."""
    return tuple(Rule(_full(ours), _full(theirs), equal) for ours, theirs in names.items())


def _full(name: str) -> str:
    first, dot, suffix = name.partition(".")
    return {"L": LAYER, "B": BLOCK}.get(first, first) + dot + suffix


def build_fused_rules(path: str, parts: Iterable[str], fused_name: str) -> tuple[Rule, Rule]:
    """Return the rules of linear layers whose outputs are concatenated in one tensor."""
    path, fused_name = _full(path), _full(fused_name)
    return (
        Rule(tuple(f"{path}.{p}.kernel" for p in parts), f"{fused_name}.weight", split(-2)),
        Rule(tuple(f"{path}.{p}.bias" for p in parts), f"{fused_name}.bias", split(-1, equal)),
    )


#: Queries, keys and values in one tensor.
JOINED_QKV = build_fused_rules("L.self_attn", _QKV, "B.attn_qkv")
#: Gate and input of the feed-forward in one tensor.
JOINED_GATE = build_fused_rules("L.mlp", ("gate_proj", "up_proj"), "B.ffn_up")
#: Gate and input of each expert in one tensor.
JOINED_EXPERTS = (
    Rule(
        tuple(f"{LAYER}.mlp.experts.{p}.kernel" for p in ("gate_proj", "up_proj")),
        f"{BLOCK}.ffn_gate_up_exps.weight",
        split(-2),
    ),
)


def adjacent_pairs(heads: str) -> TensorLayout:
    """Queries or keys whose rotated pairs are adjacent in the file.

    Args:
        heads: the field of the configuration with the number of heads.
    """

    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        ((name, shape),) = ours.items()
        count = getattr(config, heads, None) or config.num_attention_heads
        size = shape[-1] // count
        half = size // 2
        if size * count != shape[-1] or size % 2:
            raise ConfigError(f"{name} {shape} has no {heads}={count} heads of an even size")
        pieces = []
        for first in range(0, shape[-1], size):
            for part in (0, 1):
                mine = range(first + part * half, first + (part + 1) * half)
                stored = range(first + part, first + size, 2)
                if len(shape) == 1:
                    pieces.append(Piece(name, hf(), (mine,), (stored,), (0,)))
                else:
                    along = range(shape[0])
                    pieces.append(Piece(name, hf(), (along, mine), (stored, along), (1, 0)))
        return Relation({hf(): tuple(reversed(shape))}, pieces)

    return relate


#: Queries and keys in llama.cpp's order of rows.
PAIRS: tuple[Rule, ...] = tuple(
    Rule(f"{LAYER}.self_attn.{ours}.{mine}", f"{BLOCK}.{theirs}.{stored}", adjacent_pairs(heads))
    for ours, theirs, heads in (
        ("q_proj", "attn_q", "num_attention_heads"),
        ("k_proj", "attn_k", "num_key_value_heads"),
    )
    for mine, stored in (("kernel", "weight"), ("bias", "bias"))
)


def split_latents(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
    """Keys and values from the latents of multi-head latent attention: a tensor for each.

    Ours is [latents, heads * (keys + values)]. Theirs are `attn_k_b` [heads, latents, keys] and
    `attn_v_b` [heads, values, latents], here with the first two dimensions as one.
    """
    ((name, (latents, width)),) = ours.items()
    heads = config.num_attention_heads
    keys, outs = config.qk_nope_head_dim, config.v_head_dim
    if heads * (keys + outs) != width:
        raise ConfigError(f"{name} has {width} columns, and {heads} heads of {keys} + {outs}")
    k_b, v_b = hf(part="k_b"), hf(part="v_b")
    along, pieces = range(latents), []
    for h in range(heads):
        start = h * (keys + outs)
        rows = range(h * latents, (h + 1) * latents)
        mine = along, range(start, start + keys)
        pieces.append(Piece(name, k_b, mine, (rows, range(keys)), (0, 1)))
        rows = range(h * outs, (h + 1) * outs)
        mine = along, range(start + keys, start + keys + outs)
        pieces.append(Piece(name, v_b, mine, (rows, along), (1, 0)))
    return Relation({k_b: (heads * latents, keys), v_b: (heads * outs, latents)}, pieces)


#: Multi-head latent attention (DeepSeek-V2).
LATENT: tuple[Rule, ...] = (
    *build_module_rules(
        {
            f"L.self_attn.{ours}": f"B.{theirs}"
            for ours, theirs in {
                "q_a_proj": "attn_q_a",
                "q_a_layernorm": "attn_q_a_norm",
                "q_b_proj": "attn_q_b",
                "kv_a_proj_with_mqa": "attn_kv_a_mqa",
                "kv_a_layernorm": "attn_kv_a_norm",
            }.items()
        }
    ),
    Rule(f"{LAYER}.self_attn.kv_b_proj.kernel", f"{BLOCK}.attn_{{part}}.weight", split_latents),
)
#: Latent keys and values in one tensor, as older files have them.
JOINED_LATENT = build_module_rules({"L.self_attn.kv_b_proj": "B.attn_kv_b"})
#: A convolution over time: ours [width, 1, channels], theirs [channels, 1, width].
CONVOLUTION = permute(2, 1, 0)
