"""The kernel of a call; native kernels on other platforms, interpreted or traced."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra import enums
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.logging import forget_said
from ed_infra.masks import MaskInfo
from ed_layers import devices
from ed_layers.attention import MECHANISMS, Mechanism, attend
from ed_layers.attention import mechanism as mechanisms
from ed_layers.attention.kernel import Projected
from ed_layers.attention.kernels import built_in, gpu
from ed_layers.attention.kernels.flash_tpu import flash_on_tpu
from ed_layers.attention.kernels.splash import splash_attention
from ed_layers.attention.kernels.vanilla import vanilla_attention
from ed_layers.attention.mechanism import choose
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.paged import PagedCache
from ed_layers.cache.ragged import RaggedBatch

ONE = (1, 1, 1, 1, 1)
B, S, H, G, K = 2, 200, 4, 2, 32
# Padding before, between and behind; two segments in one row and three in the other.
SEGMENTS = np.repeat([[0, 1, 0, 2, 0], [1, 1, 2, 2, 3]], [5, 100, 7, 60, 28], axis=1)


def mechanism(**fields: Any) -> Mechanism:
    return Mechanism.resolve(EasyDeLBaseConfig(**{"sharding_axis_dims": ONE, **fields}))


def inputs(value_dim: int = K, dtype: Any = jnp.float32) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, value_dim), (B, S, H, value_dim), (H,)]
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def call_of(
    chosen: Mechanism, qkv: Any, info: MaskInfo, scoring: Scoring, name: str = "blocksparse"
) -> Projected:
    q, k, v = qkv
    call = Projected(
        name="auto", q=q, k=k, v=v, mask_info=info, scoring=scoring, config=chosen.config
    )
    return chosen.replace_mechanism(call, name)


def worst(found: Any, expected: Any) -> float:
    """The largest error relative to the largest value of its tensor."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


def run(attention: Any, given: dict[str, Any], segments: Any = SEGMENTS) -> Any:
    """The output of one call of a mechanism's function, and the gradients of q, k, v and sinks."""
    given = dict(given)
    *qkv, d_out, sinks = inputs(given.pop("value_dim", K))
    info = MaskInfo.from_segments(segments, causal=given.pop("causal", True))
    sinks = sinks if given.pop("sinks", False) else None

    def loss(qkv: Any, sinks: Any) -> Any:
        scoring = Scoring(K**-0.5, sinks=sinks, **given)
        out = attention(call_of(mechanism(), qkv, info, scoring))
        return jnp.sum(out * d_out), out

    of = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    (_, out), grads = jax.jit(of)(qkv, sinks)
    return out, grads


def test_mechanism_table_lists_every_mechanism() -> None:
    names = set(get_args(enums.AVAILABLE_ATTENTION_MECHANISMS)) - {"auto"}
    assert set(MECHANISMS) == names
    assert {enums.MECHANISM_ALIASES[x] for x in ("flash", "splash")} <= names
    everywhere = {(k.mechanism, k.reads) for k in built_in() if k.platform is None}
    assert {(name, it.reads) for name, it in MECHANISMS.items()} <= everywhere, "plain XLA is last"


SPLASH = {
    "window, cap, sinks": {"window": 19, "soft_cap": 2.0, "sinks": True},
    "causal": {},
    "bidirectional": {"causal": False},
    "bidirectional, window": {"causal": False, "window": 30},
    "chunk": {"chunk": 24},
    "traced chunk": {"chunk": jnp.asarray(24)},
    "value dim": {"value_dim": 64},
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "case",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.nightly)
        for i, name in enumerate(SPLASH)
    ],
)
def test_splash_attention_matches_vanilla(case: str, record_property) -> None:
    out, grads = run(partial(splash_attention, interpret=True), SPLASH[case])
    expected, expected_grads = run(vanilla_attention, SPLASH[case])
    errors = worst(out, expected), worst(grads, expected_grads)
    record_property("summary", f"splash, interpreted, {case}: {errors[0]:.1e}, {errors[1]:.1e}")
    assert errors[0] < 1e-5 and errors[1] < 1e-4
    assert not np.any(np.asarray(out)[SEGMENTS == 0])


