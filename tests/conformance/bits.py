"""Compare the bits of the log-probabilities of one model in every way that computes them.

    python -m tests.conformance.bits [MODEL_TYPE ...] [--dtypes float32 bfloat16] [--missing]

Each family has a tiny model of the conformance suite with random weights and `batch_invariant`. The
reference is the engine with each request alone, whole prompts and a cold cache. The cells compare
the reference with the engine under other conditions, with a whole forward pass (of a trainer) and
with `generate`, on one device and on meshes. A cell is `equal`, the largest difference of a
log-probability, or `refused` if an error refuses the condition. docs/bits.json stores the cells of
each family; `tools.bits_table` writes the table of docs/native.md. `--missing` computes the cells
that a stored row lacks.
"""

from __future__ import annotations

import gc
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_infra import registry
from ed_infra.config.subclass import known_names
from ed_infra.enums import TaskType
from ed_infra.errors import EasyDeLError
from ed_infra.sharding import placement
from flax import nnx

from tests.conformance.cases import subjects
from tools.bench.measure import command_line
from tools.bits_table import REFUSED, read, store

DTYPES = ("float32", "bfloat16")
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_model_len": 64,
    "silent_mode": True,
    "compile_runner": False,
}
LOGGED: dict[str, Any] = {
    "logprobs": 0,
    "prompt_logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}
COLD: dict[str, Any] = {"enable_prefix_caching": False}
#: Condition of the engine -> changed options.
ENGINE: dict[str, dict[str, Any]] = {
    "batch, warm prefix": {},
    "chunks": {"long_prefill_token_threshold": 3},
    "preempted": {"num_pages": 8, **COLD},
    "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
ONE_DEVICE = (1, 1, 1, 1, 1)
#: Mesh -> devices along (dp, fsdp, ep, tp, sp).
DIMS = {"dp": (2, 1, 1, 1, 1), "fsdp": (1, 2, 1, 1, 1), "tp": (1, 1, 1, 2, 1)}
NEW = 10
#: The log-probability of each token of a row after the first, float32.
Bits = list[np.ndarray]


def create(
    model_type: str,
    dtype: str,
    dims: Sequence[int] = ONE_DEVICE,
    weights: nnx.State | None = None,
    **fields: Any,
) -> Any:
    """Create the tiny model of a family on a mesh, with given weights or random ones.

    Random weights of two meshes can differ in the last bit, because XLA's logarithms depend on the
    mesh.
    """
    subject = next(s for s in subjects(model_type) if s.task == TaskType.CAUSAL_LM)
    config_class = registry.get_config(model_type)
    own = {name: v for name, v in subject.fields.items() if name in known_names(config_class)}
    own |= {"sharding_axis_dims": dims, "batch_invariant": True, **fields}
    config = config_class(**own)
    kind = jnp.dtype(dtype)
    if weights is None:
        return subject.module_class.create(config, seed=0, dtype=kind, param_dtype=kind)
    empty = nnx.eval_shape(lambda: subject.module_class(config, kind, kind, rngs=nnx.Rngs(0)))
    filled = nnx.merge(nnx.graphdef(empty), jax.tree.map(np.asarray, weights))
    return placement.shard(filled, config)


def prompts() -> list[list[int]]:
    """Return prompts of different lengths with a common beginning."""
    rng = np.random.default_rng(0)
    common = rng.integers(3, 150, 9).tolist()
    return [[*common, *rng.integers(3, 150, 3 + 2 * i).tolist()] for i in range(4)]


def of_engine(
    model: Any,
    asked: Sequence[list[int]],
    *,
    alone: bool = False,
    greedy: bool = False,
    new: int = NEW,
    **more: Any,
) -> tuple[list[list[int]], Bits]:
    """Return rows of prompts and sampled tokens, and their log-probabilities."""
    params = [
        SamplingParams(temperature=0.0 if greedy else 1.0, seed=i, max_tokens=new, **LOGGED)
        for i in range(len(asked))
    ]
    engine = eSurge(model, **OPTIONS | more)
    try:
        if alone:
            outputs = [engine.generate([p], s)[0] for p, s in zip(asked, params, strict=True)]
        else:
            engine.generate([*asked], params)  # warms the prefix cache
            outputs = engine.generate([*asked], params)
    finally:
        engine.terminate()
    rows, bits = [], []
    for output in outputs:
        done = output.outputs[0]
        row = [*output.prompt_token_ids, *done.token_ids]
        known = [*(output.prompt_logprobs or [])[1:], *(done.logprobs or [])]
        bits.append(
            np.array([e[t].logprob for t, e in zip(row[1:], known, strict=True)], np.float32)
        )
        rows.append(row)
    return rows, bits


def of_forward(model: Any, rows: Sequence[list[int]], together: int) -> Bits:
    """Return the log-probabilities of a whole forward pass over padded rows."""
    graphdef, state = nnx.split(model)
    width = max(map(len, rows))

    @jax.jit
    def scored(state: Any, ids: jax.Array, mask: jax.Array) -> jax.Array:
        from ed_layers.losses import token_logprobs

        model = nnx.merge(graphdef, state)
        hidden = model(input_ids=ids, attention_mask=mask, logits_at="none").last_hidden_state
        flat = hidden[:, :-1].reshape(-1, hidden.shape[-1])
        found, _ = token_logprobs(flat, model.head(), ids[:, 1:].reshape(-1))
        return found.reshape(ids.shape[0], -1)

    bits: Bits = []
    for at in range(0, len(rows), together):
        part = rows[at : at + together]
        ids = np.array([[*row, *[0] * (width - len(row))] for row in part], np.int32)
        mask = np.array([np.arange(width) < len(row) for row in part], np.int32)
        values = np.asarray(scored(state, ids, mask))
        bits += [v[: len(row) - 1] for row, v in zip(part, values, strict=True)]
    return bits


def of_generate(model: Any, asked: Sequence[list[int]], together: int) -> tuple[Any, Bits]:
    """Return rows of prompts of one length and greedy tokens, and the tokens' log-probabilities."""
    rows, bits = [], []
    for at in range(0, len(asked), together):
        made = model.generate(
            np.array(asked[at : at + together], np.int32),
            max_new_tokens=NEW,
            do_sample=False,
            output_logprobs=True,
            eos_token_id=None,
        )
        rows += np.asarray(made.sequences).tolist()
        bits += [*np.asarray(made.logprobs, np.float32)]
    return rows, bits


def compared(one: tuple[Any, Bits], other: tuple[Any, Bits]) -> str:
    """Return `equal`, the largest difference of log-probabilities, or that tokens differ."""
    if one[0] != other[0]:
        return "other tokens"
    worst = max(float(np.abs(a - b).max()) for a, b in zip(one[1], other[1], strict=True))
    return "equal" if worst == 0 else f"{worst:.0e}"


def cells_of(
    model_type: str, dtype: str, stored: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the cells of one row; `refused` alone if the family has no fixed order.

    Args:
        model_type, dtype: the row.
        stored: cells that are not computed again.
    """
    cells: dict[str, str] = dict(stored or {})

    def compare(name: str, compute: Callable[[], tuple[Any, Bits]], other: Any) -> None:
        if name in cells:
            return
        try:
            cells[name] = compared(compute(), other)
        except EasyDeLError:
            cells[name] = REFUSED

    model, asked = create(model_type, dtype), prompts()
    try:
        alone = of_engine(model, asked, alone=True, **COLD)
    except EasyDeLError as error:
        return {REFUSED: places(error)}
    for name, changes in ENGINE.items():
        compare(name, lambda changes=changes: of_engine(model, asked, **changes), alone)
    if stored:  # rows lack only cells of the engine
        return {name: cells[name] for name in (*ENGINE, *(n for n in cells if n not in ENGINE))}
    rows = alone[0]
    for together in (1, 4):
        compare(f"forward {together}", lambda n=together: (rows, of_forward(model, rows, n)), alone)
    equal_length = [prompt[:12] for prompt in asked]
    greedy = of_engine(model, equal_length, alone=True, greedy=True, **COLD)
    greedy = greedy[0], [bits[-NEW:] for bits in greedy[1]]
    for together in (1, 4):
        compare(
            f"generate {together}", lambda n=together: of_generate(model, equal_length, n), greedy
        )
    for name, dims in DIMS.items():
        there = create(model_type, dtype, dims, nnx.state(model))
        compare(f"engine {name}", lambda there=there: of_engine(there, asked), alone)
        compare(f"forward {name}", lambda there=there: (rows, of_forward(there, rows, 4)), alone)
        compare(f"generate {name}", lambda there=there: of_generate(there, equal_length, 4), greedy)
    return cells


def places(error: EasyDeLError) -> str:
    """Return the places of sums without a fixed order, from the error that refuses a model."""
    found = re.search(r"not compute them: (.*?)\. Set ", str(error))
    return found[1] if found else str(error).split("; ")[0]


def main() -> None:
    known = dict.fromkeys(s.model_type for s in subjects() if s.task == TaskType.CAUSAL_LM)
    parser = command_line("tests.conformance.bits", __doc__)
    parser.add_argument("families", nargs="*", default=[*known])
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--missing", action="store_true", help="compute only missing cells")
    args = parser.parse_args()
    gc.disable()  # a collection reads the many objects of traces
    jax.config.update("jax_num_cpu_devices", 2)
    with tempfile.TemporaryDirectory() as programs:  # engines of one model share programs
        jax.config.update("jax_compilation_cache_dir", programs)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        for dtype in args.dtypes:
            for model_type in args.families:
                stored = read().get(model_type, {}).get(dtype, {}) if args.missing else {}
                if REFUSED not in stored and not ENGINE.keys() <= stored.keys():
                    report(model_type, dtype, stored)


def report(model_type: str, dtype: str, stored: Mapping[str, str]) -> None:
    """Compute, store and print one row; see `cells_of`."""
    began = time.monotonic()
    cells = cells_of(model_type, dtype, stored)
    store(model_type, dtype, cells)
    other = {name: cell for name, cell in cells.items() if cell != "equal"}
    seconds = time.monotonic() - began
    print(f"{model_type} {dtype}: {other or 'equal'} ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
