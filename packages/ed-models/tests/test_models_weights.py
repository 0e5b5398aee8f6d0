"""The rule table: every slice of ours equals the slice of the whole, and saving undoes loading."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.checkpoints.weight_map import WeightMap, copy_array
from ed_models.weights.blocks import Piece, Relation
from ed_models.weights.rules import STANDARD, Rule, split, stack, transpose

RULES = (
    Rule(
        ("{p}.q_proj.kernel", "{p}.k_proj.kernel", "{p}.v_proj.kernel"),
        "{p}.qkv_proj.weight",
        split(0),
    ),
    Rule("{p}.experts.up_proj.kernel", "{p}.experts.{expert}.up_proj.weight", stack()),
    *STANDARD,
)
SHAPES = {
    "embed.embedding": (7, 4),
    "layer.0.q_proj.kernel": (4, 6),
    "layer.0.k_proj.kernel": (4, 2),
    "layer.0.v_proj.kernel": (4, 2),
    "layer.0.experts.up_proj.kernel": (3, 4, 5),
    "layer.0.norm.weight": (4,),
    "head.kernel": (4, 7),
}


def checkpoint(weights: WeightMap) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in weights.hf_shapes.items()}


def load(weights, stored, name, window):
    out = np.full([len(w) for w in window], np.nan, np.float32)
    weights.load(name, window, lambda n, index: stored[n][index], out)
    return out


def test_hugging_face_names_and_shapes():
    assert WeightMap(RULES, SHAPES).hf_shapes == {
        "embed.weight": (7, 4),
        "layer.0.qkv_proj.weight": (10, 4),
        "layer.0.experts.0.up_proj.weight": (5, 4),
        "layer.0.experts.1.up_proj.weight": (5, 4),
        "layer.0.experts.2.up_proj.weight": (5, 4),
        "layer.0.norm.weight": (4,),
        "head.weight": (7, 4),
    }


def test_values_are_where_the_rules_say():
    weights = WeightMap(RULES, SHAPES)
    stored = checkpoint(weights)
    whole = {n: load(weights, stored, n, [range(k) for k in s]) for n, s in SHAPES.items()}
    qkv = stored["layer.0.qkv_proj.weight"]
    np.testing.assert_array_equal(whole["layer.0.k_proj.kernel"], qkv[6:8].T)
    np.testing.assert_array_equal(whole["head.kernel"], stored["head.weight"].T)
    np.testing.assert_array_equal(whole["embed.embedding"], stored["embed.weight"])
    np.testing.assert_array_equal(
        whole["layer.0.experts.up_proj.kernel"][2], stored["layer.0.experts.2.up_proj.weight"].T
    )
    for name, value in stored.items():
        np.testing.assert_array_equal(weights.save(name, lambda n, at: whole[n][at]), value)


@pytest.mark.parametrize("name", list(SHAPES))
def test_every_slice_equals_the_slice_of_the_whole(name):
    weights = WeightMap(RULES, SHAPES)
    stored = checkpoint(weights)
    whole = load(weights, stored, name, [range(k) for k in SHAPES[name]])
    cuts = [[range(k), range(k // 2), range(k // 2, k)] for k in SHAPES[name]]
    for window in itertools.product(*cuts):
        want = whole[tuple(slice(w.start, w.stop) for w in window)]
        np.testing.assert_array_equal(load(weights, stored, name, window), want)


@pytest.mark.parametrize("to", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("of", ["float32", "bfloat16", "float64", "int8"])
@pytest.mark.parametrize("shape", [(), (5,), (1, 40), (37, 1), (40, 37), (3, 17, 33)])
def test_copies_convert_whatever_the_order_in_memory(shape, of, to):
    rng = np.random.default_rng(0)
    source = (rng.standard_normal(shape[::-1]) * 9).astype(ml_dtypes.bfloat16)
    source = source.astype(np.dtype(of)).transpose()
    want = source.astype(np.dtype(to))
    outs = [np.zeros(shape, to), np.zeros((*shape, 2), to)[..., 0], np.zeros(shape[::-1], to).T]
    for out in outs:
        copy_array(out, source)
        np.testing.assert_array_equal(out, want)


def test_sliced_load_reads_only_needed_ranges():
    weights = WeightMap(RULES, SHAPES)
    stored = checkpoint(weights)
    read = []

    def spy(name, index):
        read.append((name, stored[name][index].shape))
        return stored[name][index]

    out = np.empty((1, 4, 2), np.float32)
    weights.load("layer.0.experts.up_proj.kernel", [range(1, 2), range(4), range(3, 5)], spy, out)
    assert read == [("layer.0.experts.1.up_proj.weight", (2, 4))]


def test_custom_weight_layout_loads_and_saves():
    def interleaved(ours, hf, config):
        (gate, up), shape = ours, next(iter(ours.values()))
        whole = tuple(range(n) for n in shape)
        pieces = [
            Piece(n, hf(), whole, (whole[0], range(k, 2 * shape[1], 2)), (0, 1))
            for k, n in enumerate((gate, up))
        ]
        return Relation({hf(): (shape[0], 2 * shape[1])}, pieces)

    rules = (Rule(("{p}.gate", "{p}.up"), "{p}.gate_up", interleaved),)
    weights = WeightMap(rules, {"m.gate": (2, 3), "m.up": (2, 3)})
    stored = checkpoint(weights)
    window = [range(1, 2), range(1, 3)]
    np.testing.assert_array_equal(
        load(weights, stored, "m.up", window), stored["m.gate_up"][1:2, [3, 5]]
    )
    whole = {n: load(weights, stored, n, [range(2), range(3)]) for n in ("m.gate", "m.up")}
    saved = weights.save("m.gate_up", lambda n, at: whole[n][at])
    np.testing.assert_array_equal(saved, stored["m.gate_up"])


def test_a_parameter_without_a_rule_is_an_error():
    with pytest.raises(ConfigError, match=r"no weight rule fits the parameter 'a\.bias'"):
        WeightMap((Rule("{p}.kernel", "{p}.weight", transpose),), {"a.bias": (3,)})


def test_two_rules_for_one_tensor_are_an_error():
    with pytest.raises(ConfigError, match=r"two weight rules write 'a\.weight'"):
        WeightMap(STANDARD, {"a.kernel": (3, 3), "a.embedding": (3, 3)})
