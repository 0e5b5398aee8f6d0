"""The limits of the device of this process: bytes read from memory, and products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from ed_layers.native.products import PANEL, takes_panels
from ed_layers.projections.dot import dot
from ed_layers.projections.panels import Panels
from ed_layers.quantization import encode
from flax import nnx

#: Side of the matrices of a product.
SIDE = 2048


class DeviceLimits(NamedTuple):
    """Measured limits of one device.

    Attributes:
        bandwidth: bytes per second that are read from memory, see `read_bandwidth`.
        products: operations per second (a product of two numbers and an addition are two) of
            products of square matrices, by dtype: `float32`, `bfloat16`, and `w8a8` on CPUs.
    """

    bandwidth: float
    products: dict[str, float]

    def lines(self) -> list[str]:
        """Return a line for each limit."""
        speeds = [
            f"{f'products, {name}':<22}{speed / 1e9:>10,.0f} billion operations/s"
            for name, speed in self.products.items()
        ]
        return [f"{'memory, read':<22}{self.bandwidth / 1e9:>10,.1f} GB/s", *speeds]


def measure_limits(rounds: int = 5) -> DeviceLimits:
    """Measure the limits of the first device; a second or two on a CPU."""
    bandwidth = read_bandwidth(rounds)
    x = jax.random.normal(jax.random.key(0), (SIDE, SIDE))
    operands: dict[str, tuple[Any, Any]] = {
        "float32": (x, x),
        "bfloat16": (x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)),
    }
    if jax.default_backend() == "cpu":
        operands["w8a8"] = x, encode(x, "int8", SIDE, activations=True)
    products = {
        name: 2 * SIDE**3 / measure_seconds(jax.jit(dot), *pair, rounds=rounds)
        for name, pair in operands.items()
    }
    return DeviceLimits(bandwidth, products)


def read_bandwidth(rounds: int = 8) -> float:
    """Return the bytes per second at which memory is read.

    A CPU reads 512 MiB, and an accelerator 4 GiB. A sum reads one run of memory. On a CPU, a
    product of one row with packed numbers reads several runs, and the larger rate counts.
    """
    if jax.default_backend() != "cpu":
        numbers = jnp.ones(2**30, jnp.float32)
        return numbers.nbytes / measure_seconds(jax.jit(jnp.sum), numbers, rounds=rounds)
    numbers = jnp.ones((2**10, 2**11, PANEL), jnp.float32)
    seconds = [measure_seconds(jax.jit(jnp.sum), numbers, rounds=rounds)]
    if takes_panels(1, jnp.float32):
        row, matrix = jnp.ones((1, 2**11)), Panels(numbers)
        seconds.append(measure_seconds(jax.jit(dot), row, matrix, rounds=rounds))
    return numbers.nbytes / min(seconds)


def measure_seconds(call: Callable[..., jax.Array], *arguments: object, rounds: int) -> float:
    """Return the median seconds of a call after a first one, which compiles it."""
    times = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def describe_reached_limits(
    limits: DeviceLimits, model: nnx.Module, *, tokens: int, first: float, step: float
) -> list[str]:
    """Return the shares of the limits that an engine reaches, a line each.

    Args:
        model: the served model; its arrays may be shapes.
        tokens: tokens of all prompts.
        first: seconds of the prompts.
        step: seconds of a decoding step.
    """
    config: Any = getattr(model, "config", None)
    leaves = jax.tree.leaves(nnx.state(model))
    if not getattr(config, "tie_word_embeddings", False):
        # A step reads single rows of an embedding that is not the head.
        table = next((x for x in leaves if x.shape[:1] == (config.vocab_size,)), None)
        leaves = [x for x in leaves if x is not table]
    weights = sum(x.size * x.dtype.itemsize for x in leaves)
    rate = weights / step
    lines = [
        f"a decoding step reads {weights / 1e9:.3f} GB of weights, {rate / 1e9:.1f} GB/s: "
        f"{rate / limits.bandwidth:.0%} of the memory's speed"
    ]
    matrices = [x for x in leaves if x.ndim >= 2]
    kinds = {x.dtype.name for x in matrices}
    if len(kinds) == 1 and (kind := kinds.pop()) in limits.products:
        operations = 2 * tokens * sum(x.size for x in matrices)
        share = operations / first / limits.products[kind]
        lines.append(
            f"the prompts need {operations / 1e9:,.0f} billion operations: {share:.0%} of the "
            "speed of products"
        )
    return lines
