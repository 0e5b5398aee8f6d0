"""Compare attention mechanisms with each other and with torch in one run: time, memory, error.

uv run python -m tools.bench.attention --length 512 2048
uv run python -m tools.bench.attention --mechanisms vanilla blockwise --forward --window 256
uv run python -m tools.bench.attention --mechanisms cudnn blockwise --dtype bfloat16   on a GPU

Time is the median of interleaved runs, also as a ratio to torch's scaled_dot_product_attention,
which runs on the GPU if jax has one. Memory is the growth of the resident memory on a CPU, where
each contender runs in a separate process, and the peak of the device otherwise. The error is the
largest difference from vanilla in float64, relative to its largest value.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from tools.bench.measure import (
    command_line,
    machine,
    peak_growth,
    run_worker,
    settled,
    table,
    take_turns,
    to_numpy,
    torch_device,
    wait_for_torch,
)

TORCH = "torch sdpa"


@dataclass(frozen=True)
class Case:
    """The shape of one measurement."""

    length: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    window: int | None
    forward: bool
    dtype: str

    def inputs(self) -> list[np.ndarray]:
        """Return q, k, v as [b, s, heads, head_dim], and the cotangent of the output."""
        rng = np.random.default_rng(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.length, h, self.head_dim) for h in heads]
        return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@dataclass(frozen=True)
class Contender:
    """A compiled mechanism: `run` returns the output and, unless `forward`, the gradients.

    `device_bytes` returns the peak growth of the device's memory during a run, without the inputs.
    """

    run: Callable[[], list[Any]]
    device_bytes: Callable[[], int]


def jax_contender(name: str, case: Case, dtype: str | None = None) -> Contender:
    """Compile a mechanism of this project; `dtype` replaces that of the case."""
    import jax
    import jax.numpy as jnp
    from ed_infra.masks import MaskInfo
    from ed_layers.attention import Mechanism, attend

    softmax = jnp.promote_types(dtype or case.dtype, jnp.float32)
    mechanism = Mechanism(name=name, softmax_dtype=softmax)
    inputs = (jnp.asarray(x, case.dtype) for x in case.inputs())
    q, k, v, d_out = (x.astype(dtype or case.dtype) for x in inputs)
    mask_info = MaskInfo.full(case.batch, case.length)

    def forward(q, k, v):
        return attend(q, k, v, mask_info, window=case.window, mechanism=mechanism)[0]

    def both(q, k, v, d_out):
        out, pull = jax.vjp(forward, q, k, v)
        return (out, *pull(d_out))

    arguments = (q, k, v) if case.forward else (q, k, v, d_out)
    compiled = jax.jit(forward if case.forward else both).lower(*arguments).compile()

    def device_bytes() -> int:
        sizes: Any = compiled.memory_analysis()
        return sizes.temp_size_in_bytes + sizes.output_size_in_bytes

    return Contender(
        lambda: jax.tree.leaves(jax.block_until_ready(compiled(*arguments))), device_bytes
    )


def torch_contender(case: Case) -> Contender:
    """Return torch's fused attention; a window needs an explicit mask."""
    import torch

    kind = getattr(torch, case.dtype)
    inputs = (torch.tensor(x).to(torch_device(), kind) for x in case.inputs())
    q, k, v, d_out = (x.transpose(1, 2) for x in inputs)
    mask = None
    if case.window is not None:
        at = torch.arange(case.length, device=torch_device())
        near = at[:, None] - at[None] < case.window
        mask = near & (at[:, None] >= at[None])

    def run() -> list[Any]:
        leaves = [x.detach().requires_grad_(not case.forward) for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(
            *leaves, attn_mask=mask, is_causal=mask is None, enable_gqa=True
        )
        if not case.forward:
            out.backward(d_out)
        grads = [x.grad for x in leaves if x.grad is not None]
        wait_for_torch()
        return [x.detach().transpose(1, 2) for x in (out, *grads)]

    def device_bytes() -> int:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() - before

    return Contender(run, device_bytes)


def contender(name: str, case: Case) -> Contender:
    """Return a contender by its name in the table."""
    return torch_contender(case) if name == TORCH else jax_contender(name, case)


def exact(case: Case) -> list[np.ndarray]:
    """Return the result of the full score matrix in float64."""
    import jax

    with jax.enable_x64(True):
        return [np.asarray(x) for x in jax_contender("vanilla", case, "float64").run()]


def error(found: list[Any], expected: list[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest value of each array."""
    pairs = zip(map(to_numpy, found), expected, strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in pairs)


def memory_of(name: str, case: Case, made: Contender) -> int:
    """Return the peak growth of memory in bytes, on a CPU measured in a separate process."""
    if torch_device() != "cpu":
        return made.device_bytes()
    given = [f"--{field.name.replace('_', '-')}" for field in fields(Case)]
    flags: list[str] = []
    for flag, field in zip(given, fields(Case), strict=True):
        value = getattr(case, field.name)
        if value is not None and value is not False:
            flags += [flag] if value is True else [flag, str(value)]
    return run_worker("attention", ["--memory-of", name, *flags], os.environ)


def measure(case: Case, names: list[str], rounds: int) -> str:
    """Return the table of one case."""
    made = {name: contender(name, case) for name in names}
    expected = exact(case)
    errors = {name: error(of.run(), expected) for name, of in made.items()}
    seconds = take_turns({name: settled(of.run) for name, of in made.items()}, rounds=rounds)
    base = seconds.get(TORCH, seconds[names[0]])
    rows = [
        [
            name,
            f"{seconds[name] * 1e3:.3g}",
            f"{seconds[name] / base:.2f}",
            f"{memory_of(name, case, made[name]) / 1e6:.0f}",
            f"{errors[name]:.1e}",
        ]
        for name in names
    ]
    baseline = TORCH if TORCH in names else names[0]
    return table(["mechanism", "ms", f"of {baseline}", "peak MB", "error"], rows)


def main() -> None:
    parser = command_line("attention", __doc__)
    add = parser.add_argument
    add("--mechanisms", nargs="+", default=["vanilla", "sdpa", "blockwise", "flash_attn2"])
    add("--length", type=int, nargs="+", default=[512, 2048])
    add("--batch", type=int, default=1)
    add("--heads", type=int, default=9)
    add("--kv-heads", type=int, default=3)
    add("--head-dim", type=int, default=64)
    add("--window", type=int, help="sliding window, in positions")
    add("--forward", action="store_true", help="without the backward pass")
    add("--rounds", type=int, default=7)
    add("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    add("--memory-of", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = [
        Case(length, *(getattr(given, field.name) for field in fields(Case)[1:]))
        for length in given.length
    ]
    if given.memory_of:
        print(peak_growth(contender(given.memory_of, cases[0]).run))
        return
    names = list(given.mechanisms)
    try:
        import torch  # noqa: F401 - checks only that torch is installed
    except ImportError:
        print("torch is not installed, so it is not measured\n")
    else:
        names.append(TORCH)
    print(machine())
    for case in cases:
        passes = "forward" if case.forward else "forward and backward"
        window = "" if case.window is None else f", window {case.window}"
        print(
            f"\n{passes}, causal{window}, {case.batch} x {case.length} tokens, "
            f"{case.heads}/{case.kv_heads} heads of {case.head_dim}, {case.dtype}\n"
        )
        print(measure(case, names, given.rounds))


if __name__ == "__main__":
    main()
