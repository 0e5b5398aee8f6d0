"""Count the launches, bytes and copies of the steps of models, compiled for a GPU without a GPU.

    python -m tools.bench.gpu_programs measure NAME…     compile the steps, and store their counts
    python -m tools.bench.gpu_programs table             the table of the stored counts

`measure` stores the counts in `docs/gpu_programs.json`, as "after" or as `--label`. A process
compiles one model: `NAME` is a key of `MODELS`; without names, all models follow each other.
`CUDA_JAX_PYTHON` names the interpreter of an environment with jax's plugin for CUDA (see
docs/plan.md). The compiler describes an H200, and cannot measure variants of matrix products.

The steps: 128 sequences decode with 1,024 cached tokens each; a step of 2,048 tokens computes
prompts of 128 sequences; a train step has four packed rows of 8,192 tokens, recomputed layers and
adapters of rank 16; "packed attention" is attention of these rows alone, forward and backward.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan.compiled import find_cuda_packages, measure_chip
from ed_elarge.plan.devices import GIB, find_device
from ed_infra.compilation.launches import ChipSpeed

from tools.workspace import ROOT

RESULTS = ROOT / "docs/gpu_programs.json"
GPU = "h200"
STEPS = ("decode step", "mixed step", "train step", "packed attention")
SEQS, CONTEXT, LONGEST, PAGE = 128, 1024, 2048, 16
#: Packed rows of a train step, and tokens of a row.
ROWS, ROW = 4, 8192
_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
#: Configurations of published models, by Hugging Face's names of the fields.
MODELS: dict[str, dict[str, object]] = {
    "llama-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "tie_word_embeddings": False,
    },
    "qwen3-next": {
        "model_type": "qwen3_next",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": False,
    },
}
#: The counts of one step.
Counts = dict[str, float]
#: Fields of a program that are added over the programs of a step.
_SUMS = ("launches", "bytes", "flops", "seconds", "host_loops", "host_branches")
_SUMS = (*_SUMS, "pool_copies", "pool_copied_bytes")


def build_run(
    folder: Path, part: str, formats: Mapping[str, str] = MappingProxyType({})
) -> dict[str, object]:
    """Return the run file of a model that trains adapters ("train"), or serves ("serve").

    Args:
        folder: contains config.json, and no weights.
        part: "train" or "serve".
        formats: formats of quantized weights ("model") and pages ("kv_cache").
    """
    run: dict[str, object] = {
        "model": {"name_or_path": str(folder), "tokenizer": str(folder)},
        "loader": {"dtype": "bf16", "param_dtype": "bf16"},
        "actions": [part],
    }
    if formats:
        run["quantization"] = {name: {"dtype": dtype} for name, dtype in formats.items()}
    if part == "serve":
        engine = {"max_num_seqs": SEQS, "max_model_len": LONGEST, "page_size": PAGE}
        return {**run, "esurge": engine}
    rows = {"type": "json", "data_files": "rows.jsonl"}
    return {
        **run,
        "base_config": {"values": {"gradient_checkpointing": "nothing_saveable"}},
        "mixture": {"informs": [rows], "pack_tokens": True, "pack_seq_length": ROW},
        "lora": {"rank": 16},
        "trainer": {"trainer_type": "sft", "total_batch_size": ROWS, "max_training_steps": 10},
    }


def measure(
    name: str, steps: Sequence[str], changes: Mapping[str, object], formats: Mapping[str, str]
) -> dict[str, Counts]:
    """Compile the steps of a model in this process, and return their counts by name.

    Args:
        name: key of `MODELS`.
        steps: some of `STEPS`.
        changes: changed fields of the configuration.
        formats: see `build_run`.
    """
    sys.path += find_cuda_packages()
    from ed_elarge.plan.programs import compile_steps

    config, device = {**MODELS[name], **changes}, find_device(GPU)
    request: dict[str, object] = {
        "target": device.get_target_config(),
        "nodes": [1, 1],
        "vocab": None,
        "length": ROW,
        "pages": {"full": SEQS * LONGEST // PAGE},
        "context": CONTEXT,
        "speed": asdict(measure_chip(device)),
    }
    counts: dict[str, Counts] = {}
    stored = {"max_position_embeddings": 131072, **config}
    if STEPS[3] in steps:
        counts[STEPS[3]] = measure_attention(config, request, measure_chip(device))
    for part, names in (("train", STEPS[2:3]), ("serve", STEPS[:2])):
        part_steps = [step for step in names if step in steps]
        if not part_steps:
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(stored), "utf-8")
            run = normalize(Document(f"{name}.yaml", value=build_run(Path(folder), part, formats)))
            programs = compile_steps(run, {**request, "parts": [part], "steps": part_steps})
        for one in programs:
            step = counts.setdefault(one["step"], dict.fromkeys(_SUMS, 0.0))
            for field in _SUMS:
                step[field] += one[field]
            step["tokens"] = one["tokens"]
            temporary = one["memory"]["temporary"]
            step["temporary"] = max(step.get("temporary", 0.0), temporary)
            step["launches_per_layer"] = step["launches"] / int(str(config["num_hidden_layers"]))
    return counts


def measure_attention(
    config: Mapping[str, object], request: Mapping[str, object], speed: ChipSpeed
) -> Counts:
    """Compile attention of packed rows, forward and backward, and return its counts.

    Args:
        config: configuration of the model, for its heads.
        request: see `ed_elarge.plan.programs.compile_steps`.
        speed: speed of the device.
    """
    import jax
    import jax.numpy as jnp
    from ed_elarge.plan.programs import DescribedStep, count_step, describe_devices
    from ed_infra.config import EasyDeLBaseConfig
    from ed_infra.masks import MaskInfo
    from ed_infra.sharding.mesh import create_mesh
    from ed_layers.attention import Mechanism, attend

    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    heads, groups = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    dim = sizes.get("head_dim", sizes["hidden_size"] // heads)
    model = EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 1, 1))
    names, dcn = model.sharding_axis_names, model.sharding_dcn_axis_dims
    mesh = create_mesh((1, 1, 1, 1, 1), names, dcn, devices=describe_devices(request))
    model.set_model_mesh(mesh)
    mechanism = Mechanism.resolve(model.seal())

    def attend_rows(q, k, v, segments, d_out):
        mask = MaskInfo.from_segments(segments)

        def attend_keys(q, k, v):
            return attend(q, k, v, mask, mechanism=mechanism)[0]

        _, pull = jax.vjp(attend_keys, q, k, v)
        return pull(d_out)

    place = jax.NamedSharding(mesh, jax.P())
    q, k = (
        jax.ShapeDtypeStruct((ROWS, ROW, n, dim), jnp.bfloat16, sharding=place)
        for n in (heads, groups)
    )
    segments = jax.ShapeDtypeStruct((ROWS, ROW), jnp.int32, sharding=place)
    lowered = cast(Any, jax.jit(attend_rows).lower(q, k, k, segments, q))
    step = DescribedStep("packed attention", "attention", ROWS * ROW, ROWS, lowered)
    program = count_step(step, lowered.compile(), 0.0, speed, tpu=False)
    counts: Counts = {field: program[field] for field in _SUMS}
    temporary = program["memory"]["temporary"]
    per_layer = {"launches_per_layer": program["launches"]}
    return {**counts, **per_layer, "tokens": program["tokens"], "temporary": temporary}


def measure_in_child(
    name: str,
    steps: Sequence[str],
    minutes: float,
    changes: Mapping[str, object] | None = None,
    formats: Mapping[str, str] | None = None,
) -> dict[str, Counts]:
    """Measure a model in another process, whose compiler sees only a described GPU.

    Args:
        name, steps, changes, formats: see `measure`.
        minutes: time limit.
    """
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "ED_LAYERS_NATIVE": "0",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0",
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "counts.json"
        words = ["-m", "tools.bench.gpu_programs", "child", name, "--output", str(result)]
        words += ["--changes", json.dumps(changes or {}), "--steps", *steps]
        words += ["--formats", json.dumps(formats or {})]
        subprocess.run(
            [sys.executable, *words], env=environment, cwd=ROOT, check=True, timeout=60 * minutes
        )
        return json.loads(result.read_text("utf-8"))


def read_results() -> dict[str, dict[str, dict[str, Counts]]]:
    """Return the stored counts: label -> model -> step -> count."""
    return json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}


def write_table() -> str:
    """Return the table of all stored counts, before and after where both exist."""
    results = read_results()
    rows = [
        "| model, step | launches per layer | waits | pool copies | GiB | temporary GiB | ms | "
        "tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(name for models in results.values() for name in models):
        for step in STEPS:
            columns: list[list[str]] = []
            for label in ("before", "after"):
                one = results.get(label, {}).get(name, {}).get(step)
                if one is not None:
                    columns.append(format_counts(one))
            if columns:
                cells = [" → ".join(dict.fromkeys(cell)) for cell in zip(*columns, strict=True)]
                rows.append(f"| {name}: {step.removesuffix(' step')} | {' | '.join(cells)} |")
    return "\n".join(rows)


def format_counts(one: Mapping[str, float]) -> list[str]:
    """Return the cells of a step."""
    return [
        f"{one['launches_per_layer']:.1f}",
        f"{one['host_loops'] + one['host_branches']:,.0f}",
        f"{one['pool_copies']:,.0f}",
        f"{one['bytes'] / GIB:,.1f}",
        f"{one['temporary'] / GIB:,.2f}",
        f"{one['seconds'] * 1e3:,.2f}",
        f"{one['tokens'] / one['seconds']:,.0f}",
    ]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("measure", "table", "child"))
    parser.add_argument("names", nargs="*", help="models; none = all")
    parser.add_argument("--label", choices=("before", "after"), default="after")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--changes", type=json.loads, default={}, help="fields of the config: JSON")
    parser.add_argument(
        "--formats", type=json.loads, default={}, help="of weights and pages: JSON, see build_run"
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="for one model")
    parser.add_argument("--output", type=Path, help="of child: the file of the counts")
    arguments = parser.parse_args()
    if arguments.command == "child":
        options = arguments.steps, arguments.changes, arguments.formats
        counts = measure(arguments.names[0], *options)
        arguments.output.write_text(json.dumps(counts), "utf-8")
        return
    for name in (arguments.names or MODELS) if arguments.command == "measure" else ():
        start = time.perf_counter()
        changes, formats = arguments.changes, arguments.formats
        counts = measure_in_child(name, arguments.steps, arguments.minutes, changes, formats)
        results, layers = read_results(), changes.get("num_hidden_layers")
        title = name if layers is None else f"{name}, {layers} layers"
        names = {"model": "weights", "kv_cache": "pages"}
        title += "".join(f", {dtype} {names[part]}" for part, dtype in formats.items())
        results.setdefault(arguments.label, {}).setdefault(title, {}).update(counts)
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", "utf-8")
        print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(write_table())


if __name__ == "__main__":
    main()
