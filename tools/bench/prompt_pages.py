"""Compare attention of prompts over pages on a GPU: the Triton kernel and plain XLA, in one run.

    uv run python -m tools.bench.prompt_pages
    uv run python -m tools.bench.prompt_pages --trial       tiny prompts, without a GPU

Each case is one layer of a serving step: the new tokens of some sequences, which attend to all
stored tokens of their sequence. Float32 products are computed in float32. The error is relative to
the largest value that plain XLA computes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tools.bench.measure import Run, command_line, machine, settled, table, take_turns

PAGE = 16
#: Name -> head dim, heads, kv heads, new tokens and stored tokens of each sequence, scoring.
CASES: dict[str, tuple[int, int, int, list[int], list[int], dict[str, Any]]] = {
    "640 tokens": (64, 9, 3, [640], [640], {}),
    "2368 tokens": (64, 9, 3, [2368], [2368], {}),
    "chunks of 3 prompts and 2 decoding sequences": (
        *(128, 8, 2),
        [1, 300, 1, 77, 512],
        [900, 300, 17, 400, 2048],
        {"soft_cap": 30.0, "window": 200},
    ),
    "2 prompts, head dim 80": (80, 4, 4, [200, 100], [200, 300], {}),
}
TRIAL: dict[str, Any] = {"40 tokens": (16, 4, 2, [40, 1], [40, 20], {})}


def step(case: Any, dtype: Any, longest: int) -> Any:
    """Return a call of attention with random numbers.

    Args:
        case: a value of `CASES`.
        dtype: dtype of queries and pages.
        longest: maximum number of tokens of a sequence.
    """
    from ed_layers.attention.kernel import Paged
    from ed_layers.attention.scoring import Scoring
    from ed_layers.cache import RaggedBatch
    from ed_layers.cache.protocol import Pages

    dim, heads, groups, q_lens, kv_lens, scoring = case
    draw, seqs, tokens = np.random.default_rng(0), len(q_lens), sum(q_lens)
    width = -(-longest // PAGE)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape), dtype)

    def ints(x: Any) -> jax.Array:
        return jnp.asarray(x, jnp.int32)

    ragged = RaggedBatch(
        cu_q_lens=ints(np.cumsum([0, *q_lens])),
        kv_lens=ints(kv_lens),
        seq_of_token=ints(np.repeat(np.arange(seqs), q_lens)),
        slots={"full": ints(np.zeros(tokens))},
        page_table={"full": ints(draw.permutation(seqs * width).reshape(seqs, width))},
        state_slots=ints(np.arange(seqs)),
        num_seqs=ints(seqs),
    )
    return Paged(
        name="page_attention",
        q=normal(tokens, heads, dim),
        scoring=Scoring(dim**-0.5, **scoring),
        pages=Pages(normal(2, seqs * width, PAGE, groups, 2, dim), (1,), "full"),
        ragged=ragged,
    )


def main() -> None:
    parser = command_line("prompt_pages", __doc__)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--longest", type=int, default=2384, help="tokens of the page table")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--trial", action="store_true")
    options = parser.parse_args()
    from ed_layers.attention.kernels.paged import paged_attention
    from ed_layers.attention.kernels.paged_gpu import prompt_attention

    if not options.trial and jax.default_backend() != "gpu":
        parser.error("this machine has no GPU; --trial runs tiny prompts without a GPU")
    kernel = partial(prompt_attention, interpret=jax.default_backend() != "gpu")
    jax.config.update("jax_default_matmul_precision", "highest")
    print(machine())
    rows = []
    for dtype in options.dtype:
        for name, case in (TRIAL if options.trial else CASES).items():
            call = step(case, jnp.dtype(dtype), 64 if options.trial else options.longest)
            found, runs = {}, {}
            for key, run in (("XLA", paged_attention), ("Triton", kernel)):
                found[key], runs[key] = compiled(run, call)
            seconds = take_turns(runs, rounds=options.rounds)
            expected, out = (np.asarray(x, np.float32) for x in found.values())
            error = np.max(np.abs(out - expected)) / np.max(np.abs(expected))
            ratio = seconds["XLA"] / seconds["Triton"]
            times = [f"{x * 1e3:.2f}" for x in seconds.values()]
            rows.append([f"{name}, {dtype}", *times, f"{ratio:.1f}", f"{error:.1e}"])
    print(table(["one layer", "XLA, ms", "Triton, ms", "XLA / Triton", "error"], rows))


def compiled(attention: Any, call: Any) -> tuple[jax.Array, Run]:
    """Return the result of a kernel, and a run that computes the result again."""

    def of(q: jax.Array, pool: jax.Array, ragged: Any) -> jax.Array:
        pages = replace(call.pages, pool=pool)
        return attention(replace(call, q=q, pages=pages, ragged=ragged))

    program, arrays = jax.jit(of), (call.q, call.pages.pool, call.ragged)
    return program(*arrays), settled(lambda: jax.block_until_ready(program(*arrays)))


if __name__ == "__main__":
    main()
