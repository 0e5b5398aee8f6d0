"""Ring attention on simulated devices: values of one device, only permutes, decreasing memory.

Legend: b batch, s sequence, h heads, g kv heads, k head dim, n devices of the ring.
"""

from __future__ import annotations

import re
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_infra.sharding.axes import AXIS_NAMES
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.kernel import Projected
from ed_layers.attention.kernels.online import BlockMask, Recipe
from ed_layers.attention.kernels.ring_layout import Plan, Side
from ed_layers.attention.mechanism import choose
from ed_layers.attention.scoring import Scoring
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.multidevice import llama_case

Dims = llama_case.Dims
ONE: Dims = (1, 1, 1, 1, 1)
B, S, H, G, K = 2, 61, 4, 2, 8
#: Two rows with different packing; 61 is prime, and halves of 62 / 2 are not divisible either.
SEGMENTS = np.stack([np.repeat([1, 2, 0, 3, 0], [20, 17, 3, 16, 5]), np.repeat([1, 2], [33, 28])])
COLLECTIVES = re.compile(
    r"\b(all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\b"
)


class Call:
    """One call of attention, compiled forward and backward on a mesh."""

    def __init__(
        self,
        name: str,
        dims: Dims,
        inputs: dict[str, Any],
        mask_info: MaskInfo,
        *,
        config: dict[str, Any] | None = None,
        **features: Any,
    ):
        fields = {"blocksize_q": 8, "blocksize_k": 8, **(config or {})}
        own = EasyDeLBaseConfig(attn_mechanism=name, sharding_axis_dims=dims, **fields)
        dropout = features.pop("dropout", 0.0)
        mechanism = Mechanism.resolve(own, dropout=dropout)
        key = jax.random.key(3) if dropout else None
        self.mesh = own.mesh

        def placed(x: Any, *names: str | None) -> jax.Array:
            spec = own.partition_manager.resolve(names, "train", x.shape, own.mesh)
            return jax.device_put(x, NamedSharding(own.mesh, spec))

        self.tensors = {
            n: placed(x, "batch", "sequence", "heads", None) if x.ndim == 4 and n != "bias" else x
            for n, x in inputs.items()
        }
        self.mask_info = jax.tree.map(lambda x: placed(x, "batch", "sequence"), mask_info)

        def loss(tensors: dict[str, Any], d_out: Any, info: MaskInfo) -> Any:
            q, k, v, *_ = (tensors[n] for n in ("q", "k", "v"))
            more = {n: x for n, x in tensors.items() if n not in ("q", "k", "v")}
            options = {**features, **more, "dropout_key": key, "mechanism": mechanism}
            out = attend(q, k, v, info, **options)[0]
            return jnp.sum(out * d_out), out

        shape = (*inputs["q"].shape[:3], inputs["v"].shape[-1])
        d_out = np.random.default_rng(1).normal(size=shape).astype(inputs["q"].dtype)
        self.d_out = placed(d_out, "batch", "sequence", "heads", None)
        where = {n: getattr(x, "sharding", None) for n, x in self.tensors.items()}
        gradient = jax.jit(jax.grad(loss, has_aux=True), out_shardings=(where, self.d_out.sharding))
        self.compiled = gradient.lower(self.tensors, self.d_out, self.mask_info).compile()

    def run(self, **changed: Any) -> dict[str, np.ndarray]:
        """Return the output, and gradients by name; `changed` replaces inputs."""
        tensors = {
            name: jax.device_put(changed.get(name, x), getattr(x, "sharding", None))
            for name, x in self.tensors.items()
        }
        grads, out = self.compiled(tensors, self.d_out, self.mask_info)
        return {name: np.asarray(x) for name, x in {"out": out, **grads}.items()}

    @property
    def collectives(self) -> set[str]:
        """Return the kinds of collectives in the compiled program."""
        return set(COLLECTIVES.findall(self.compiled.as_text()))

    @property
    def bytes(self) -> tuple[int, int]:
        """Return the bytes of arguments and temporaries of one device."""
        found = self.compiled.memory_analysis()
        return found.argument_size_in_bytes, found.temp_size_in_bytes


