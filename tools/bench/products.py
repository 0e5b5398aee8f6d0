"""Forms of a matrix product on a CPU: what `ed_layers.matmul` writes, against the plain forms.

uv run python -m tools.bench.products
uv run python -m tools.bench.products --rows 1 8 --shape 576 1536 --rounds 31

Times are minima over rounds in which all forms take turns: other load on the machine only adds.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from tools.bench.measure import Run, machine, table, take_turns


def attention_forms(rows: int, slots: int) -> dict[str, Run]:
    """Weights times values of one decode step: 3 key heads of 64, 9 query heads, float32."""
    import jax
    import jax.numpy as jnp
    from ed_layers.attention.vanilla import combine

    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(rows, 3, 3, 1, slots)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(rows, 3, slots, 64)), jnp.float32)
    forms = {
        "einsum": lambda w, v: jnp.einsum("bgrst,bgtk->bsgrk", w, v),
        "joined rows": lambda w, v: combine(w, v, "bgtk", False),
    }
    return {name: ready(jax.jit(form), weights, values) for name, form in forms.items()}


def product_forms(rows: int, inputs: int, outputs: int, *, tied: bool) -> dict[str, Run]:
    """A product of float32, of bfloat16 as jnp.matmul writes it, and as `ed_layers.matmul` does.

    Args:
        tied: the matrix lies transposed, as an embedding does.
    """
    import jax
    import jax.numpy as jnp
    from ed_layers.matmul import matmul

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.float32)
    shape = (outputs, inputs) if tied else (inputs, outputs)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    halves = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w.T if tied else w)

    return {
        "float32": ready(jax.jit(plain), x, w),
        "bfloat16": ready(jax.jit(plain), *halves),
        "ours": ready(jax.jit(partial(matmul, transposed=tied)), *halves),
    }


def ready(function, *arguments) -> Run:
    """A run of a compiled function."""
    function(*arguments).block_until_ready()
    return lambda: function(*arguments).block_until_ready()


def row(label: str, runs: dict[str, Run], rounds: int) -> list[str]:
    """Milliseconds of each form, and what the last gains over the others."""
    seconds = take_turns(runs, rounds=rounds, of=min)
    last = list(seconds.values())[-1]
    cells = [f"{taken * 1e3:.3f}" for taken in seconds.values()]
    return [label, *cells, *(f"{taken / last:.1f}" for taken in list(seconds.values())[:-1])]


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench.products",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 256])
    add("--shape", type=int, nargs=2, default=[576, 1536], metavar=("IN", "OUT"))
    add("--vocab", type=int, default=16384)
    add("--slots", type=int, default=256)
    add("--rounds", type=int, default=15)
    options = parser.parse_args()
    inputs, outputs = options.shape
    print(machine())
    header = ["", "float32 ms", "bfloat16 ms", "ours ms", "float32 / ours", "bfloat16 / ours"]
    rows = []
    for n in options.rows:
        runs = product_forms(n, inputs, outputs, tied=False)
        rows.append(row(f"{n} x {inputs} x {outputs}", runs, options.rounds))
    for n in options.rows:
        runs = product_forms(n, inputs, options.vocab, tied=True)
        rows.append(row(f"tied head, {n} x {inputs} x {options.vocab}", runs, options.rounds))
    print(f"\n{table(header, rows)}\n")
    header = [f"values of {options.slots} slots", "einsum ms", "joined rows ms", "ratio"]
    rows = [
        row(f"batch {n}", attention_forms(n, options.slots), options.rounds)
        for n in options.rows
        if n <= 32
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