@pytest.mark.nightly
def test_sharded_splash_attention_matches_vanilla(record_property) -> None:
    """Rows over fsdp, heads over tp, more ways than there are kv heads; interpreted."""
    split = mechanism(sharding_axis_dims=(1, 2, 1, 4, 1))

    def attention(call: Projected) -> Any:
        return splash_attention(replace(call, config=split.config), interpret=True)

    given = {"window": 19, "sinks": True}
    (out, grads), (expected, expected_grads) = run(attention, given), run(vanilla_attention, given)
    errors = worst(out, expected), worst(grads, expected_grads)
    record_property(
        "summary", f"splash on 8 devices, interpreted: {errors[0]:.1e}, {errors[1]:.1e}"
    )
    assert errors[0] < 1e-5 and errors[1] < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("given", [{}, {"causal": False}, {"chunk": 24}], ids=str)
def test_flash_on_tpu_is_vanilla(given: dict, record_property) -> None:
    from jax.experimental.pallas import tpu

    with tpu.force_tpu_interpret_mode():
        out, grads = run(flash_on_tpu, given)
    expected, expected_grads = run(vanilla_attention, given)
    errors = worst(out, expected), worst(grads, expected_grads)
    record_property(
        "summary", f"flash on TPU, interpreted, {given}: {errors[0]:.1e}, {errors[1]:.1e}"
    )
    assert errors[0] < 1e-5 and errors[1] < 1e-4


SINGLE = np.repeat([[1, 1, 0], [1, 0, 0]], [100, 99, 1], axis=1)


ROWS = {"packed": SEGMENTS, "one": SINGLE, "odd": SINGLE[:, 1:]}
LIMITS = {"plain": {}, "window": {"window": 19, "value_dim": 16}, "chunk": {"chunk": 24}}
PAIRS = [
    (rows, limits) for rows in ROWS for limits in LIMITS if (rows, limits) != ("odd", "window")
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("rows", "limits"),
    [("odd", "window"), *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in PAIRS)],
)
def test_rows_as_gpu_kernels_take_them(rows: str, limits: str, monkeypatch) -> None:
    """jax's own function under the XLA implementation in place of cuDNN: same arguments."""
    segments, given = ROWS[rows], LIMITS[limits]
    s = segments.shape[1]

    def cut(attention: Any, call: Projected) -> Any:
        cut = replace(call, **{name: getattr(call, name)[:, :s] for name in "qkv"})
        return jnp.pad(attention(cut), ((0, 0), (0, S - s), (0, 0), (0, 0)))

    def by_rows(call: Projected) -> Any:
        return gpu.gpu_attention(partial(gpu.by_jax, call.scoring.scale, "xla"), call)

    attention, reference = partial(cut, by_rows), partial(cut, vanilla_attention)

    expected = run(reference, given, segments)
    assert worst(run(attention, given, segments), expected) < 1e-5
    monkeypatch.setattr(gpu, "MASK_LIMIT", 0)
    assert worst(run(attention, given, segments), expected) < 1e-5