def inputs_of(s: int = S, t: int = S, *, g: int = G, d: int = K, more: str = "") -> dict[str, Any]:
    draw = np.random.default_rng(0)
    shapes = {"q": (B, s, H, K), "k": (B, t, g, K), "v": (B, t, g, d)}
    shapes |= {n: x for n, x in (("sinks", (H,)), ("bias", (1, H, s, t))) if n in more}
    return {n: draw.normal(size=shape).astype(np.float32) for n, shape in shapes.items()}


def worst(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    """Return the largest error of each tensor, relative to its largest value."""
    assert got.keys() == want.keys()
    return {
        n: float(np.abs(got[n].astype(np.float64) - x).max() / np.abs(x).max())
        for n, x in want.items()
    }


def assert_close(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> dict[str, float]:
    errors = worst(got, want)
    for name, error in errors.items():
        assert error <= (1e-5 if name == "out" else 1e-4), f"{name}: {error:.2g}"
    return errors


packed = partial(MaskInfo.from_segments, jnp.asarray(SEGMENTS, jnp.int32))
#: Queries after a prefix of 20 keys.
CROSS = MaskInfo(
    *(packed().q_segment_ids[:, 20:], packed().kv_segment_ids),
    *(packed().q_index[:, 20:], packed().kv_index),
)
CASES: dict[str, tuple[dict[str, Any], MaskInfo, dict[str, Any]]] = {
    "packed": (inputs_of(), packed(), {}),
    "window": (inputs_of(), packed(), {"window": 7}),
    "traced_window_and_cap": (
        inputs_of(),
        packed(),
        {"window": jnp.asarray(9), "soft_cap": 2.0},
    ),
    "chunk_and_sinks": (inputs_of(more="sinks"), packed(), {"chunk": 8}),
    "bidirectional": (inputs_of(d=6), packed(causal=False), {}),
    "bidirectional_window": (inputs_of(), packed(causal=False), {"window": 7}),
    "bias_and_dropout": (inputs_of(more="bias"), packed(), {"dropout": 0.3}),
    "cross": (inputs_of(s=41), CROSS, {}),
    "one_kv_head": (inputs_of(s=64, t=64, g=1), MaskInfo.full(B, 64), {}),
}
MESHES: list[Dims] = [
    *((1, 1, 1, 1, 2), (1, 1, 1, 1, 4), (1, 1, 1, 1, 8)),
    *((1, 2, 1, 2, 2), (1, 1, 1, 4, 2), (2, 1, 1, 1, 3), (1, 1, 2, 1, 4)),
]
#: Combinations of the default run: each case once, each ring length, meshes of three kinds.
USUAL = {
    "packed": (1, 1, 1, 1, 8),
    "traced_window_and_cap": (1, 1, 1, 1, 4),
    "chunk_and_sinks": (1, 2, 1, 2, 2),
    "bidirectional": (1, 1, 1, 1, 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "dims"),
    [
        pytest.param(
            *(case, dims),
            marks=() if USUAL.get(case) == dims else pytest.mark.nightly,
            id=f"{case}-{dims}",
        )
        for case in CASES
        for dims in MESHES
    ],
)
def test_ring_attention_matches_single_device_attention(case: str, dims: Dims) -> None:
    inputs, mask_info, features = CASES[case]
    call = Call("ring", dims, inputs, mask_info, **features)
    want = Call("vanilla", ONE, inputs, mask_info, **features).run()
    assert_close(call.run(), want)


@cache
def on_four(scan: bool) -> Call:
    """Return packed rows of a divisible length, with batch and heads not sharded."""
    inputs, info = inputs_of(64, 64), MaskInfo.from_segments(np.pad(SEGMENTS, ((0, 0), (0, 3))))
    fields = {"scan_ring_attention": scan}
    return Call("ring", (1, 1, 1, 1, 4), inputs, info, config=fields)


@pytest.mark.nightly
def test_ring_attention_never_crosses_segments() -> None:
    call = on_four(True)
    own = (np.asarray(call.mask_info.q_segment_ids) == 2)[:, :, None, None]
    changed = {n: np.where(own, np.asarray(x) + 3, x) for n, x in call.tensors.items()}
    before, after = call.run(), call.run(**changed)
    for name, x in before.items():
        other = ~np.broadcast_to(own, x.shape)
        np.testing.assert_array_equal(x[other], after[name][other], err_msg=name)
        assert np.abs(x - after[name])[~other].max() > 1e-3, name


@pytest.mark.nightly
def test_ring_attention_uses_only_collective_permutes() -> None:
    assert on_four(True).collectives == on_four(False).collectives == {"collective-permute"}


@pytest.mark.proves("scan_ring_attention")
@pytest.mark.nightly
def test_unrolled_ring_steps_have_same_values_and_other_program() -> None:
    scanned, unrolled = on_four(True), on_four(False)
    for name, error in worst(unrolled.run(), scanned.run()).items():
        assert error <= 1e-6, name
    sent = [c.compiled.as_text().count(" collective-permute(") for c in (scanned, unrolled)]
    assert sent[1] > sent[0], sent


def test_zigzag_balances_work_over_devices() -> None:
    n, length, block = 4, 64, 8
    mesh = AbstractMesh((1, 1, 1, 1, n), AXIS_NAMES)

    def visited(zigzag: bool) -> np.ndarray:
        """Count the blocks that each device visits at each step, [n, n]."""
        recipe = Recipe.of(Scoring(1.0), causal=True)
        plan = Plan(recipe, mesh, None, "sp", None, P(), zigzag, True, block, block, None)
        index = [Side(plan, length, block).places(i)[:, None] for i in range(n)]
        count = np.zeros((n, n), int)
        for device in range(n):
            for step in range(n):
                q, k = index[device], index[(device - step) % n]
                spans = BlockMask(jnp.ones_like(q), q, jnp.ones_like(k), k).spans(causal=True)
                count[device, step] = jnp.sum(jnp.maximum(spans[1] - spans[0], 0))
        return count

    balanced, contiguous = visited(True), visited(False)
    assert (balanced == balanced[0]).all()
    blocks = n * length // block
    assert balanced.sum() == contiguous.sum() == blocks * (blocks + 1) // 2
    assert contiguous.sum(1).max() > 1.7 * balanced.sum(1).max()


def test_ring_on_one_device_equals_blockwise() -> None:
    blocks = {"operation_configs": {"ring": {"block_q": 16, "block_k": 4}}}
    call = Call("ring", ONE, inputs_of(), packed(), config=blocks)
    assert call.collectives == set()
    assert "[2,2,2,16,4]" in call.compiled.as_text(), "no scores of 16 queries and 4 keys"


def test_auto_selects_ring_for_long_sequences_on_split_mesh() -> None:
    def taken(dims: Dims, s: int, **axes: Any) -> str:
        config = EasyDeLBaseConfig(
            attn_mechanism="auto", sharding_axis_dims=dims, partition_axis=axes
        )
        x = jnp.zeros((1, s, 1, 8))
        call = Projected(
            name="auto",
            q=x,
            k=x,
            v=x,
            mask_info=MaskInfo.full(1, s),
            scoring=Scoring(1.0, window=9),
            config=config,
        )
        return choose(Mechanism.resolve(config), call)

    assert taken((1, 1, 1, 1, 2), 256) == "ring"
    assert taken((1, 1, 1, 1, 2), 64) == "vanilla"
    assert taken((1, 2, 1, 1, 1), 256) != "ring"
    assert taken((1, 1, 1, 1, 2), 256, sequence_axis=None) != "ring"
    assert taken((1, 1, 1, 2, 1), 256, sequence_axis="tp") == "ring"


LLAMA: list[Dims] = [(1, 2, 1, 2, 2), (1, 1, 1, 1, 8), (1, 1, 1, 2, 4), (1, 1, 1, 8, 1)]


@pytest.mark.xdist_group("llama_meshes")
@pytest.mark.parametrize(
    "dims", [pytest.param(d, marks=pytest.mark.nightly if i else ()) for i, d in enumerate(LLAMA)]
)
def test_ring_llama_matches_vanilla_logits_and_gradients(dims: Dims) -> None:
    got = llama_case.place(dims, attn_mechanism="ring", blocksize_q=4, blocksize_k=4)
    want = llama_case.on_one_device()
    pairs = {"loss": (got.loss, want.loss), "logits": (got.logits, want.logits)}
    pairs |= {n: (got.gradients[n], x) for n, x in want.gradients.items()}
    for name, both in pairs.items():
        a, b = (np.asarray(x) for x in both)
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max(), name


@pytest.mark.nightly
@pytest.mark.parametrize(("softmax", "bound"), [("float32", 0.02), ("bfloat16", 0.1)])
def test_bfloat16_ring_attention_stays_within_error_bound(softmax: str, bound: float) -> None:
    inputs = {n: x.astype(jnp.bfloat16) for n, x in inputs_of(more="sinks").items()}
    fields = {"attn_softmax_dtype": softmax, "blocksize_q": 8, "blocksize_k": 8}
    got = Call("ring", (1, 1, 1, 1, 4), inputs, packed(), config=fields).run()
    exact = {n: x.astype(np.float32) for n, x in inputs.items()}
    want = Call("vanilla", ONE, exact, packed()).run()
    assert all(x.dtype == jnp.bfloat16 for x in got.values())
    errors = worst(got, want)
    assert max(errors.values()) <= bound, errors


@pytest.mark.nightly
@pytest.mark.parametrize(
    "fields", [{}, {"decode_attn_mechanism": "ring"}, {"use_sharded_kv_caching": True}], ids=str
)
def test_ring_attention_generates_same_tokens(fields: dict[str, Any]) -> None:
    ids = np.random.default_rng(0).integers(3, 252, (2, 24)).astype(np.int32)
    mask = np.ones_like(ids)
    mask[0, :5] = 0

    def generated(dims: Dims, **fields: Any) -> Any:
        config = llama_case.config(dims, eos_token_id=None, **fields).seal()
        model = llama_case.LlamaForCausalLM.create(config, seed=1)
        return model.generate(ids, attention_mask=mask, max_new_tokens=6).sequences

    ring = generated((1, 1, 1, 2, 4), attn_mechanism="ring", **fields)
    np.testing.assert_array_equal(ring, generated(ONE))


@pytest.mark.nightly
def test_long_sequence_matches_one_device_with_less_memory(record_property: Any) -> None:
    """Compare sequence length 8192 with float64 on one device."""
    s, heads, groups, dim = 8192, 4, 2, 32
    draw = np.random.default_rng(0)
    shapes = {"q": (1, s, heads, dim), "k": (1, s, groups, dim), "v": (1, s, groups, dim)}
    inputs = {n: draw.normal(size=shape) for n, shape in shapes.items()}
    segments = np.repeat([[1, 2, 3, 0]], [5000, 1500, 1600, 92], axis=1)
    fields = {"blocksize_q": 128, "blocksize_k": 128}
    with jax.enable_x64(True):
        exact = {**fields, "attn_softmax_dtype": "float64"}
        info = MaskInfo.from_segments(segments)
        want = Call("blockwise", ONE, inputs, info, config=exact).run()
    assert want["out"].dtype == np.float64
    inputs = {n: x.astype(np.float32) for n, x in inputs.items()}
    lines, peaks = [], {}
    for sp in (1, 2, 4, 8):
        call = Call("ring", (1, 1, 1, 1, sp), inputs, info, config=fields)
        errors = assert_close(call.run(), want)
        assert call.collectives == ({"collective-permute"} if sp > 1 else set())
        arguments, temporary = call.bytes
        peaks[sp] = arguments + temporary
        shown = ", ".join(f"{n} {e:.1e}" for n, e in errors.items())
        lines.append(
            f"sp {sp}: arguments {arguments / 2**20:.2f} + temporary {temporary / 2**20:.2f} MiB a "
            f"device; errors {shown}"
        )
    record_property("summary", "ring at sequence 8192 (packed, causal), " + "; ".join(lines))
    assert peaks[2] < peaks[1] and peaks[4] < 0.7 * peaks[2] and peaks[8] < 0.7 * peaks[4]
