"""Compare recurrences on a CPU: XLA in chunks, and the native library token by token.

uv run python -m tools.bench.recurrences
uv run python -m tools.bench.recurrences --tokens 64 448 --rows 1 --rounds 15

The recurrences have the width of SmolLM2-135M, 576: Mamba-2 with 18 heads of 64 and 64 states,
Mamba with 1,152 channels and 16 states, and the gated delta rule with 9 heads of 64. Without
projections and convolutions. Times are medians in microseconds for one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_layers.context import Ctx
from ed_layers.native import describe
from ed_layers.native.recurrences import Terms
from ed_layers.recurrence import delta, mamba, mamba2
from ed_layers.recurrence.rows import RecurrenceStep, Rows

from tools.bench.measure import command_line, machine, settled, table, take_turns

#: Name -> step of XLA, terms of the library, state of a row, inputs of a token, chunk.
Case = tuple[RecurrenceStep, Callable[[Any], Terms], tuple[int, ...], list[tuple[int, ...]], int]


def cases() -> dict[str, Case]:
    """Return the recurrences."""
    per_head, per_channel = (
        -jnp.asarray(np.random.default_rng(1).uniform(1, 16, shape), jnp.float32)
        for shape in ((18,), (1152, 16))
    )
    dual = [(18, 64), (18,), (1, 64), (1, 64)]
    rule = [(9, 64), (9, 64), (9, 64), (9, 1), (9,)]
    return {
        "Mamba-2": (
            partial(mamba2.state_space_dual, per_head),
            partial(mamba2.dual_terms, per_head),
            (18, 64, 64),
            dual,
            mamba2.CHUNK,
        ),
        "Mamba": (
            partial(mamba.selective_scan, per_channel),
            partial(mamba.selective_terms, per_channel),
            (1152, 16),
            [(1152,), (1152,), (16,), (16,)],
            mamba.MAMBA_CHUNK,
        ),
        "gated delta rule": (delta.delta_rule, delta.delta_terms, (9, 64, 64), rule, delta.CHUNK),
    }


def scanned(case: Case, rows: int, tokens: int, *, native: bool) -> Callable[[], Any]:
    """Return a run of one recurrence over `tokens` tokens of each row."""
    step, terms, of_state, of_inputs, chunk = case
    rng = np.random.default_rng(0)
    inputs = [jnp.asarray(rng.uniform(0, 0.1, (rows, tokens, *d)), jnp.float32) for d in of_inputs]
    if len(inputs) == 5:
        inputs[3] = -inputs[3]  # logarithms of decays

    @partial(jax.jit, donate_argnums=0)
    def run(state: jax.Array, inputs: list[jax.Array]) -> Any:
        context = Ctx(jnp.zeros((rows, tokens), jnp.int32), {}, mode="prefill")
        batch = Rows(context, jnp.ones((rows, tokens), bool), chunk=chunk)
        return batch.scan(step, state, (*inputs,), terms if native else None)

    states = [jnp.zeros((rows, *of_state))]

    def once() -> None:
        out, after = run(states.pop(), inputs)
        out.block_until_ready()
        states.append(after)

    return settled(once)


def main() -> None:
    """Print one table."""
    parser = command_line("recurrences", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[448])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    lines = []
    for name, case in cases().items():
        for tokens in options.tokens:
            for rows in options.rows:
                runs = {
                    label: scanned(case, rows, tokens, native=label == "native")
                    for label in ("XLA", "native")
                }
                xla, native = take_turns(runs, rounds=options.rounds).values()
                label = f"{name}, {rows} x {tokens} tokens"
                times = [f"{seconds * 1e6:.0f}" for seconds in (xla, native)]
                lines.append([label, *times, f"{xla / native:.1f}"])
    print(f"{machine()}\n{describe()}\n")
    print(table(["us", "XLA", "native", "ratio"], lines))


if __name__ == "__main__":
    main()