def on(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Let mechanisms think that the model runs elsewhere; programs are then traced, not run."""
    monkeypatch.setattr(devices, "get_platform", lambda config: platform)


def program(
    info: MaskInfo | None = None, dtype: Any = jnp.bfloat16, given: Any = None, **fields: Any
) -> str:
    """jaxpr of the gradient of `attend`, with a configuration of these fields."""
    qkv = inputs(dtype=dtype)[:3]
    info = info or MaskInfo.from_segments(SEGMENTS)
    chosen = mechanism(**fields)

    def loss(*qkv: Any) -> Any:
        return jnp.sum(attend(*qkv, info, mechanism=chosen, **(given or {}))[0].astype(jnp.float32))

    return str(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*qkv))


def grids(program: str) -> list[str]:
    """Grids of the kernels in a jaxpr.

    jax 0.12 prints the other functions of a program in an order that differs between traces.
    """
    return re.findall(r"grid=\([\d, ]*\)", program)


@pytest.mark.nightly
@pytest.mark.proves("platform", "BaseOperationConfig")
def test_platform_is_the_language_of_the_kernel(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"no pallas kernel on cpu.*blocksparse on tpu"):
        mechanism(attn_mechanism="splash", platform="pallas")
    on(monkeypatch, "tpu")
    assert "pallas_call" in program(attn_mechanism="splash")
    assert "pallas_call" in program(attn_mechanism="splash", platform="pallas")
    assert "pallas_call" not in program(attn_mechanism="splash", platform="jax")
    own = {"blocksparse": {"platform": "jax"}}
    assert "pallas_call" not in program(attn_mechanism="splash", operation_configs=own)
    for name in ("vanilla", "cudnn", "sdpa"):
        with pytest.raises(ConfigError, match="no pallas kernel"):
            mechanism(attn_mechanism=name, platform="pallas")
    on(monkeypatch, "gpu")
    with pytest.raises(ConfigError, match="no pallas kernel on gpu"):
        mechanism(attn_mechanism="splash", platform="pallas")
    assert "pallas_call" in program(attn_mechanism="flash", platform="triton")
    with monkeypatch.context() as patch:
        patch.setattr(mechanisms, "kernels", lambda: gpu.KERNELS)
        with pytest.raises(
            ConfigError, match="needs tokamax, which is not installed: pip install tokamax"
        ):
            mechanism(attn_mechanism="flash", platform="triton")
    with pytest.raises(ConfigError, match="unknown platform of an operation 'cuda'"):
        mechanism(operation_configs={"flash": {"platform": "cuda"}})


@pytest.mark.proves("blocksize_b")
def test_blocksize_b_is_rows_of_a_step_of_flash_attention(monkeypatch) -> None:
    on(monkeypatch, "tpu")
    usual, one, two, seven = (
        grids(program(attn_mechanism="flash", **fields))
        for fields in ({}, {"blocksize_b": 1}, {"blocksize_b": 2}, {"blocksize_b": 7})
    )
    # Each row of a block is a copy of the body: the kernel's grid has fewer steps.
    assert one and one != two
    assert one == usual
    assert two == seven, "a batch of two has blocks of at most two"


@pytest.mark.nightly
@pytest.mark.proves("flash_attention_backward_pass_impl")
def test_the_backward_pass_of_flash_attention(monkeypatch) -> None:
    """jax's XLA implementation replaces cuDNN, which cannot be traced on this platform."""
    on(monkeypatch, "gpu")
    by_jax, called = gpu.by_jax, []

    @jax.custom_vjp
    def native_only(q: Any) -> Any:
        return q

    def refuse(_: Any, d_out: Any) -> Any:
        called.append("backward pass of the kernel")
        return (d_out,)

    native_only.defvjp(lambda q: (q, None), refuse)
    monkeypatch.setattr(
        gpu,
        "by_jax",
        lambda scale, _, q, k, v, **mask: native_only(by_jax(scale, "xla", q, k, v, **mask)),
    )
    for name in ("cudnn", "flash"):
        called.clear()
        program(attn_mechanism=name, flash_attention_backward_pass_impl="xla")
        assert not called
        program(attn_mechanism=name)
        assert called
    kernel, lean = (
        partial(by_jax, K**-0.5, "xla"),
        mechanism(flash_attention_backward_pass_impl="xla"),
    )
    both = [
        run(partial(gpu.gpu_attention, kernel), {"window": 19}),
        run(
            lambda call: gpu.gpu_attention(kernel, replace(call, config=lean.config)),
            {"window": 19},
        ),
    ]
    assert worst(*both) < 1e-5


@pytest.mark.daily(
    "tpu-bfloat16-given1-fields1-'blocksparse' on tpu: its kernel fits",
    "tpu-float16-given2-fields2-'blockwise' on tpu",
    "tpu-bfloat16-given3-fields3-'blockwise' on tpu",
    "gpu-bfloat16-given5-fields5-'flash_attn2' on gpu: its kernel fits",
)
@pytest.mark.parametrize(
    ("platform", "dtype", "given", "fields", "expected"),
    [
        ("cpu", jnp.float32, {}, {}, "'blockwise' on cpu: more than 128 queries"),
        ("tpu", jnp.bfloat16, {"window": 9}, {}, "'blocksparse' on tpu: its kernel fits"),
        ("tpu", jnp.float16, {}, {}, "'blockwise' on tpu"),
        ("tpu", jnp.bfloat16, {}, {"platform": "jax"}, "'blockwise' on tpu"),
        ("gpu", jnp.float32, {}, {}, "'flash_attn2' on gpu: its kernel fits"),
        ("gpu", jnp.bfloat16, {"soft_cap": 3.0}, {}, "'flash_attn2' on gpu: its kernel fits"),
        ("gpu", jnp.bfloat16, {"soft_cap": 3.0}, {"platform": "jax"}, "'blockwise' on gpu"),
    ],
)
def test_auto_mechanism_selects_expected_kernel(
    platform: str, dtype: Any, given: dict, fields: dict, expected: str, monkeypatch, caplog
) -> None:
    on(monkeypatch, platform)
    forget_said()
    with caplog.at_level(logging.INFO, logger="easydel"):
        for _ in range(2):
            text = program(dtype=dtype, given=given, attn_mechanism="auto", **fields)
    said = [r.getMessage() for r in caplog.records if "auto takes" in r.getMessage()]
    assert len(said) == 1 and expected in said[0]
    assert ("pallas_call" in text) == ("its kernel fits" in expected)


def test_auto_selects_cudnn_on_gpu_when_supported(monkeypatch) -> None:
    on(monkeypatch, "gpu")
    auto, q = mechanism(attn_mechanism="auto"), jnp.zeros((1, 256, 4, 64), jnp.bfloat16)

    def taken(q: jax.Array, **features: Any) -> str:
        info = MaskInfo.full(1, q.shape[1])
        return choose(auto, call_of(auto, (q, q, q), info, Scoring(1.0, **features), "auto"))

    assert taken(q, window=9) == "cudnn"
    assert taken(q[..., :63]) == "flash_attn2", "cuDNN has multiples of 8"
    assert taken(q, bias=jnp.zeros((1, 1, 256, 256))) == "blockwise"
    assert taken(q[:, :64]) == "vanilla"
    monkeypatch.setattr(gpu, "has_tokamax", lambda: True)
    assert taken(q, soft_cap=2.0) == "flash_attn2"
    assert taken(q.astype(jnp.float32)) == "flash_attn2"


def test_unsupported_kernel_call_logs_reason_once(monkeypatch, caplog) -> None:
    on(monkeypatch, "tpu")
    forget_said()
    unordered = MaskInfo(*[jnp.ones((B, S), jnp.int32)] * 4)
    with caplog.at_level(logging.INFO, logger="easydel"):
        for _ in range(2):
            assert "pallas_call" not in program(unordered, attn_mechanism="splash")
    record, *more = (r for r in caplog.records if "blocksparse" in r.getMessage())
    assert not more and record.levelno == logging.INFO
    assert "not the same tokens in order" in record.getMessage()


@pytest.mark.nightly
def test_pages_on_tpu_are_read_by_the_kernel(monkeypatch) -> None:
    """The program reads the stacked pool as consecutive pages, or reports why it cannot."""

    def text(head_dim: int = 128, dtype: Any = jnp.bfloat16, **given: Any) -> str:
        ints = partial(jnp.zeros, dtype=jnp.int32)
        ragged = RaggedBatch(
            *(ints(9), ints(8), ints(16), {"full": ints(16)}, {"full": ints((8, 4))}),
            *(ints(8), ints(())),
        )
        q = jnp.zeros((1, 16, 8, head_dim), dtype)
        cache = PagedCache(jnp.zeros((2, 32, 16, 2, 2, head_dim), dtype))
        fields = {"attn_mechanism": "page_attention"}

        def step(q: Any, cache: Any, layer: Any) -> Any:
            call = {
                "cache": cache,
                "layer": layer,
                "ragged": ragged,
                "mechanism": mechanism(**fields),
            }
            return attend(q, q[:, :, :2], q[:, :, :2], None, **call, **given)[0]

        return str(jax.make_jaxpr(step)(q, cache, 1))

    assert "pallas_call" not in text()
    on(monkeypatch, "tpu")
    assert "ragged_paged_attention_kernel" in text(window=8, soft_cap=2.0)
    for changes in (
        {"head_dim": 64},
        {"chunk": 8},
        {"sinks": jnp.zeros(8)},
        {"window": jnp.asarray(8)},
    ):
        assert "pallas_call" not in text(**changes)


def test_a_model_for_the_engine_trains_by_auto(caplog) -> None:
    forget_said()
    with caplog.at_level(logging.INFO, logger="easydel"):
        for _ in range(2):
            chosen = mechanism(attn_mechanism="page_attention")
    assert (chosen.name, chosen.pages) == ("auto", "page_attention")
    (record,) = caplog.records
    assert "training and generate() use 'auto'" in record.getMessage()
    with pytest.raises(ConfigError, match=r"reads cache only.*auto, vanilla"):
        mechanism(attn_mechanism="autoregressive_decodeattn")
