"""Compare the bits of log-probabilities of one model under different conditions.

    python -m tools.bench.bits [MODEL_TYPE ...] [--dtypes float32 bfloat16]

Each family has a tiny model of the conformance suite with random weights. The engine runs with
`batch_invariant`, and its reference is each request alone, with whole prompts and a cold cache. The
other columns compare a whole forward pass (of a trainer, compiled) and `generate` with themselves
in another batch, and with the engine. A cell is `equal`, the largest difference of a
log-probability, or the reason why the condition is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import EasyDeLError
from flax import nnx

from tests.conformance.cases import subjects
from tools.bench.measure import command_line

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "gpt_oss")
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_model_len": 64,
    "batch_invariant": True,
    "silent_mode": True,
    "compile_runner": False,
}
LOGGED: dict[str, Any] = {
    "logprobs": 0,
    "prompt_logprobs": 0,
    "ignore_eos": True,
    "detokenize": False,
}
#: Condition of the engine -> changed options.
ENGINE: dict[str, dict[str, Any]] = {
    "batch, warm prefix": {},
    "chunks": {"long_prefill_token_threshold": 3},
    "preempted": {"num_pages": 8, "enable_prefix_caching": False},
    "speculative": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}
#: Mesh -> devices along (dp, fsdp, ep, tp, sp).
MESHES = {"dp": (2, 1, 1, 1, 1), "fsdp": (1, 2, 1, 1, 1), "tp": (1, 1, 1, 2, 1)}
LENGTH, NEW = 24, 10
Bits = list[np.ndarray]


def create(model_type: str, dtype: str, dims: Sequence[int] = (1, 1, 1, 1, 1)) -> Any:
    """Create the tiny model of a family on a mesh; equal seeds create equal weights."""
    subject = next(s for s in subjects(model_type) if s.task == TaskType.CAUSAL_LM)
    config = registry.get_config(model_type)(**subject.fields, sharding_axis_dims=dims)
    kind = jnp.dtype(dtype)
    return subject.module_class.create(config, seed=0, dtype=kind, param_dtype=kind)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    common = rng.integers(3, 150, 9).tolist()
    return [[*common, *rng.integers(3, 150, 3 + 2 * i).tolist()] for i in range(4)]


def of_engine(model: Any, asked: Sequence[list[int]], *, alone: bool = False, **more: Any) -> Bits:
    """Return the log-probabilities of prompt and sampled tokens of each request."""
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=NEW, **LOGGED) for i in range(len(asked))
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
    found = []
    for output in outputs:
        tokens = output.outputs[0].token_ids
        known = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        ids = [*output.prompt_token_ids[1:], *tokens]
        pairs = zip(ids, known, strict=True)
        found.append(np.array([(t, entry[t].logprob) for t, entry in pairs if entry], np.float64))
    return found


def of_forward(model: Any, rows: Sequence[np.ndarray], together: int) -> Bits:
    """Return the log-probabilities of a whole forward pass of rows of equal length."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def scored(state: Any, ids: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, state)(input_ids=ids).logits.astype(jnp.float32)
        logprobs = jax.nn.log_softmax(logits[:, :-1])
        return jnp.take_along_axis(logprobs, ids[:, 1:, None], -1)[..., 0]

    found: Bits = []
    for at in range(0, len(rows), together):
        ids = np.stack(rows[at : at + together]).astype(np.int32)
        values = np.asarray(scored(state, ids))
        found += [
            np.stack([i[1:], v], -1).astype(np.float64) for i, v in zip(ids, values, strict=True)
        ]
    return found


def of_generate(model: Any, rows: Sequence[np.ndarray], together: int) -> Bits:
    """Return tokens and log-probabilities of `generate` for rows of equal length."""
    found: Bits = []
    for at in range(0, len(rows), together):
        ids = np.stack(rows[at : at + together]).astype(np.int32)
        made = model.generate(
            ids, max_new_tokens=NEW, do_sample=False, output_logprobs=True, eos_token_id=None
        )
        sequences, logprobs = np.asarray(made.sequences), np.asarray(made.logprobs)
        for row, values in zip(sequences[:, ids.shape[1] :], logprobs, strict=True):
            found.append(np.stack([row, values], -1).astype(np.float64))
    return found


def compared(one: Bits, other: Bits) -> str:
    """Return `equal`, the largest difference of log-probabilities, or that tokens differ."""
    if any(not np.array_equal(a[:, 0], b[:, 0]) for a, b in zip(one, other, strict=True)):
        return "other tokens"
    worst = max(float(np.abs(a - b).max()) for a, b in zip(one, other, strict=True))
    return "equal" if worst == 0 else f"{worst:.0e}"


def tried(compute: Callable[[], Bits], reference: Bits) -> str:
    try:
        return compared(compute(), reference)
    except EasyDeLError as error:
        return f"refused: {str(error)[:40]}"


def conditions(model_type: str, dtype: str) -> dict[str, str]:
    """Return the cells of one row."""
    model, asked = create(model_type, dtype), prompts()
    rng = np.random.default_rng(1)
    rows = [rng.integers(3, 150, LENGTH) for _ in range(4)]
    forward = of_forward(model, rows, 1)
    cells = {
        "trainer: batch of 4": compared(of_forward(model, rows, 4), forward),
        "generate: batch of 4": compared(of_generate(model, rows, 4), of_generate(model, rows, 1)),
    }
    try:
        alone = of_engine(model, asked, alone=True, enable_prefix_caching=False)
    except EasyDeLError as error:
        return {"engine": f"refused: {str(error)[:40]}", **cells}
    for name, changes in ENGINE.items():
        cells[name] = tried(lambda changes=changes: of_engine(model, asked, **changes), alone)
    for name, dims in MESHES.items():
        cells[name] = tried(
            lambda dims=dims: of_engine(create(model_type, dtype, dims), asked, **OPTIONS), alone
        )
    whole = [a[:, 0].astype(np.int64) for a in alone]
    lines = [np.array([p[0], *ids]) for p, ids in zip(asked, whole, strict=True)]
    of_trainer = [of_forward(model, [line], 1)[0] for line in lines]
    cells["trainer against engine"] = compared(of_trainer, alone)
    return cells


def main() -> None:
    parser = command_line("bits", __doc__)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"])
    args = parser.parse_args()
    for model_type in args.families:
        for dtype in args.dtypes:
            cells = conditions(model_type, dtype)
            print(f"{model_type} {dtype}: {cells}", flush=True)


if __name__ == "__main__":
    main()
