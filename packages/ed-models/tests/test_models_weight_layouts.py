"""Layouts of Hugging Face's families: by a plain definition, on random windows, and back."""

from types import SimpleNamespace

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.rules import (
    STANDARD,
    Rule,
    concat,
    equal,
    fused,
    ignore,
    interleave,
    pad_rule,
    permute,
    renamed,
    split,
    stack,
    transpose,
)

D, H, G, K, F, E, V = 6, 4, 2, 3, 5, 3, 7  # hidden, heads, key heads, head dim, mlp, experts, vocab
CONFIG = SimpleNamespace(
    num_attention_heads=H,
    num_key_value_heads=G,
    text_config=SimpleNamespace(num_key_value_heads=G),
)
QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("{p}.gate.kernel", "{p}.up.kernel")


def attention(keys=G):
    """Shapes of q, k and v with biases, under `a`."""
    sizes = dict(zip(QKV, (H * K, keys * K, keys * K), strict=True))
    return {f"a.{n}.kernel": (D, s) for n, s in sizes.items()} | {
        f"a.{n}.bias": (s,) for n, s in sizes.items()
    }


def parts(bias, groups):
    """q, k and v out of a fused bias (or the transposed weight), by reshaping."""
    shares = [H // groups, 1, 1] if groups == G else [1, 1, 1]
    grouped = bias.reshape(groups, sum(shares), K, *bias.shape[1:])
    q, k, v = np.split(grouped, np.cumsum(shares)[:-1], axis=1)
    return [x.reshape(-1, *bias.shape[1:]) for x in (q, k, v)]


def qkv(whole, groups, turn=lambda x: x.T):
    """A definition of our six tensors by the fused two."""

    def define(hf):
        kernels = parts(hf[f"a.{whole}.weight"], groups)
        biases = parts(hf[f"a.{whole}.bias"], groups)
        ours = {f"a.{n}.kernel": turn(x) for n, x in zip(QKV, kernels, strict=True)}
        return ours | {f"a.{n}.bias": x for n, x in zip(QKV, biases, strict=True)}

    return define


def phi3(hf):
    bounds = [H * K, (H + G) * K]
    q, k, v = np.split(hf["a.qkv_proj.weight"], bounds)
    bq, bk, bv = np.split(hf["a.qkv_proj.bias"], bounds)
    ours = {"a.q_proj.kernel": q.T, "a.k_proj.kernel": k.T, "a.v_proj.kernel": v.T}
    return ours | {"a.q_proj.bias": bq, "a.k_proj.bias": bk, "a.v_proj.bias": bv}


def falcon_one_key_head(hf):
    q, k, v = np.split(hf["a.query_key_value.weight"], [H * K, (H + 1) * K])
    bq, bk, bv = np.split(hf["a.query_key_value.bias"], [H * K, (H + 1) * K])
    return dict(zip(attention(1), (q.T, k.T, v.T, bq, bk, bv), strict=True))


def gpt2(hf):
    q, k, v = np.split(hf["a.c_attn.weight"], 3, axis=1)
    bq, bk, bv = np.split(hf["a.c_attn.bias"], 3)
    ours = {"a.q_proj.kernel": q, "a.k_proj.kernel": k, "a.v_proj.kernel": v}
    return ours | {"a.q_proj.bias": bq, "a.k_proj.bias": bk, "a.v_proj.bias": bv}


def by_expert(name):
    return lambda hf: {
        "m.experts.up.kernel": np.stack([hf[name.format(e)].T for e in range(E)]),
    }


UP = {"m.experts.up.kernel": (E, D, F)}
PAIR = {"m.gate.kernel": (E, D, F), "m.up.kernel": (E, D, F)}

#: name -> (rules, shapes of ours, ours by a plain definition)
LAYOUTS = {
    "GPT-NeoX, BLOOM: q, k, v of each head": (
        fused(QKV, "query_key_value", groups="num_attention_heads"),
        attention(H),
        qkv("query_key_value", H),
    ),
    "Falcon, InternLM2: queries, key, value of each key head": (
        fused(QKV, "wqkv", groups="text_config.num_key_value_heads"),
        attention(),
        qkv("wqkv", G),
    ),
    "Falcon with one key head": (
        fused(QKV, "query_key_value", groups=lambda config: 1),
        attention(1),
        falcon_one_key_head,
    ),
    "Phi-3": (fused(QKV, "qkv_proj"), attention(), phi3),
    "GPT-2": (fused(QKV, "c_attn", layout=equal), attention(H), gpt2),
    "Phi-3 gate and up": (
        (Rule(GATE_UP, "{p}.gate_up_proj.weight", split(0)),),
        {"m.gate.kernel": (D, F), "m.up.kernel": (D, F)},
        lambda hf: {
            "m.gate.kernel": hf["m.gate_up_proj.weight"][:F].T,
            "m.up.kernel": hf["m.gate_up_proj.weight"][F:].T,
        },
    ),
    "Mixtral": (
        (Rule("{p}.experts.up.kernel", "{p}.experts.{expert}.w3.weight", stack()),),
        UP,
        by_expert("m.experts.{}.w3.weight"),
    ),
    "experts, each with gate and up in one": (
        (Rule(GATE_UP, "{p}.experts.{expert}.w13", stack(inner_layout=split(0))),),
        PAIR,
        lambda hf: {
            "m.gate.kernel": np.stack([hf[f"m.experts.{e}.w13"][:F].T for e in range(E)]),
            "m.up.kernel": np.stack([hf[f"m.experts.{e}.w13"][F:].T for e in range(E)]),
        },
    ),
    "experts [e, out, in]": (
        (Rule("{p}.up.kernel", "{p}.up_proj", transpose),),
        UP,
        lambda hf: {"m.experts.up.kernel": hf["m.experts.up_proj"].swapaxes(1, 2)},
    ),
    "experts [e, in, out]": (
        (Rule("{p}.up.kernel", "{p}.up_proj", equal),),
        UP,
        lambda hf: {"m.experts.up.kernel": hf["m.experts.up_proj"]},
    ),
    "Granite: [e, gate and up, in]": (
        (Rule(GATE_UP, "{p}.input_linear.weight", split(-2)),),
        PAIR,
        lambda hf: {
            "m.gate.kernel": hf["m.input_linear.weight"][:, :F].swapaxes(1, 2),
            "m.up.kernel": hf["m.input_linear.weight"][:, F:].swapaxes(1, 2),
        },
    ),
    "gpt-oss: alternating columns": (
        (Rule(GATE_UP, "{p}.gate_up_proj", interleave(-1, equal)),),
        PAIR,
        lambda hf: {
            "m.gate.kernel": hf["m.gate_up_proj"][..., ::2],
            "m.up.kernel": hf["m.gate_up_proj"][..., 1::2],
        },
    ),
    "alternating rows of a transposed weight": (
        (Rule(GATE_UP, "{p}.w13", interleave(-2)),),
        PAIR,
        lambda hf: {
            "m.gate.kernel": hf["m.w13"][:, ::2].swapaxes(1, 2),
            "m.up.kernel": hf["m.w13"][:, 1::2].swapaxes(1, 2),
        },
    ),
    "DBRX up": (
        (Rule("{p}.up.kernel", "{p}.mlp.v1", concat(0)),),
        UP,
        lambda hf: {"m.experts.up.kernel": hf["m.experts.mlp.v1"].reshape(E, F, D).swapaxes(1, 2)},
    ),
    "DBRX down": (
        (Rule("{p}.down.kernel", "{p}.mlp.w2", concat(0, equal)),),
        {"m.down.kernel": (E, F, D)},
        lambda hf: {"m.down.kernel": hf["m.mlp.w2"].reshape(E, F, D)},
    ),
    "one after another, gate and up in groups": (
        (Rule(GATE_UP, "{p}.w", concat(-1, split(-1, equal, groups=F))),),
        PAIR,
        lambda hf: {
            "m.gate.kernel": hf["m.w"].reshape(D, E, F, 2)[..., 0].swapaxes(0, 1),
            "m.up.kernel": hf["m.w"].reshape(D, E, F, 2)[..., 1].swapaxes(0, 1),
        },
    ),
    "Qwen3-Next: four projections in groups of unequal shares": (
        (
            Rule(
                tuple(f"{{p}}.{n}.kernel" for n in "qkvz"),
                "{p}.in_proj_qkvz.weight",
                split(-2, groups="num_key_value_heads"),
            ),
        ),
        {f"l.{n}.kernel": (D, G * s) for n, s in zip("qkvz", (2, 2, 6, 6), strict=True)},
        lambda hf: {
            f"l.{n}.kernel": hf["l.in_proj_qkvz.weight"]
            .reshape(G, 16, D)[:, start : start + size]
            .reshape(-1, D)
            .T
            for n, start, size in zip("qkvz", (0, 2, 4, 10), (2, 2, 6, 6), strict=True)
        },
    ),
    "OPT positions: rows in front": (
        (Rule("{p}.embedding", "{p}.weight", pad_rule(0, pad_before=2)),),
        {"pos.embedding": (V, D)},
        lambda hf: {"pos.embedding": hf["pos.weight"][2:]},
    ),
    "a vocabulary with rows behind, transposed": (
        (Rule("{p}.kernel", "{p}.weight", pad_rule(0, pad_after=3, inner_layout=transpose)),),
        {"head.kernel": (D, V)},
        lambda hf: {"head.kernel": hf["head.weight"][:V].T},
    ),
    "Whisper convolution": (
        (Rule("{p}.kernel", "{p}.weight", permute(2, 1, 0)),),
        {"conv.kernel": (3, D, F)},
        lambda hf: {"conv.kernel": hf["conv.weight"].transpose(2, 1, 0)},
    ),
    "patches of an image": (
        (Rule("{p}.kernel", "{p}.weight", permute(2, 3, 1, 0)),),
        {"patch.kernel": (2, 4, 3, D)},
        lambda hf: {"patch.kernel": hf["patch.weight"].transpose(2, 3, 1, 0)},
    ),
}


@pytest.fixture(params=LAYOUTS, ids=[n.partition(":")[0] for n in LAYOUTS])
def layout(request):
    rules, shapes, define = LAYOUTS[request.param]
    weights = WeightMap(rules, shapes, CONFIG)
    rng = np.random.default_rng(0)
    stored = {n: rng.standard_normal(s).astype(np.float32) for n, s in weights.hf_shapes.items()}
    return weights, stored, define(stored)


def load(weights, stored, name, window):
    out = np.full([len(w) for w in window], np.nan, np.float32)
    weights.load(name, window, lambda n, index: stored[n][index], out)
    return out


def test_values_are_those_of_the_definition(layout):
    weights, stored, ours = layout
    assert set(ours) == set(weights.shapes)
    for name, shape in weights.shapes.items():
        np.testing.assert_array_equal(
            load(weights, stored, name, [range(n) for n in shape]), ours[name], name
        )


def test_any_window_is_that_of_the_whole(layout):
    weights, stored, ours = layout
    rng = np.random.default_rng(1)
    for name, shape in weights.shapes.items():
        for _ in range(25):
            bounds = [sorted(rng.choice(n + 1, 2, replace=False)) for n in shape]
            window = [range(*map(int, b)) for b in bounds]
            want = ours[name][tuple(slice(w.start, w.stop) for w in window)]
            np.testing.assert_array_equal(load(weights, stored, name, window), want)


def test_a_window_reads_no_more_than_its_own_values(layout):
    weights, stored, _ = layout
    sizes = []

    def read(name, index):
        sizes.append(stored[name][index].size)
        return stored[name][index]

    for name, shape in weights.shapes.items():
        window = [range(n // 2, n) for n in shape]
        sizes.clear()
        weights.load(name, window, read, np.empty([len(w) for w in window], np.float32))
        assert sum(sizes) == np.prod([len(w) for w in window])


def test_saving_gives_the_tensor_back(layout):
    weights, stored, ours = layout
    for name, value in stored.items():
        # Rows that ours do not have are written as zeros.
        known = np.zeros(value.shape, bool)
        for piece in weights.by_hf[name]:
            known[np.ix_(*piece.hf_region)] = True
        got = weights.save(name, lambda n, at: ours[n][at])
        np.testing.assert_array_equal(got, np.where(known, value, 0))


def test_saving_one_expert_reads_one_expert():
    rules, shapes, _ = LAYOUTS["Mixtral"]
    weights = WeightMap(rules, shapes)
    read = []

    def expert(name, at):
        read.append(at)
        return np.zeros(shapes[name], np.float32)[at]

    weights.save("m.experts.1.w3.weight", expert)
    assert read == [(1,)]


DECODER = {
    "model.embed_tokens.embedding": (V, D),
    "model.layers.0.input_layernorm.weight": (D,),
    "model.layers.0.self_attn.o_proj.kernel": (D, D),
    "model.layers.0.mlp.up_proj.kernel": (D, F),
    "lm_head.kernel": (D, V),
}


class TestNames:
    def names(self, table):
        return list(WeightMap(renamed(table, *STANDARD), DECODER).hf_shapes)

    def test_name_parts_are_replaced_at_every_position(self):
        table = {
            "model": "transformer",
            "layers": "h",
            "embed_tokens": "wte",
            "input_layernorm": "ln_1",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.up_proj": "mlp.c_fc",
        }
        assert self.names(table) == [
            "transformer.wte.weight",
            "transformer.h.0.ln_1.weight",
            "transformer.h.0.attn.c_proj.weight",
            "transformer.h.0.mlp.c_fc.weight",
            "lm_head.weight",
        ]

    def test_a_prefix_goes_and_a_number_moves(self):
        assert self.names({"model.layers.{i}.mlp": "blocks.mlp_{i}", "model": ""}) == [
            "embed_tokens.weight",
            "layers.0.input_layernorm.weight",
            "layers.0.self_attn.o_proj.weight",
            "blocks.mlp_0.up_proj.weight",
            "lm_head.weight",
        ]

    def test_replaced_name_parts_are_not_replaced_again(self):
        names = self.names({"model": "mlp", "mlp": "model"})
        assert names[3] == "mlp.layers.0.model.up_proj.weight"

    def test_renames_apply_only_to_whole_name_parts(self):
        assert self.names({"mode": "x", "head": "y", "layer": "z"}) == self.names({})

    def test_fused_rules_are_renamed_too(self):
        rules = renamed({"a": "attention"}, *fused(QKV, "qkv"))
        assert list(WeightMap(rules, attention()).hf_shapes) == [
            "attention.qkv.weight",
            "attention.qkv.bias",
        ]

    def test_norm_weights_are_stored_without_offset(self):
        # Gemma's layers add one to the weight; the checkpoint and the parameter are the same.
        weights = WeightMap(STANDARD, {"model.norm.weight": (D,)})
        stored = np.arange(D, dtype=np.float32)
        got = load(weights, {"model.norm.weight": stored}, "model.norm.weight", [range(D)])
        np.testing.assert_array_equal(got, stored)

    def test_ignored_tensors_are_recognized_by_pattern(self):
        weights = WeightMap((ignore("mtp.{path}"), *STANDARD), DECODER)
        assert weights.ignores("mtp.layers.0.norm.weight")
        assert weights.ignores("model.layers.3.attn.masked_bias")
        assert not weights.ignores("model.mtp.norm.weight")


def test_fused_layout_works_without_biases():
    shapes = {n: s for n, s in attention().items() if "kernel" in n}
    assert WeightMap(fused(QKV, "qkv"), shapes).hf_shapes == {"a.qkv.weight": ((H + 2 * G) * K, D)}


class TestRefused:
    def test_groups_that_do_not_divide(self):
        with pytest.raises(ConfigError, match=r"in 4 groups, which do not divide .*\[12, 6, 6\]"):
            WeightMap(fused(QKV, "qkv", groups="num_attention_heads"), attention(), CONFIG)

    def test_a_field_that_the_configuration_lacks(self):
        with pytest.raises(ConfigError, match="reads 'num_heads', but the configuration has no"):
            WeightMap(fused(QKV, "qkv", groups="num_heads"), attention(), CONFIG)

    def test_split_rejects_shapes_that_differ_in_other_dimensions(self):
        rules = (Rule(("{p}.a", "{p}.b"), "{p}.c", split(0, equal)),)
        with pytest.raises(ConfigError, match=r"cannot lie in 'm.c', one after another"):
            WeightMap(rules, {"m.a": (2, 3), "m.b": (2, 4)})

    def test_stack_rejects_different_expert_counts(self):
        rules = (Rule(GATE_UP, "{p}.{expert}.w", stack(inner_layout=split(0))),)
        with pytest.raises(ConfigError, match="leading dimensions of different size"):
            WeightMap(rules, {"m.gate.kernel": (2, D, F), "m.up.kernel": (3, D, F)})

    def test_a_placeholder_that_nothing_fills(self):
        rules = (Rule("{path}.kernel", "{pth}.weight", transpose),)
        with pytest.raises(ConfigError, match=r"contains \{pth\}, which has no .* has \{path\}"):
            WeightMap(rules, {"a.kernel": (2, 2)})

    def test_a_vector_cannot_be_transposed(self):
        with pytest.raises(ConfigError, match="too few dimensions"):
            WeightMap((Rule("{p}", "{p}", transpose),), {"a.kernel": (2,)})

    def test_an_order_of_other_dimensions(self):
        with pytest.raises(ConfigError, match=r"permute\(1, 0\) does not order"):
            WeightMap((Rule("{p}", "{p}", permute(1, 0)),), {"a.kernel": (2, 3, 4)})
