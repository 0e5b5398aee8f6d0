"""Compare matrix products on a CPU: plain XLA, `ed_layers.projections.matmul`, and native code.

uv run python -m tools.bench.products
uv run python -m tools.bench.products --rows 1 8 --shape 576 1536 --rounds 31
uv run python -m tools.bench.products --chain
uv run python -m tools.bench.products --gradients

`--chain` compares products of many rows, as the layers of a prompt compute them: 16 products of
different matrices in one program. `--gradients` compares both gradients of a product in training:
`x.T @ d_y` of the matrix and `d_y @ w.T` of the input.

Times are minima over interleaved rounds, because other load on the machine only adds time; those of
`--chain` and `--gradients` are medians.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np

from tools.bench.measure import Run, command_line, machine, table, take_turns

#: Rows, inputs and outputs of the products that `--chain` compares: layers of SmolLM2-135M and of
#: ViT-B.
CHAINS = [
    [16, 576, 1536],
    [32, 576, 1536],
    [64, 576, 1536],
    [128, 576, 1536],
    [320, 576, 1536],
    [640, 576, 1536],
    [577, 768, 3072],
    [2048, 576, 1536],
]

#: The same for `--gradients`: layers and the head of 15M parameters, a layer of SmolLM2-135M.
GRADIENTS = [[2048, 256, 704], [2048, 704, 256], [512, 576, 1536], [1024, 256, 32000]]


def attention_forms(rows: int, slots: int) -> dict[str, Run]:
    """Return runs of weights times values of a decode step: 3 key heads of 64, 9 query heads."""
    import jax
    import jax.numpy as jnp
    from ed_layers.attention.kernels.vanilla import combine

    rng = np.random.default_rng(0)
    weights = jnp.asarray(rng.normal(size=(rows, 3, 3, 1, slots)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(rows, 3, slots, 64)), jnp.float32)
    forms = {
        "einsum": lambda w, v: jnp.einsum("bgrst,bgtk->bsgrk", w, v),
        "joined rows": lambda w, v: combine(w, v, "bgtk", False),
    }
    return {name: ready(jax.jit(form), weights, values) for name, form in forms.items()}


def product_forms(rows: int, inputs: int, outputs: int, *, tied: bool) -> dict[str, Run]:
    """Return runs of one product: jnp.matmul, `ed_layers.projections.matmul` on XLA, and native.

    Args:
        tied: Whether the matrix is stored transposed, like an embedding.
    """
    import jax
    import jax.numpy as jnp
    from ed_layers.native import products
    from ed_layers.native.library import level
    from ed_layers.projections.dot import dot
    from ed_layers.projections.matmul import matmul_float32
    from ed_layers.quantization import encode

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, inputs)), jnp.float32)
    shape = (outputs, inputs) if tied else (inputs, outputs)
    w = jnp.asarray(rng.normal(size=shape), jnp.float32)
    halves = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x, w.T if tied else w)

    def ours(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_float32(x, w, transposed=tied).astype(x.dtype)

    native = jax.jit(partial(products.product, transposed=tied))
    runs = {
        "float32": ready(jax.jit(plain), x, w),
        "bfloat16": ready(jax.jit(plain), *halves),
        "bfloat16, ours": ready(jax.jit(ours), *halves),
    }
    if level() is not None:
        runs["native float32"] = ready(native, x, w)
        runs["native bfloat16"] = ready(native, *halves)
        for name in () if tied else ("int8", "nf4"):
            runs[f"native {name}"] = ready(jax.jit(dot), halves[0], encode(w, name))
    return runs


def chain_forms(rows: int, inputs: int, outputs: int) -> dict[str, Run]:
    """Return runs of 16 products in a row, by XLA in the form that is its fastest, and native."""
    import jax
    import jax.numpy as jnp
    from ed_layers.native import products
    from ed_layers.projections.matmul import matmul_float32

    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, inputs))
    pairs = [
        (rng.normal(size=(inputs, outputs)), rng.normal(size=(outputs, inputs))) for _ in range(8)
    ]
    pairs = [(w / inputs**0.5, back / outputs**0.5) for w, back in pairs]

    def chained(product):
        def run(x: jax.Array, pairs: list[tuple[jax.Array, jax.Array]]) -> jax.Array:
            for w, back in pairs:
                x = product(product(x, w), back)
            return x

        return jax.jit(run)

    def by_xla(x: jax.Array, w: jax.Array) -> jax.Array:
        return matmul_float32(x, w, transposed=False).astype(x.dtype)

    runs = {}
    for dtype in ("float32", "bfloat16"):
        arrays = jax.tree.map(lambda a, dtype=dtype: jnp.asarray(a, dtype), (x, pairs))
        runs[f"XLA {dtype}"] = ready(chained(by_xla), *arrays)
        runs[f"native {dtype}"] = ready(chained(products.product), *arrays)
    return runs


def gradient_forms(rows: int, inputs: int, outputs: int) -> dict[str, Run]:
    """Return runs of the gradients of a product, by XLA in the form that is its fastest, and
    native."""
    import jax
    import jax.numpy as jnp
    from ed_layers.native import products
    from ed_layers.projections.matmul import matmul_float32, plain_gradients

    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=s) for s in ((rows, inputs), (rows, outputs), (inputs, outputs))]
    runs = {}
    for dtype in ("float32", "bfloat16"):
        x, d_y, w = (jnp.asarray(a, dtype) for a in arrays)
        by_xla = jax.jit(lambda d_y, w: matmul_float32(d_y, w, transposed=True).astype(d_y.dtype))
        native = jax.jit(partial(products.product, transposed=True, turned=True))
        runs |= {
            f"XLA {dtype}, matrix": ready(
                jax.jit(lambda x, d_y: plain_gradients(x, d_y)[0]), x, d_y
            ),
            f"native {dtype}, matrix": ready(
                jax.jit(lambda x, d_y: products.gradients(x, [d_y])[0]), x, d_y
            ),
            f"XLA {dtype}, input": ready(by_xla, d_y, w),
            f"native {dtype}, input": ready(native, d_y, w),
        }
    return runs


def speeds(
    shapes: list[list[int]], forms_of: Callable[..., dict[str, Run]], products: int, rounds: int
) -> str:
    """Return a table of billion operations per second: a row for each shape.

    Args:
        shapes: rows, inputs and outputs.
        forms_of: function that returns the runs of a shape.
        products: number of products of a run.
        rounds: number of turns.
    """
    rows, seconds = [], {}
    for shape in shapes:
        n, i, o = shape
        seconds = take_turns(forms_of(n, i, o), rounds=rounds)
        speeds = [products * 2 * n * i * o / 1e9 / taken for taken in seconds.values()]
        rows.append([f"{n} x {i} x {o}", *(f"{speed:.0f}" for speed in speeds)])
    return table(["billion operations per second", *seconds], rows)


def ready(function, *arguments) -> Run:
    """Compile a function, and return a run of it."""
    function(*arguments).block_until_ready()
    return lambda: function(*arguments).block_until_ready()


def measured(cases: dict[str, dict[str, Run]], rounds: int) -> str:
    """Return a table of milliseconds: a row for each case, a column for each form."""
    rows = []
    for label, runs in cases.items():
        seconds = take_turns(runs, rounds=rounds, of=min)
        rows.append([label, *(f"{taken * 1e3:.3f}" for taken in seconds.values())])
    forms = next(iter(cases.values()))
    return table(["ms", *forms], rows)


def main() -> None:
    os.environ["ED_LAYERS_NATIVE"] = "1"
    from ed_layers.native import describe

    parser = command_line("products", __doc__)
    add = parser.add_argument
    add("--rows", type=int, nargs="+", default=[1, 2, 8, 32, 256])
    add("--shape", type=int, nargs=2, default=[576, 1536], metavar=("IN", "OUT"))
    add("--vocab", type=int, default=16384)
    add("--slots", type=int, default=256)
    add("--rounds", type=int, default=15)
    add("--chain", action="store_true", help="only products of many rows, as in a prompt")
    add("--gradients", action="store_true", help="only gradients of products, as in training")
    options = parser.parse_args()
    inputs, outputs = options.shape
    print(f"{machine()}\n{describe()}")
    if options.chain:
        print(f"\n{speeds(CHAINS, chain_forms, 16, options.rounds)}")
        return
    if options.gradients:
        print(f"\n{speeds(GRADIENTS, gradient_forms, 1, options.rounds)}")
        return
    cases = {
        f"{n} x {inputs} x {outputs}": product_forms(n, inputs, outputs, tied=False)
        for n in options.rows
    }
    print(f"\n{measured(cases, options.rounds)}\n\ntied head\n")
    vocab = options.vocab
    cases = {
        f"{n} x {inputs} x {vocab}": product_forms(n, inputs, vocab, tied=True)
        for n in options.rows
    }
    print(f"{measured(cases, options.rounds)}\n\nvalues of {options.slots} slots\n")
    cases = {f"batch {n}": attention_forms(n, options.slots) for n in options.rows if n <= 32}
    print(measured(cases, options.rounds))


if __name__ == "__main__":
    main()
