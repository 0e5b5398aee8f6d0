"""Weight tables for the layouts that `transformers` saves: names, shapes, queries, keys and values.

Each family is represented by its table and the shapes of the parameters of our model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.rules import (
    STANDARD,
    Rule,
    Shape,
    concat,
    equal,
    fused,
    interleave,
    pad_rule,
    renamed,
    split,
    stack,
    transpose,
)
from safetensors.numpy import load_file

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("parity")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

V, D, F, H, K, E, P = 96, 32, 40, 4, 8, 3, 64
LAYER = "model.layers.0"
QKV = ("q_proj", "k_proj", "v_proj")
EXPERTS = "{path}.experts"
GATE_UP = (f"{EXPERTS}.gate_proj.kernel", f"{EXPERTS}.up_proj.kernel")
SIZES = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": H,
    "max_position_embeddings": P,
}
GPT_2_LIKE = {"vocab_size": V, "hidden_size": D, "n_layer": 1, "n_head": H}


@dataclass
class Family:
    """How `transformers` creates the model, our table, and the shapes of our parameters."""

    config: str
    options: dict[str, Any]
    table: tuple[Rule, ...]
    keys: int = 2
    mlp: dict[str, Shape] = field(default_factory=lambda: swiglu(F))
    biased: tuple[str, ...] = ()  # prefixes of layers with biases
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    more: dict[str, Shape] = field(default_factory=dict)
    head: bool = True
    fused: str = ""  # the layer whose parts are compared

    def shapes(self) -> dict[str, Shape]:
        sizes = {"q_proj": (D, H * K), "o_proj": (H * K, D)}
        sizes |= dict.fromkeys(("k_proj", "v_proj"), (D, self.keys * K))
        linear = {f"self_attn.{n}": s for n, s in sizes.items()}
        linear |= {f"mlp.{n}": s for n, s in self.mlp.items()}
        shapes: dict[str, Shape] = {"model.embed_tokens.embedding": (V, D), **self.more}
        for name, shape in linear.items():
            shapes[f"{LAYER}.{name}.kernel"] = shape
            if name.startswith(self.biased):
                shapes[f"{LAYER}.{name}.bias"] = (*shape[:-2], shape[-1])
        for norm in (*(f"{LAYER}.{n}" for n in self.norms), "model.norm"):
            shapes[f"{norm}.weight"] = (D,)
            if "norm" in self.biased:
                shapes[f"{norm}.bias"] = (D,)
        if self.head:
            shapes["lm_head.kernel"] = (D, V)
        return shapes


def plain(f):
    return {"up_proj": (D, f), "down_proj": (f, D)}


def swiglu(f, under="", experts=()):
    names = {"gate_proj": (D, f), "up_proj": (D, f), "down_proj": (f, D)}
    return {f"{under}{name}": (*experts, *shape) for name, shape in names.items()}


MOE = {"gate": (D, E), **swiglu(F, "experts.", (E,))}
ALL = ("self_attn", "mlp", "norm")
NEOX_NAMES = {"mlp.up_proj": "mlp.dense_h_to_4h", "mlp.down_proj": "mlp.dense_4h_to_h"}
FALCON_NAMES = {
    "model": "transformer",
    "layers": "h",
    "embed_tokens": "word_embeddings",
    "norm": "ln_f",
    "self_attn": "self_attention",
    "o_proj": "dense",
    **NEOX_NAMES,
}


def falcon_groups(config):
    grouped = config.new_decoder_architecture or not config.multi_query
    return config.num_kv_heads if grouped else 1


def falcon(keys, norms, **options):
    table = (*fused(QKV, "query_key_value", groups=falcon_groups), *STANDARD)
    return Family(
        "FalconConfig",
        {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 1, "num_attention_heads": H}
        | {"alibi": False, "bias": True, "parallel_attn": True, **options},
        renamed(FALCON_NAMES, *table),
        keys=keys,
        mlp=plain(4 * D),
        biased=ALL,
        norms=norms,
        head=False,
        fused="query_key_value",
    )


FAMILIES = {
    "gpt_neox": Family(
        "GPTNeoXConfig",
        SIZES,
        renamed(
            {
                "model": "gpt_neox",
                "embed_tokens": "embed_in",
                "model.norm": "gpt_neox.final_layer_norm",
                "norm": "final_layer_norm",
                "self_attn": "attention",
                "o_proj": "dense",
                "lm_head": "embed_out",
                **NEOX_NAMES,
            },
            *fused(QKV, "query_key_value", groups="num_attention_heads"),
            *STANDARD,
        ),
        keys=H,
        mlp=plain(F),
        biased=ALL,
        fused="query_key_value",
    ),
    "falcon, new decoder": falcon(
        2, ("ln_attn", "ln_mlp"), new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon, one key head": falcon(1, ("input_layernorm",), multi_query=True),
    "falcon, all key heads": falcon(H, ("input_layernorm",), multi_query=False),
    "bloom": Family(
        "BloomConfig",
        GPT_2_LIKE,
        renamed(
            {"embed_norm": "word_embeddings_layernorm", **FALCON_NAMES},
            *fused(QKV, "query_key_value", groups="n_head"),
            *STANDARD,
        ),
        keys=H,
        mlp=plain(4 * D),
        biased=ALL,
        more={"model.embed_norm.weight": (D,), "model.embed_norm.bias": (D,)},
        head=False,
        fused="query_key_value",
    ),
    "phi3": Family(
        "Phi3Config",
        {**SIZES, "num_key_value_heads": 2, "pad_token_id": 0},
        (*fused(QKV, "qkv_proj"), *fused(("gate_proj", "up_proj"), "gate_up_proj"), *STANDARD),
        fused="qkv_proj",
    ),
    "gpt2": Family(
        "GPT2Config",
        {"vocab_size": V, "n_embd": D, "n_layer": 1, "n_head": H, "n_positions": P},
        renamed(
            {
                "model": "transformer",
                "layers": "h",
                "embed_tokens": "wte",
                "embed_positions": "wpe",
                "input_layernorm": "ln_1",
                "post_attention_layernorm": "ln_2",
                "norm": "ln_f",
                "self_attn": "attn",
                "o_proj": "c_proj",
                "up_proj": "c_fc",
                "down_proj": "c_proj",
            },
            *fused(QKV, "c_attn", layout=equal),
            Rule("lm_head.kernel", "lm_head.weight", transpose),
            Rule("{path}.kernel", "{path}.weight", equal),
            *STANDARD,
        ),
        keys=H,
        mlp=plain(4 * D),
        biased=ALL,
        more={"model.embed_positions.embedding": (P, D)},
        head=False,
        fused="c_attn",
    ),
    "opt": Family(
        "OPTConfig",
        {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "ffn_dim": F}
        | {"word_embed_proj_dim": D},
        renamed(
            {
                "model": "model.decoder",
                "norm": "final_layer_norm",
                "post_attention_layernorm": "final_layer_norm",
                "input_layernorm": "self_attn_layer_norm",
                "o_proj": "out_proj",
                "mlp.up_proj": "fc1",
                "mlp.down_proj": "fc2",
            },
            Rule(
                "{path}.embed_positions.embedding",
                "{path}.embed_positions.weight",
                pad_rule(0, pad_before=2),
            ),
            *STANDARD,
        ),
        keys=H,
        mlp=plain(F),
        biased=ALL,
        more={"model.embed_positions.embedding": (P, D)},
        head=False,
    ),
    "mixtral": Family(
        "MixtralConfig",
        {**SIZES, "num_key_value_heads": 2, "num_local_experts": E},
        renamed(
            {"mlp": "block_sparse_moe", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"},
            Rule(f"{EXPERTS}.{{name}}.kernel", f"{EXPERTS}.{{expert}}.{{name}}.weight", stack()),
            *STANDARD,
        ),
        mlp=MOE,
    ),
    "qwen2_moe": Family(
        "Qwen2MoeConfig",
        {**SIZES, "num_key_value_heads": 2, "num_experts": E, "moe_intermediate_size": F}
        | {"shared_expert_intermediate_size": 16},
        (
            Rule(f"{EXPERTS}.{{name}}.kernel", f"{EXPERTS}.{{expert}}.{{name}}.weight", stack()),
            *STANDARD,
        ),
        mlp={**MOE, "shared_expert_gate": (D, 1), **swiglu(16, "shared_expert.")},
        biased=tuple(f"self_attn.{n}" for n in QKV),
    ),
    "gpt_oss": Family(
        "GptOssConfig",
        {**SIZES, "num_key_value_heads": 2, "num_local_experts": E, "head_dim": K},
        renamed(
            {"mlp.gate": "mlp.router"},
            Rule(GATE_UP, f"{EXPERTS}.gate_up_proj", interleave(-1, equal)),
            Rule(
                tuple(name.replace("kernel", "bias") for name in GATE_UP),
                f"{EXPERTS}.gate_up_proj_bias",
                interleave(-1, equal),
            ),
            Rule(f"{EXPERTS}.down_proj.kernel", f"{EXPERTS}.down_proj", equal),
            Rule(f"{EXPERTS}.down_proj.bias", f"{EXPERTS}.down_proj_bias", equal),
            *STANDARD,
        ),
        mlp=MOE,
        biased=("self_attn", "mlp"),
        more={f"{LAYER}.self_attn.sinks": (H,)},
    ),
    "dbrx": Family(
        "DbrxConfig",
        {"d_model": D, "n_heads": H, "n_layers": 1, "max_seq_len": P, "vocab_size": V}
        | {
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": F, "moe_num_experts": E, "moe_top_k": 2},
        },
        renamed(
            {
                "model": "transformer",
                "layers": "blocks",
                "embed_tokens": "wte",
                "norm": "norm_f",
                "self_attn": "norm_attn_norm.attn",
                "o_proj": "out_proj",
                "input_layernorm": "norm_attn_norm.norm_1",
                "post_attention_layernorm": "norm_attn_norm.norm_2",
                "mlp.gate": "ffn.router.layer",
                "mlp.experts": "ffn.experts.mlp",
            },
            *fused(QKV, "Wqkv"),
            Rule(f"{EXPERTS}.gate_proj.kernel", f"{EXPERTS}.w1", concat(0)),
            Rule(f"{EXPERTS}.up_proj.kernel", f"{EXPERTS}.v1", concat(0)),
            Rule(f"{EXPERTS}.down_proj.kernel", f"{EXPERTS}.w2", concat(0, equal)),
            *STANDARD,
        ),
        mlp=MOE,
        fused="Wqkv",
    ),
    "granitemoe": Family(
        "GraniteMoeConfig",
        {**SIZES, "num_key_value_heads": 2, "num_local_experts": E},
        renamed(
            {"mlp.gate": "block_sparse_moe.router.layer", "mlp": "block_sparse_moe"},
            Rule(
                tuple(name.replace("path", "layer") for name in GATE_UP),
                "{layer}.input_linear.weight",
                split(-2),
            ),
            Rule(f"{EXPERTS}.down_proj.kernel", "{path}.output_linear.weight", transpose),
            *STANDARD,
        ),
        mlp=MOE,
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def saved(request, tmp_path_factory):
    """Return the family, its torch model, and the tensors that torch saved."""
    family = FAMILIES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    directory = tmp_path_factory.mktemp("saved")
    model.save_pretrained(directory)
    return family, model, load_file(directory / "model.safetensors")


def test_names_and_shapes_match_saved_file(saved):
    family, model, stored = saved
    weights = WeightMap(family.table, family.shapes(), model.config)
    assert weights.hf_shapes == {name: value.shape for name, value in stored.items()}


@pytest.mark.parametrize("saved", [n for n, f in FAMILIES.items() if f.fused], indirect=True)
def test_queries_keys_and_values_match_transformers(saved):
    family, model, stored = saved
    theirs = parts_of_torch(model, family.fused)
    weights = WeightMap(family.table, family.shapes(), model.config)
    x = theirs.pop("input")
    for name in QKV:
        ours = {}
        for kind in ("kernel", "bias"):
            full = f"{LAYER}.self_attn.{name}.{kind}"
            if full in weights.shapes:
                out = np.empty(weights.shapes[full], np.float32)
                window = [range(n) for n in out.shape]
                weights.load(full, window, lambda n, index: stored[n][index], out)
                ours[kind] = out
        got = x @ ours["kernel"] + ours.get("bias", 0)
        if name != "q_proj":  # some families repeat the keys and values of a group
            repeats = theirs[name].size // got.size
            got = np.repeat(got.reshape(-1, K), repeats, axis=0).reshape(-1)
        np.testing.assert_allclose(got, theirs[name], atol=1e-5, rtol=0)


def parts_of_torch(model, fused_name):
    """Return input, queries, keys and values of a token at position 0, which is not rotated."""
    seen = {}

    def attention(module, query, key, value, *args, **kwargs):
        for name, part in zip(QKV, (query, key, value), strict=True):
            seen[name] = part[0, :, 0].reshape(-1)
        return query.transpose(1, 2), None

    transformers.AttentionInterface.register("captured", attention)
    (layer,) = (m for n, m in model.named_modules() if n.endswith(f".{fused_name}"))
    (parent,) = (m for m in model.modules() if layer in m.children())

    splits = getattr(parent, "_split_heads", None) or getattr(parent, "_reshape", None)

    def hook(module, args, output):
        seen["input"] = args[0].reshape(-1)
        if splits is not None:  # Falcon and BLOOM
            attention(parent, *(part.reshape(1, -1, 1, K) for part in splits(output)))

    layer.register_forward_hook(hook)
    if splits is None:
        model.set_attn_implementation("captured")
    with torch.no_grad():
        model(torch.tensor([[5]]))
    return {name: value.numpy() for name, value in seen.items()}
