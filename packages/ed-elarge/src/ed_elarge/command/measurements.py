"""`elarge bench attention|decode|limits|train`: the speed of this machine, medians of rounds."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from ed_esurge.command.program import Result, show_result

from ed_elarge.command.runs import File, RunSettings

Rounds = Annotated[int, typer.Option(min=1, max=1000, help="Number of measurements.")]


def attention(
    mechanisms: Annotated[
        list[str] | None, typer.Option("--mechanism", help="A mechanism. Repeatable.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that are computed at once.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the queries.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of the keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Numbers of a head.")] = 64,
    window: Annotated[int | None, typer.Option(min=1, help="Sliding window, in tokens.")] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the arrays: float32 or bfloat16.")
    ] = "float32",
    forward: Annotated[bool, typer.Option("--forward", help="Without gradients.")] = False,
    rounds: Rounds = 5,
) -> Result:
    """Compare attention mechanisms: milliseconds of a pass, and the difference from `vanilla`."""
    import jax
    import jax.numpy as jnp
    from ed_infra.config.fields import normalize_fields
    from ed_infra.dtypes import canonical_dtype
    from ed_infra.masks import MaskInfo
    from ed_layers.attention import Mechanism, attend

    names = mechanisms or ["vanilla", "blockwise", "flash_attn2"]
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [
        jax.random.normal(key, (batch, length, n, head_dim), canonical_dtype(dtype))
        for key, n in zip(keys, (heads, kv_heads, kv_heads, heads), strict=True)
    ]
    mask = MaskInfo.full(batch, length)
    outputs: dict[str, Any] = {}
    rows = []
    show_result(f"{'mechanism':<20}{'ms':>10}{'largest difference':>22}")
    for mechanism_name in names:
        mechanism = Mechanism(name=str(normalize_fields("attn_mechanism", mechanism_name)))

        def ahead(
            q: jax.Array, k: jax.Array, v: jax.Array, mechanism: Mechanism = mechanism
        ) -> jax.Array:
            return attend(q, k, v, mask, window=window, mechanism=mechanism)[0]

        def both(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            d_out: jax.Array,
            ahead: Callable[..., jax.Array] = ahead,
        ) -> tuple[jax.Array, ...]:
            out, pull = jax.vjp(ahead, q, k, v)
            return (out, *pull(d_out))

        inputs = arrays[:3] if forward else arrays
        compiled = jax.jit(ahead if forward else both).lower(*inputs).compile()
        seconds, out = _measure_seconds(lambda: jax.block_until_ready(compiled(*inputs)), rounds)  # noqa: B023
        outputs[mechanism_name] = jax.tree.leaves(out)
        first = outputs[names[0]]
        pairs = zip(outputs[mechanism_name], first, strict=True)
        largest_difference = max(float(jnp.abs(a - b).astype("float32").max()) for a, b in pairs)
        row = {"mechanism": mechanism_name, "ms": seconds * 1e3, "difference": largest_difference}
        rows.append(row)
        show_result(f"{mechanism_name:<20}{row['ms']:>10.2f}{largest_difference:>22.2e}")
    return Result({"rows": rows})


def _measure_seconds(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """Return the median seconds of calls after a first one, and the last result."""
    result = work()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - began)
    return statistics.median(times), result


def decode(
    file: File,
    batch: Annotated[int, typer.Option(min=1, help="Sequences that are computed at once.")] = 1,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each completion.")] = 64,
    rounds: Rounds = 3,
    settings: RunSettings = None,
) -> Result:
    """Measure the engine with the model of FILE: seconds of a prompt, tokens per second, and the
    shares of the machine's limits."""
    from ed_esurge.sampling import SamplingParams

    from ed_elarge.command.limits import describe_reached_limits
    from ed_elarge.command.limits import measure_limits as limits_of_device
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize
    from ed_elarge.model import eLargeModel

    room = f"esurge.max_model_len={prompt + tokens}"
    document = with_settings(nodes.read_yaml(file), [room, *(settings or ())], nodes.parse_yaml)
    elm = eLargeModel.from_run(normalize(document))
    engine = elm.build_esurge()
    size = len(elm.build_tokenizer())
    # Every round has other prompts, so that no prompt is read from the prefix cache.
    number = iter(range(10**9))

    def measure_decoding(count: int) -> float:
        start = next(number)
        prompts: list[Any] = [
            [(31 * start + 17 * row + 7 * i) % size for i in range(prompt)] for row in range(batch)
        ]
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        began = time.perf_counter()
        engine.generate(prompts, params)
        return time.perf_counter() - began

    measure_decoding(tokens)
    first = statistics.median(measure_decoding(1) for _ in range(rounds))
    total_seconds = statistics.median(measure_decoding(tokens) for _ in range(rounds))
    rate = batch * (tokens - 1) / max(total_seconds - first, 1e-9)
    show_result(f"prompts: {batch} x {prompt} tokens in {first * 1e3:.1f} ms")
    show_result(
        f"completions: {batch} x {tokens} tokens in {total_seconds:.3f} s, {rate:,.1f} tokens/s "
        "decoded"
    )
    model: Any = engine.loop.runner.model  # without its arrays
    measured = limits_of_device(rounds)
    step = max(total_seconds - first, 1e-9) / (tokens - 1)
    shares = describe_reached_limits(measured, model, tokens=batch * prompt, first=first, step=step)
    show_result("\n".join([*shares, *measured.lines()]))
    figures = {"prompt_seconds": first, "seconds": total_seconds, "tokens_per_second": rate}
    return Result({**figures, "shares": shares, "limits": measured._asdict()})


def limits(rounds: Rounds = 5) -> Result:
    """Measure the speed of this machine's memory and of products, without a model."""
    from ed_elarge.command.limits import measure_limits

    measured = measure_limits(rounds)
    show_result("\n".join(measured.lines()))
    return Result(measured._asdict())


def train(
    file: File,
    steps: Annotated[int, typer.Option(min=2, max=100_000, help="Number of steps.")] = 10,
    settings: RunSettings = None,
) -> Result:
    """Train the model of FILE for some steps into a temporary folder, and print tokens per second.

    Nothing is saved. The first half of the steps, which contains the compilation, is not counted.
    """
    from ed_elarge.command.runs import with_one_action
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize
    from ed_elarge.model import eLargeModel

    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        trainer_options = {
            "max_training_steps": steps,
            "log_steps": 1,
            "save_directory": folder,
            "do_last_save": "false",
            "use_tensorboard": "false",
            "progress_bar_type": "none",
        }
        changes = [
            *(settings or ()),
            *(f"trainer.{key}={value}" for key, value in trainer_options.items()),
        ]
        document = with_settings(nodes.read_yaml(file), changes, nodes.parse_yaml)
        run = normalize(with_one_action(document, "train"), require_actions=True)
        eLargeModel.from_run(run).train()
        lines = (Path(folder) / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "tokens_per_second" in row]
    rates = [row["tokens_per_second"] for row in rows[len(rows) // 2 :]]
    if not rates:
        show_result("the run reported no speed: raise --steps")
        return Result({"tokens_per_second": None, "steps": 0})
    rate = statistics.median(rates)
    show_result(f"{rate:,.0f} tokens/s (median of {len(rates)} steps)")
    return Result({"tokens_per_second": rate, "steps": len(rates)})
