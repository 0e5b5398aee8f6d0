"""GPTQ, AWQ, bitsandbytes and compressed-tensors: numbers equal those of a slow unpacking here.

The unpackings below go number by number, by the descriptions that the formats have published:
https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/casper-hansen/AutoAWQ,
https://huggingface.co/docs/bitsandbytes, https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
from ed_infra.errors import CheckpointError
from ed_infra.logging import forget_said
from ed_models.auto import AutoEasyDeLModelForCausalLM
from ed_models.checkpoints.packed_tensors import unpack_tensors
from ed_models.checkpoints.tensor_files import TensorFiles
from ed_models.checkpoints.tensor_writer import TensorSpec, write_tensors
from ed_models.conformance import TINY
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from flax import nnx

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = dict[str, np.ndarray]


class Layer(NamedTuple):
    """A weight [o, i]: its packed tensors by the last part of their names, and its numbers."""

    packed: Tensors
    numbers: np.ndarray


class Kind(NamedTuple):
    """A layout: settings of config.json, and a function that creates a weight [rows, columns]."""

    settings: dict[str, Any]
    make: Callable[[np.random.Generator, int, int], Layer]


def random_scales(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.uniform(0.001, 0.01, shape).astype(np.float16)


def fields(word: int | np.ndarray, bits: int) -> list[int]:
    """The codes in an int32, lowest bits first."""
    return [(int(word) >> bits * j) & (2**bits - 1) for j in range(32 // bits)]


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, np.int64).astype(np.int32)


def gptq(
    bits: int, size: int, *, ordered: bool = True, v2: bool = False, sym: bool = False
) -> Kind:
    def make(rng: np.random.Generator, o: int, i: int) -> Layer:
        group = np.arange(i) // (i if size == -1 else size)
        count = group[-1] + 1
        if not ordered:
            group = rng.permutation(group)
        packed = {
            "qweight": words(rng, i * bits // 32, o),
            "qzeros": words(rng, count, math.ceil(o * bits / 32)),
            "scales": random_scales(rng, count, o),
            "g_idx": group.astype(np.int32),
        }
        if sym:
            half = 2 ** (bits - 1) - (0 if v2 else 1)
            word = sum(half << bits * j for j in range(32 // bits))
            packed["qzeros"] = np.full_like(packed["qzeros"], np.uint32(word).view(np.int32))
        numbers = np.zeros((o, i), np.float32)
        per = 32 // bits
        for row, column in np.ndindex(o, i):
            g = group[column]
            code = fields(packed["qweight"][column // per, row], bits)[column % per]
            zero = fields(packed["qzeros"][g, row // per], bits)[row % per]
            zero = zero if v2 else (zero + 1) % 2**bits
            numbers[row, column] = np.float32(code - zero) * np.float32(packed["scales"][g, row])
        if ordered and size != -1 and bits == 4:
            del packed["g_idx"]  # older files lack it
        return Layer(packed, numbers)

    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": sym}
    version = (
        "gptq_v2" if v2 and not sym else "gptq"
    )  # symmetric formats may contain unused zero points
    return Kind(settings | {"desc_act": not ordered, "checkpoint_format": version}, make)


def awq(size: int) -> Kind:
    def make(rng: np.random.Generator, o: int, i: int) -> Layer:
        count = 1 if size == -1 else i // size
        packed = {
            "qweight": words(rng, i, o // 8),
            "qzeros": words(rng, count, o // 8),
            "scales": random_scales(rng, count, o),
        }
        numbers = np.zeros((o, i), np.float32)
        for column, word, place in np.ndindex(i, o // 8, 8):
            g, row = column // (i // count), word * 8 + AWQ_ORDER[place]
            code = fields(packed["qweight"][column, word], 4)[place]
            zero = fields(packed["qzeros"][g, word], 4)[place]
            numbers[row, column] = np.float32(code - zero) * np.float32(packed["scales"][g, row])
        return Layer(packed, numbers)

    settings = {"quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True}
    return Kind(settings | {"version": "gemm"}, make)


def bnb4(kind: str, *, nested: bool, size: int = 64) -> Kind:
    def make(rng: np.random.Generator, o: int, i: int) -> Layer:
        blocks = math.ceil(o * i / size)
        table = np.sort(rng.uniform(-1, 1, 16)).astype(np.float32)
        codes = rng.integers(0, 256, (math.ceil(o * i / 2), 1), np.uint8)
        absmax = rng.uniform(0.01, 0.1, blocks).astype(np.float32)
        state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": [o, i]}
        parts = {"absmax": absmax, "quant_map": table}
        if nested:
            inner = 4
            maps = np.sort(rng.uniform(-1, 1, 256)).astype(np.float32)
            outer = rng.uniform(0.01, 0.1, math.ceil(blocks / inner)).astype(np.float32)
            stored = rng.integers(0, 256, blocks, np.uint8)
            offset = 0.0625
            absmax = np.array(
                [maps[c] * outer[b // inner] + np.float32(offset) for b, c in enumerate(stored)]
            )
            state |= {"nested_blocksize": inner, "nested_offset": offset, "nested_dtype": "float32"}
            parts |= {"absmax": stored, "nested_absmax": outer, "nested_quant_map": maps}
        text = np.frombuffer(json.dumps(state).encode(), np.uint8)
        packed = {"weight": codes, f"weight.quant_state.bitsandbytes__{kind}": text}
        packed |= {f"weight.{name}": value for name, value in parts.items()}
        numbers = np.zeros(o * i, np.float32)
        for n in range(o * i):
            code = int(codes[n // 2, 0]) >> (0 if n % 2 else 4) & 15
            numbers[n] = table[code] * absmax[n // size]
        return Layer(packed, numbers.reshape(o, i))

    return Kind({"quant_method": "bitsandbytes", "load_in_4bit": True}, make)


def bnb8() -> Kind:
    def make(rng: np.random.Generator, o: int, i: int) -> Layer:
        codes = rng.integers(-127, 128, (o, i), np.int8)
        scb = rng.uniform(0.5, 2, o).astype(np.float32)
        numbers = codes * scb[:, None] * np.float32(7.874015718698502e-3)
        form = np.array(0, np.uint8)
        return Layer({"weight": codes, "SCB": scb, "weight_format": form}, numbers)

    return Kind({"quant_method": "bitsandbytes", "load_in_8bit": True}, make)


def compressed(
    codes: str, strategy: str, *, zeros: bool = False, ordered: bool = True, size: int = 16
) -> Kind:
    """`codes` is int8, float8, int4 or its like; packed ones are those of `pack-quantized`."""
    bits = {"packed4": 4, "packed8": 8}.get(codes, 8)
    block = [16, 8]

    def make(rng: np.random.Generator, o: int, i: int) -> Layer:
        group = np.arange(i) // size if strategy == "group" else np.zeros(i, int)
        group = group if ordered else rng.permutation(group)
        shape = {
            "tensor": (1,),
            "channel": (o, 1),
            "group": (o, i // size),
            "block": (math.ceil(o / block[0]), math.ceil(i / block[1])),
        }[strategy]
        scales = random_scales(rng, *shape)
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        points = rng.integers(low, high, shape, np.int8) if zeros else np.zeros(shape, np.int8)
        values: np.ndarray = rng.integers(low, high, (o, i), np.int8)
        if codes == "float8":
            values = rng.standard_normal((o, i)).astype(ml_dtypes.float8_e4m3fn)
        numbers = np.zeros((o, i), np.float32)
        for row, column in np.ndindex(o, i):
            at: tuple[int, ...] = (row, int(group[column]))
            if strategy == "tensor":
                at = (0,)
            elif strategy == "block":
                at = (row // block[0], column // block[1])
            code = np.float32(values[row, column]) - np.float32(points[at])
            numbers[row, column] = code * np.float32(scales[at])
        packed: Tensors = {"weight_scale": scales}
        if codes.startswith("packed"):
            packed["weight_packed"] = pack(values, bits)
            packed["weight_shape"] = np.array([o, i], np.int64)
            points = pack(points.T, bits).T
        else:
            packed["weight"] = values
        if zeros:
            packed["weight_zero_point"] = np.ascontiguousarray(points)
        if not ordered:
            packed["weight_g_idx"] = group.astype(np.int32)
        return Layer(packed, numbers)

    form = {"int8": "int-quantized", "float8": "float-quantized"}.get(codes, "pack-quantized")
    weights = {"num_bits": bits, "strategy": strategy, "block_structure": block}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    return Kind(settings | {"ignore": ["lm_head"]}, make)


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Signed codes along the second dimension, stored as unsigned ones from the lowest bits up."""
    rows, columns = values.shape
    per = 32 // bits
    out = np.zeros((rows, math.ceil(columns / per)), np.uint32)
    for row, column in np.ndindex(rows, columns):
        code = int(values[row, column]) + 2 ** (bits - 1)
        out[row, column // per] |= np.uint32(code << bits * (column % per))
    return out.view(np.int32)


KINDS: dict[str, Kind] = {
    "gptq, 4 bits": gptq(4, 16),
    "gptq, 8 bits in one group": gptq(8, -1),
    "gptq, 2 bits": gptq(2, 16),
    "gptq, ordered by activations": gptq(4, 16, ordered=False),
    "gptq, second version": gptq(4, 16, v2=True),
    "gptq, symmetric": gptq(4, 16, sym=True),
    "gptq, symmetric, called the first version": gptq(4, 16, sym=True, v2=True),
    "awq": awq(16),
    "awq, one group": awq(-1),
    "bitsandbytes, nf4": bnb4("nf4", nested=False),
    "bitsandbytes, nf4 twice": bnb4("nf4", nested=True),
    "bitsandbytes, fp4": bnb4("fp4", nested=True, size=128),
    "bitsandbytes, int8": bnb8(),
    "compressed-tensors, int8 of a tensor": compressed("int8", "tensor"),
    "compressed-tensors, int8 of rows": compressed("int8", "channel"),
    "compressed-tensors, int8 of groups": compressed("int8", "group", zeros=True),
    "compressed-tensors, float8 of a tensor": compressed("float8", "tensor"),
    "compressed-tensors, float8 of rows": compressed("float8", "channel"),
    "compressed-tensors, float8 of blocks": compressed("float8", "block"),
    "compressed-tensors, packed 4 bits": compressed("packed4", "group"),
    "compressed-tensors, packed 4 bits of rows": compressed("packed4", "channel", zeros=True),
    "compressed-tensors, packed with zeros": compressed("packed4", "group", zeros=True),
    "compressed-tensors, packed in order": compressed("packed4", "group", ordered=False),
    "compressed-tensors, packed 8 bits": compressed("packed8", "group", zeros=True),
    "compressed-tensors, int8 in order": compressed("int8", "group", zeros=True, ordered=False),
}


def opened(folder: Path, tensors: Tensors, settings: dict[str, Any]) -> TensorFiles:
    folder.mkdir(parents=True)
    specs = {name: TensorSpec(value.shape, value.dtype) for name, value in tensors.items()}
    write_tensors(folder, specs, tensors.__getitem__)
    config = SimpleNamespace(quantization_config=settings, replace=lambda **changes: None)
    return unpack_tensors(TensorFiles.open(folder), config)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_of_the_description(kind: str, tmp_path: Path) -> None:
    settings, make = KINDS[kind]
    o, i = (40, 96) if "bitsandbytes" not in kind else (21, 48)  # blocks that end within a row
    packed, numbers = make(np.random.default_rng(0), o, i)
    norm = np.ones(8, np.float32)
    tensors = {f"x.{name}": value for name, value in packed.items()} | {"norm.weight": norm}
    files = opened(tmp_path / "x", tensors, settings)
    assert set(files) == {"x.weight", "norm.weight"}
    assert files["x.weight"].shape == (o, i)
    np.testing.assert_array_equal(files.read("x.weight"), numbers)
    assert files.read("x.weight").dtype == np.float32
    np.testing.assert_array_equal(files.read("x.weight", (3,)), numbers[3])
    for index in np.random.default_rng(0).integers(0, 30, (20, 2, 2)):
        at = tuple(slice(int(a), int(a + b), 1 + int(b) % 3) for a, b in index)
        np.testing.assert_array_equal(files.read("x.weight", at), numbers[at])


MODELS = (
    "gptq, ordered by activations",
    "awq",
    "bitsandbytes, nf4 twice",
    "bitsandbytes, int8",
    "compressed-tensors, float8 of rows",
    "compressed-tensors, packed with zeros",
)


SMALL = {**TINY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "plain"
    config = LlamaConfig(**SMALL, sharding_axis_dims=(1, 1, 1, 1, 1))
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    return folder


def write_pair(source: Path, target: Path, kind: str) -> tuple[Path, Path]:
    """A packed checkpoint, and the same numbers in float32."""
    settings, make = KINDS[kind]
    files, rng = TensorFiles.open(source), np.random.default_rng(1)
    packed, plain = {}, {}
    for name in files:
        value = np.array(files.read(name))
        packed[name] = plain[name] = value
        if name.endswith("_proj.weight"):
            parts, plain[name] = make(rng, *value.shape)
            del packed[name]
            layer = name.removesuffix("weight")
            packed |= {f"{layer}{part}": array for part, array in parts.items()}
    config = json.loads((source / "config.json").read_text())
    for folder, tensors, changes in (
        (target / "packed", packed, {"quantization_config": settings}),
        (target / "plain", plain, {}),
    ):
        folder.mkdir(parents=True)
        specs = {name: TensorSpec(v.shape, v.dtype) for name, v in tensors.items()}
        write_tensors(folder, specs, tensors.__getitem__)
        (folder / "config.json").write_text(json.dumps(config | changes))
    return target / "packed", target / "plain"


def load(folder: Path, dims: tuple[int, ...] = (1, 1, 1, 1, 1), **options: Any) -> Any:
    return AutoEasyDeLModelForCausalLM.from_pretrained(folder, sharding_axis_dims=dims, **options)


def assert_same(ours: nnx.Module, wanted_model: nnx.Module) -> None:
    wanted = dict(nnx.to_flat_state(nnx.state(wanted_model)))
    for path, variable in nnx.to_flat_state(nnx.state(ours)):
        theirs = jax.tree.leaves(wanted.pop(path))
        for value, expected in zip(jax.tree.leaves(variable), theirs, strict=True):
            np.testing.assert_array_equal(value, expected, err_msg=str(path))
    assert not wanted


@pytest.mark.nightly
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_loads_as_its_numbers_in_float32_would(
    kind: str, saved: Path, tmp_path: Path
) -> None:
    packed, plain = write_pair(saved, tmp_path, kind)
    model = load(packed, (1, 2, 2, 2, 1))
    assert_same(model, load(plain))
    assert model.config.quantization_config is None


@pytest.mark.nightly
def test_packed_experts_load_like_plain_experts(tmp_path: Path) -> None:
    fields = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    Qwen3MoeForCausalLM.create(config, seed=0).save_pretrained(tmp_path / "made")
    packed, plain = write_pair(tmp_path / "made", tmp_path, "compressed-tensors, packed 4 bits")
    name = "model.layers.1.mlp.experts.3.down_proj.weight_packed"
    assert name in TensorFiles.open(packed)
    assert_same(load(packed, (1, 1, 2, 2, 1)), load(plain))


@pytest.mark.nightly
def test_packed_checkpoint_can_be_requantized_on_load(saved: Path, tmp_path: Path) -> None:
    packed, plain = write_pair(saved, tmp_path, "awq")
    spec = {"dtype": "int8"}
    model = load(packed, quantization_config=spec, apply_quantization=True)
    assert_same(model, load(plain).quantize(spec))


def test_activation_scales_are_skipped_with_warning(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings, make = KINDS["compressed-tensors, float8 of rows"]
    packed, _ = make(np.random.default_rng(0), 16, 16)
    packed |= {"input_scale": np.ones(1, np.float32), "k_scale": np.ones(1, np.float32)}
    forget_said()
    with caplog.at_level(logging.WARNING):
        files = opened(tmp_path / "x", {f"x.{n}": v for n, v in packed.items()}, settings)
    assert set(files) == {"x.weight"}
    (said,) = [r.message for r in caplog.records if "activations" in r.message]
    assert "2 scales of activations (x.input_scale" in said


def test_biases_that_are_zero_are_not_missed(saved: Path, tmp_path: Path) -> None:
    packed, plain = write_pair(saved, tmp_path / "a", "gptq, 4 bits")
    files = TensorFiles.open(packed)
    tensors = {name: np.array(files.read(name)) for name in files}
    name = "model.layers.1.mlp.up_proj.bias"

    def rewritten(folder: Path, bias: float) -> Path:
        values = {**tensors, name: np.full(48, bias, np.float16)}
        folder.mkdir()
        specs = {n: TensorSpec(v.shape, v.dtype) for n, v in values.items()}
        write_tensors(folder, specs, values.__getitem__)
        (folder / "config.json").write_text((packed / "config.json").read_text())
        return folder

    assert_same(load(rewritten(tmp_path / "zero", 0.0)), load(plain))
    with pytest.raises(CheckpointError, match=name):
        load(rewritten(tmp_path / "one", 1.0))


#: (kind, change of the tensors or the settings, message)
MISTAKES: dict[str, tuple[str, Callable[[Tensors, dict[str, Any]], object], str]] = {
    "gptq: no scales": (
        "gptq, 4 bits",
        lambda t, s: t.pop("x.scales"),
        r"GPTQ: x\.scales is not in the checkpoint, and should be .*\[any, 40\]",
    ),
    "gptq: 3 bits": ("gptq, 4 bits", lambda t, s: s.update(bits=3), "x.qweight.*bits=3.*2, 4, 8"),
    "gptq: another kernel": (
        "gptq, 4 bits",
        lambda t, s: s.update(checkpoint_format="marlin"),
        "GPTQ: checkpoint_format='marlin'",
    ),
    "gptq: another group size": (
        "gptq, 4 bits",
        lambda t, s: s.update(group_size=32),
        "x.scales has 6 groups.* in groups of 32",
    ),
    "gptq: a group size that is none": (
        "gptq, 4 bits",
        lambda t, s: s.update(group_size=0),
        "group_size is 0",
    ),
    "gptq: groups that are not there": (
        "gptq, ordered by activations",
        lambda t, s: t.update({"x.g_idx": np.full(96, 6, np.int32)}),
        "x.g_idx names groups 6 to 6, and there are 6",
    ),
    "gptq: zeros of another shape": (
        "gptq, 4 bits",
        lambda t, s: t.update({"x.qzeros": np.zeros((6, 40), np.int32)}),
        r"x.qzeros is I32 \[6, 40\], and should be I32 \[6, 5\]",
    ),
    "gptq: codes of another format": (
        "gptq, 4 bits",
        lambda t, s: t.update({"x.qweight": np.zeros((12, 40), np.float32)}),
        r"x.qweight is F32 \[12, 40\], and should be I32 \[any, any\]",
    ),
    "awq: another layout": ("awq", lambda t, s: s.update(version="gemv"), "version='gemv'"),
    "awq: 3 bits": ("awq", lambda t, s: s.update(bits=3), "AWQ: .*bits=3"),
    "awq: no zeros": ("awq", lambda t, s: t.pop("x.qzeros"), "AWQ: x.qzeros is not in"),
    "awq: another group size": (
        "awq",
        lambda t, s: s.update(group_size=48),
        r"x.qzeros is I32 \[6, 5\], and should be I32 \[2, 5\]",
    ),
    "bitsandbytes: no absmax": (
        "bitsandbytes, nf4",
        lambda t, s: t.pop("x.weight.absmax"),
        r"bitsandbytes: x.weight.absmax is not in the checkpoint, and should be F32 \[60\]",
    ),
    "bitsandbytes: no codes": (
        "bitsandbytes, nf4",
        lambda t, s: t.pop("x.weight"),
        "bitsandbytes: x.weight is not in the checkpoint",
    ),
    "bitsandbytes: too few codes": (
        "bitsandbytes, nf4",
        lambda t, s: t.update({"x.weight": np.zeros((100, 1), np.uint8)}),
        "x.weight has 100 bytes",
    ),
    "bitsandbytes: no nested scales": (
        "bitsandbytes, nf4 twice",
        lambda t, s: t.pop("x.weight.nested_absmax"),
        "x.weight.nested_absmax is not in",
    ),
    "bitsandbytes: settings that are no JSON": (
        "bitsandbytes, nf4",
        lambda t, s: t.update({"x.weight.quant_state.bitsandbytes__nf4": np.zeros(9, np.uint8)}),
        "bitsandbytes__nf4 is not JSON",
    ),
    "bitsandbytes: settings without a shape": (
        "bitsandbytes, nf4",
        lambda t, s: t.update(
            {"x.weight.quant_state.bitsandbytes__nf4": np.frombuffer(b"{}", np.uint8)}
        ),
        "is not JSON text with a shape",
    ),
    "bitsandbytes: int8 for one kernel": (
        "bitsandbytes, int8",
        lambda t, s: t.update({"x.weight_format": np.array(1, np.uint8)}),
        "x.weight_format: x.weight is ordered for one kernel",
    ),
    "bitsandbytes: scales of other rows": (
        "bitsandbytes, int8",
        lambda t, s: t.update({"x.SCB": np.ones(3, np.float32)}),
        r"x.SCB is F32 \[3\], and should be .*\[40\]",
    ),
    "compressed-tensors: no scale": (
        "compressed-tensors, int8 of rows",
        lambda t, s: t.pop("x.weight_scale"),
        "compressed-tensors: x.weight_scale is not in",
    ),
    "compressed-tensors: no scale of packed codes": (
        "compressed-tensors, packed 4 bits",
        lambda t, s: t.pop("x.weight_scale"),
        "compressed-tensors: x.weight_scale is not in",
    ),
    "compressed-tensors: another grid": (
        "compressed-tensors, int8 of rows",
        lambda t, s: t.update({"x.weight_scale": np.ones((7, 1), np.float32)}),
        r"x.weight_scale is \[7, 1\], and x.weight \[40, 96\]",
    ),
    "compressed-tensors: another format": (
        "compressed-tensors, int8 of rows",
        lambda t, s: s.update(format="nvfp4-pack-quantized"),
        "format='nvfp4-pack-quantized' is not read",
    ),
    "compressed-tensors: sparse": (
        "compressed-tensors, int8 of rows",
        lambda t, s: s.update(sparsity_config={"format": "sparse-bitmask"}),
        "'sparse-bitmask'",
    ),
    "compressed-tensors: rotated": (
        "compressed-tensors, int8 of rows",
        lambda t, s: s.update(transform_config={"config_groups": {"R1": {}}}),
        "transform_config rotates activations",
    ),
    "compressed-tensors: 3 bits": (
        "compressed-tensors, packed 4 bits",
        lambda t, s: t.update({"x.weight_packed": np.zeros((40, 9), np.int32)}),
        r"x.weight_packed is \[40, 9\].* no codes of 4 or 8 bits",
    ),
    "compressed-tensors: weights that are no codes": (
        "compressed-tensors, int8 of rows",
        lambda t, s: t.update({"x.weight": np.zeros((40, 96), np.float32)}),
        r"x.weight is F32 \[40, 96\], and should be I8",
    ),
    "compressed-tensors: uneven groups": (
        "compressed-tensors, packed 4 bits",
        lambda t, s: t.update({"x.weight_scale": np.ones((40, 7), np.float32)}),
        "7 groups, which do not divide the 96 inputs",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_invalid_packed_layout_raises_checkpoint_error(mistake: str, tmp_path: Path) -> None:
    kind, change, message = MISTAKES[mistake]
    settings, make = KINDS[kind]
    packed, _ = make(np.random.default_rng(0), 40, 96)
    tensors = {f"x.{name}": value for name, value in packed.items()}
    settings = dict(settings)
    change(tensors, settings)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "x", tensors, settings).read("x.weight")


def test_a_group_of_layers_may_have_other_bits(tmp_path: Path) -> None:
    four, two = (KINDS[f"gptq, {name}"] for name in ("ordered by activations", "2 bits"))
    rng = np.random.default_rng(0)
    layers = {"x": four.make(rng, 16, 32), "y": two.make(rng, 16, 32)}
    tensors = {f"{n}.{part}": v for n, layer in layers.items() for part, v in layer.packed.items()}
    settings = four.settings | {"dynamic": {"+:y": {"bits": 2}}}
    files = opened(tmp_path / "x", tensors, settings)
    for name, layer in layers.items():
        np.testing.assert_array_equal(files.read(f"{name}.weight"), layer.numbers)


@pytest.mark.nightly
def test_every_layout_is_tried_in_every_way() -> None:
    methods = {kind.settings["quant_method"] for kind in KINDS.values()}
    assert methods == {"awq", "bitsandbytes", "compressed-tensors", "gptq"}
    assert len(set(itertools.chain(KINDS, MISTAKES))) == len(KINDS) + len(MISTAKES)
