"""Torch references of families whose published code is not part of transformers.

Each reference has a `config.json` with the field names of the published files and tiny sizes, the
names and shapes of the published tensors, and the logits of one sequence.

Legend: s positions, d hidden, h heads, g key heads, k head dim, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = Mapping[str, Tensor]
V, D, K, F_DIM = 160, 32, 8, 48


@dataclass(frozen=True)
class Reference:
    """A tiny published checkpoint.

    Attributes:
        config: content of `config.json`.
        shapes: name of each tensor -> shape.
        logits: `(tensors, ids [s]) -> logits [s, v]`.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    logits: Callable[[Tensors, Tensor], Tensor]

    def tensors(self) -> dict[str, Tensor]:
        """Return random tensors; the factors of norms are near 1."""
        draw = torch.Generator().manual_seed(0)
        made = {n: 0.2 * torch.randn(shape, generator=draw) for n, shape in self.shapes.items()}
        factors = {n for n, shape in self.shapes.items() if len(shape) == 1 and "bias" not in n}
        return {n: x + 1 if n in factors else x for n, x in made.items()}


def sizes_of(model_type: str, layers: int, query_heads: int, key_heads: int) -> dict[str, Any]:
    """Return the fields of `config.json` that have Llama's names."""
    return {
        "model_type": model_type,
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F_DIM,
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply a root-mean-square norm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def frequencies(theta: float) -> Tensor:
    """Return the rotary frequencies without scaling, [k / 2]."""
    return theta ** -(torch.arange(0, K, 2) / K)


def turned(x: Tensor, frequency: Tensor) -> Tensor:
    """Apply rotary positions to heads [s, h, k]; pairs are halves."""
    angle = (torch.arange(x.shape[0])[:, None] * frequency)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float = K**-0.5, cap: float | None = None
) -> Tensor:
    """Return causal attention of heads [s, h, k] over [s, g, k], [s, h * k]."""
    k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], dim=1) for y in (k, v))
    scores = torch.einsum("shk,thk->hst", q, k) * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    later = torch.ones(q.shape[0], q.shape[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hst,thk->shk", weights, v).flatten(1)


def heads(x: Tensor) -> Tensor:
    """Split features into heads, [s, h, k]."""
    return x.unflatten(-1, (-1, K))


def experts(
    x: Tensor, t: Tensors, path: str, gate_up_down: tuple[str, str, str], act: Any, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs of all experts [e, s, d], and shares and numbers of the chosen [s, k]."""
    gate, up, down = gate_up_down
    count = t[f"{path}.gate.weight"].shape[0]

    def one(e: int) -> Tensor:
        w = {name: t[f"{path}.experts.{e}.{name}.weight"] for name in gate_up_down}
        return (act(x @ w[gate].T) * (x @ w[up].T)) @ w[down].T

    shares, chosen = (x @ t[f"{path}.gate.weight"].T).softmax(-1).topk(top, dim=-1)
    return torch.stack([one(e) for e in range(count)]), shares, chosen


def mixed(outputs: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs, [s, d]."""
    own = outputs[chosen, torch.arange(chosen.shape[0])[:, None]]
    return (own * shares[..., None]).sum(1)


def internlm2() -> Reference:
    """Biases, a fused tensor by key head, and positions beyond the trained length."""
    h, g, layers, trained, factor = 4, 2, 2, 16, 2.0
    config = {
        "architectures": ["InternLM2ForCausalLM"],
        **sizes_of("internlm2", layers, h, g),
        "hidden_act": "silu",
        "max_position_embeddings": trained,
        "bias": True,
        "rope_theta": 1000000,
        "rope_scaling": {"type": "dynamic", "factor": factor},
    }
    shapes = {"model.tok_embeddings.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(layers):
        shapes |= {
            f"model.layers.{i}.attention.wqkv.weight": ((h + 2 * g) * K, D),
            f"model.layers.{i}.attention.wqkv.bias": ((h + 2 * g) * K,),
            f"model.layers.{i}.attention.wo.weight": (D, h * K),
            f"model.layers.{i}.attention.wo.bias": (D,),
            f"model.layers.{i}.feed_forward.w1.weight": (F_DIM, D),
            f"model.layers.{i}.feed_forward.w3.weight": (F_DIM, D),
            f"model.layers.{i}.feed_forward.w2.weight": (D, F_DIM),
            f"model.layers.{i}.attention_norm.weight": (D,),
            f"model.layers.{i}.ffn_norm.weight": (D,),
        }
    shapes["output.weight"] = (V, D)

    def logits(t: Tensors, ids: Tensor) -> Tensor:
        x = t["model.tok_embeddings.weight"][ids]
        reach = factor * max(len(ids), trained) / trained - (factor - 1)
        turn = frequencies(1e6 * reach ** (K / (K - 2)))
        for i in range(layers):
            w = {n.removeprefix(f"model.layers.{i}."): y for n, y in t.items()}
            y = rms(x, w["attention_norm.weight"], 1e-5)
            qkv = F.linear(y, w["attention.wqkv.weight"], w["attention.wqkv.bias"])
            qkv = qkv.reshape(len(ids), g, h // g + 2, K)
            q, k, v = qkv[:, :, :-2].flatten(1, 2), qkv[:, :, -2], qkv[:, :, -1]
            y = attention(turned(q, turn), turned(k, turn), v)
            x = x + F.linear(y, w["attention.wo.weight"], w["attention.wo.bias"])
            y = rms(x, w["ffn_norm.weight"], 1e-5)
            inner = F.silu(y @ w["feed_forward.w1.weight"].T) * (y @ w["feed_forward.w3.weight"].T)
            x = x + inner @ w["feed_forward.w2.weight"].T
        return rms(x, t["model.norm.weight"], 1e-5) @ t["output.weight"].T

    return Reference(config, shapes, logits)


def exaone() -> Reference:
    """Llama 3's positions; a head size that differs from hidden size / heads."""
    h, g, layers, trained = 6, 2, 2, 16
    config = {
        "architectures": ["ExaoneForCausalLM"],
        "model_type": "exaone",
        "activation_function": "silu",
        "attention_dropout": 0.0,
        "embed_dropout": 0.0,
        "vocab_size": V,
        "hidden_size": D,
        "head_dim": K,
        "intermediate_size": F_DIM,
        "num_layers": layers,
        "num_attention_heads": h,
        "num_key_value_heads": g,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": trained,
            "rope_type": "llama3",
        },
        "tie_word_embeddings": False,
    }
    shapes = {"transformer.wte.weight": (V, D), "transformer.ln_f.weight": (D,)}
    for i in range(layers):
        shapes |= {
            f"transformer.h.{i}.attn.attention.q_proj.weight": (h * K, D),
            f"transformer.h.{i}.attn.attention.k_proj.weight": (g * K, D),
            f"transformer.h.{i}.attn.attention.v_proj.weight": (g * K, D),
            f"transformer.h.{i}.attn.attention.out_proj.weight": (D, h * K),
            f"transformer.h.{i}.mlp.c_fc_0.weight": (F_DIM, D),
            f"transformer.h.{i}.mlp.c_fc_1.weight": (F_DIM, D),
            f"transformer.h.{i}.mlp.c_proj.weight": (D, F_DIM),
            f"transformer.h.{i}.ln_1.weight": (D,),
            f"transformer.h.{i}.ln_2.weight": (D,),
        }
    shapes["lm_head.weight"] = (V, D)

    def logits(t: Tensors, ids: Tensor) -> Tensor:
        x, plain = t["transformer.wte.weight"][ids], frequencies(10000.0)
        turns = trained * plain / (2 * math.pi)  # within the trained length
        kept = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
        turn = plain * (kept + (1 - kept) / 8.0)
        for i in range(layers):
            w = {n.removeprefix(f"transformer.h.{i}."): y for n, y in t.items()}
            y = rms(x, w["ln_1.weight"], 1e-5)
            q, k, v = (heads(y @ w[f"attn.attention.{n}_proj.weight"].T) for n in "qkv")
            y = attention(turned(q, turn), turned(k, turn), v)
            x = x + y @ w["attn.attention.out_proj.weight"].T
            y = rms(x, w["ln_2.weight"], 1e-5)
            inner = F.silu(y @ w["mlp.c_fc_0.weight"].T) * (y @ w["mlp.c_fc_1.weight"].T)
            x = x + inner @ w["mlp.c_proj.weight"].T
        return rms(x, t["transformer.ln_f.weight"], 1e-5) @ t["lm_head.weight"].T

    return Reference(config, shapes, logits)


def arctic() -> Reference:
    """A dense layer, and a layer with experts beside a dense one."""
    h, g, layers, count, top = 4, 2, 2, 6, 2
    config = {
        "architectures": ["ArcticForCausalLM"],
        **sizes_of("arctic", layers, h, g),
        "hidden_act": "silu",
        "rope_theta": 10000,
        "sliding_window": None,
        "num_local_experts": count,
        "num_experts_per_tok": top,
        "moe_layer_frequency": 2,
        "parallel_attn_mlp_res": True,
        "use_residual": True,
        "moe_train_capacity_factor": 1,
    }
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for i in range(layers):
        path = f"model.layers.{i}"
        networks = {f"{path}.block_sparse_moe.mlp": F_DIM}
        if i == 1:
            networks = {f"{path}.block_sparse_moe.experts.{e}": F_DIM for e in range(count)}
            networks[f"{path}.residual_mlp"] = D
            shapes[f"{path}.block_sparse_moe.gate.weight"] = (count, D)
            shapes[f"{path}.residual_layernorm.weight"] = (D,)
        for name, size in networks.items():
            shapes |= {f"{name}.w1.weight": (size, D), f"{name}.w3.weight": (size, D)}
            shapes[f"{name}.w2.weight"] = (D, size)
        shapes |= {
            f"{path}.self_attn.q_proj.weight": (h * K, D),
            f"{path}.self_attn.k_proj.weight": (g * K, D),
            f"{path}.self_attn.v_proj.weight": (g * K, D),
            f"{path}.self_attn.o_proj.weight": (D, h * K),
            f"{path}.input_layernorm.weight": (D,),
            f"{path}.post_attention_layernorm.weight": (D,),
        }
    shapes["lm_head.weight"] = (V, D)

    def network(x: Tensor, w: Tensors, path: str) -> Tensor:
        inner = F.silu(x @ w[f"{path}.w1.weight"].T) * (x @ w[f"{path}.w3.weight"].T)
        return inner @ w[f"{path}.w2.weight"].T

    def logits(t: Tensors, ids: Tensor) -> Tensor:
        x, turn = t["model.embed_tokens.weight"][ids], frequencies(10000.0)
        for i in range(layers):
            w = {n.removeprefix(f"model.layers.{i}."): y for n, y in t.items()}
            entered, y = x, rms(x, w["input_layernorm.weight"], 1e-5)
            q, k, v = (heads(y @ w[f"self_attn.{n}_proj.weight"].T) for n in "qkv")
            y = attention(turned(q, turn), turned(k, turn), v)
            x = x + y @ w["self_attn.o_proj.weight"].T
            if i == 0:
                y = rms(x, w["post_attention_layernorm.weight"], 1e-5)
                x = x + network(y, w, "block_sparse_moe.mlp")
                continue
            y = rms(entered, w["post_attention_layernorm.weight"], 1e-5)
            names = ("w1", "w3", "w2")
            outputs, shares, chosen = experts(y, w, "block_sparse_moe", names, F.silu, top)
            shares = shares / shares.sum(-1, keepdim=True)
            x = x + network(rms(x, w["residual_layernorm.weight"], 1e-5), w, "residual_mlp")
            x = x + mixed(outputs, shares, chosen)
        return rms(x, t["model.norm.weight"], 1e-5) @ t["lm_head.weight"].T

    return Reference(config, shapes, logits)


def openelm() -> Reference:
    """Layers of different width; the head is the embedding."""
    query_heads, kv_heads, sizes = [4, 6, 8], [2, 2, 4], [16, 48, 64]
    config = {
        "architectures": ["OpenELMForCausalLM"],
        "model_type": "openelm",
        "activation_fn_name": "swish",
        "vocab_size": V,
        "model_dim": D,
        "head_dim": K,
        "num_transformer_layers": 3,
        "num_gqa_groups": 2,
        "num_query_heads": query_heads,
        "num_kv_heads": kv_heads,
        "qkv_multipliers": [1.0, 2.0],
        "ffn_dim_divisor": 16,
        "ffn_multipliers": [0.5, 1.2, 2.0],
        "ffn_with_glu": True,
        "max_context_length": 64,
        "normalization_layer_name": "rms_norm",
        "normalize_qk_projections": True,
        "rope_freq_constant": 1000,
        "rope_max_length": 128,
        "share_input_output_layers": True,
    }
    shapes = {"transformer.token_embeddings.weight": (V, D), "transformer.norm.weight": (D,)}
    for i, (h, g, size) in enumerate(zip(query_heads, kv_heads, sizes, strict=True)):
        shapes |= {
            f"transformer.layers.{i}.attn.qkv_proj.weight": ((h + 2 * g) * K, D),
            f"transformer.layers.{i}.attn.q_norm.weight": (K,),
            f"transformer.layers.{i}.attn.k_norm.weight": (K,),
            f"transformer.layers.{i}.attn.out_proj.weight": (D, h * K),
            f"transformer.layers.{i}.ffn.proj_1.weight": (2 * size, D),
            f"transformer.layers.{i}.ffn.proj_2.weight": (D, size),
            f"transformer.layers.{i}.attn_norm.weight": (D,),
            f"transformer.layers.{i}.ffn_norm.weight": (D,),
        }

    def logits(t: Tensors, ids: Tensor) -> Tensor:
        x, turn = t["transformer.token_embeddings.weight"][ids], frequencies(1000.0)
        for i, (h, g) in enumerate(zip(query_heads, kv_heads, strict=True)):
            w = {n.removeprefix(f"transformer.layers.{i}."): y for n, y in t.items()}
            y = heads(rms(x, w["attn_norm.weight"], 1e-6) @ w["attn.qkv_proj.weight"].T)
            q, k, v = y.split([h, g, g], dim=1)
            q = turned(rms(q, w["attn.q_norm.weight"], 1e-6), turn)
            k = turned(rms(k, w["attn.k_norm.weight"], 1e-6), turn)
            x = x + attention(q, k, v) @ w["attn.out_proj.weight"].T
            y = rms(x, w["ffn_norm.weight"], 1e-6) @ w["ffn.proj_1.weight"].T
            gate, up = y.chunk(2, dim=-1)
            x = x + (F.silu(gate) * up) @ w["ffn.proj_2.weight"].T
        x = rms(x, t["transformer.norm.weight"], 1e-6)
        return x @ t["transformer.token_embeddings.weight"].T

    return Reference(config, shapes, logits)


def grok_1() -> Reference:
    """Experts whose shares do not add up to 1, a soft cap, and all four factors."""
    h, g, layers, count, top, cap = 4, 2, 2, 4, 2, 3.0
    config = {
        "architectures": ["Grok1ModelForCausalLM"],
        **sizes_of("grok-1", layers, h, g),
        "attn_output_multiplier": 0.5,
        "embedding_multiplier_scale": 3.0,
        "output_multiplier_scale": 0.6,
        "max_attn_value": cap,
        "num_experts": count,
        "num_experts_per_tok": top,
        "tie_word_embeddings": True,
    }
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.scale": (D,)}
    for i in range(layers):
        path = f"model.layers.{i}"
        for e in range(count):
            shapes[f"{path}.moe_block.experts.{e}.linear.weight"] = (F_DIM, D)
            shapes[f"{path}.moe_block.experts.{e}.linear_v.weight"] = (F_DIM, D)
            shapes[f"{path}.moe_block.experts.{e}.linear_1.weight"] = (D, F_DIM)
        shapes |= {
            f"{path}.moe_block.gate.weight": (count, D),
            f"{path}.attn.q_proj.weight": (h * K, D),
            f"{path}.attn.k_proj.weight": (g * K, D),
            f"{path}.attn.v_proj.weight": (g * K, D),
            f"{path}.attn.o_proj.weight": (D, h * K),
        }
        for part in ("attn", "moe"):
            shapes |= {f"{path}.{at}_{part}_norm.scale": (D,) for at in ("pre", "post")}

    def act(x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def logits(t: Tensors, ids: Tensor) -> Tensor:
        x, turn = t["model.embed_tokens.weight"][ids] * 3.0, frequencies(10000.0)
        for i in range(layers):
            w = {n.removeprefix(f"model.layers.{i}."): y for n, y in t.items()}
            y = rms(x, w["pre_attn_norm.scale"], 1e-5)
            q, k, v = (heads(y @ w[f"attn.{n}_proj.weight"].T) for n in "qkv")
            y = attention(turned(q, turn), turned(k, turn), v, scale=0.5, cap=cap)
            x = x + rms(y @ w["attn.o_proj.weight"].T, w["post_attn_norm.scale"], 1e-5)
            y = rms(x, w["pre_moe_norm.scale"], 1e-5)
            names = ("linear", "linear_v", "linear_1")
            y = mixed(*experts(y, w, "moe_block", names, act, top))
            x = x + rms(y, w["post_moe_norm.scale"], 1e-5)
        return rms(x, t["model.norm.scale"], 1e-5) @ t["model.embed_tokens.weight"].T * 0.6

    return Reference(config, shapes, logits)


REFERENCES: dict[str, Callable[[], Reference]] = {
    "internlm2": internlm2,
    "exaone": exaone,
    "arctic": arctic,
    "openelm": openelm,
    "grok-1": grok_1,
}
