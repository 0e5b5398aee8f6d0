"""`elarge doctor --numerics`: the kernels of a run file, and faults that are planted in each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_elarge.command import numerics
from ed_elarge.command.main import app
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_infra.errors import ConfigError
from ed_layers.numerics import KernelUse, measure_errors

CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 512,
}
WIDE = {"hidden_size": 256, "intermediate_size": 1024}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
#: Run -> model, actions, further sections, and the kinds of its kernels.
RUNS: dict[str, tuple[dict[str, Any], list[str], dict[str, Any], set[str]]] = {
    "llama": (
        {"model_type": "llama", **WIDE},
        ["train", "serve"],
        {},
        {"attention", "product", "products"},
    ),
    "int8": (
        {"model_type": "llama", **WIDE},
        ["serve"],
        {"quantization": {"model": {"dtype": "int8"}, "kv_cache": {"dtype": "int8"}}},
        {"attention", "product", "product of codes", "products"},
    ),
    "bfloat16": (
        {"model_type": "qwen3_moe", **EXPERTS},
        ["train"],
        {"loader": {"dtype": "bf16", "param_dtype": "bf16"}},
        {"attention", "experts", "product"},
    ),
    "qwen3_next": (
        {"model_type": "qwen3_next", **EXPERTS, **DELTA},
        ["train", "serve"],
        {},
        {"attention", "experts", "product", "recurrence"},
    ),
}


def build_run(name: str, folder: Path) -> dict[str, Any]:
    """Return a run file with a small model; one that is not trained has a folder."""
    config, actions, sections, _ = RUNS[name]
    rows = {"type": "json", "data_files": "rows.jsonl"}
    values = {
        "model": {"config": {**CONFIG, **config}, "tokenizer": "tokenizer"},
        "loader": {"dtype": "fp32", "param_dtype": "fp32"},
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "esurge": {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64},
        "actions": actions,
        **sections,
    }
    if "train" in actions:
        values["mixture"] = {"informs": [rows], "pack_tokens": True, "pack_seq_length": 64}
        values["trainer"] = {"trainer_type": "sft", "total_batch_size": 2, "max_training_steps": 2}
    else:
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        values["model"] = {"name_or_path": str(folder), "tokenizer": str(folder)}
    return values


def plant_wrong_number(use: KernelUse) -> KernelUse:
    """Return a kernel with one wrong number of its result, in the last row."""

    def run(*inputs: jax.Array) -> Any:
        def change(y: jax.Array) -> jax.Array:
            return y.at[(-1,) * y.ndim].add((0.2 * jnp.max(jnp.abs(y))).astype(y.dtype))

        return jax.tree.map(change, use.run(*inputs))

    return replace(use, run=run)


def plant_wrong_gradient(use: KernelUse) -> KernelUse:
    """Return a kernel whose gradients are too large by a tenth."""

    @jax.custom_vjp
    def run(*inputs: jax.Array) -> Any:
        return use.run(*inputs)

    def pull(inputs: tuple[jax.Array, ...], cotangent: Any) -> tuple[jax.Array, ...]:
        gradients = jax.vjp(use.run, *inputs)[1](cotangent)
        return tuple((1.1 * x).astype(x.dtype) for x in gradients)

    run.defvjp(lambda *inputs: (use.run(*inputs), inputs), pull)
    return replace(use, run=run)


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_kernels_of_a_run_equal_float64_and_planted_faults_are_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ED_LAYERS_NATIVE", "1")  # also with several simulated devices
    run = normalize(Document("run.yaml", value=build_run(name, tmp_path)))
    uses = numerics.list_kernels(run)
    assert {use.title.partition(":")[0] for use in uses} >= RUNS[name][3]
    for use in uses:
        errors = measure_errors(use)
        assert errors.is_right, errors
        assert (errors.backward is not None) == use.has_gradient
        wrong = measure_errors(replace(plant_wrong_number(use), has_gradient=False))
        assert not wrong.is_right, wrong
        if use.has_gradient:
            wrong = measure_errors(plant_wrong_gradient(use))
            assert wrong.forward <= wrong.limits[0], wrong
            assert not wrong.is_right, wrong


def build_use(run: Callable[..., Any]) -> KernelUse:
    """Return a kernel that should square its input."""
    return KernelUse(
        "product: toy",
        "4 numbers",
        np.dtype("float32"),
        run,
        lambda x: x * x,
        lambda draw: [draw.normal(size=4)],
    )


@pytest.mark.parametrize("plant", [plant_wrong_number, plant_wrong_gradient])
def test_doctor_reports_a_wrong_kernel(
    plant: Callable[[KernelUse], KernelUse],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(build_run("llama", tmp_path)))
    uses = [build_use(lambda x: x * x), plant(build_use(lambda x: x * x))]
    for listed, code in ((uses[:1], 0), (uses, 1)):
        monkeypatch.setattr(numerics, "list_kernels", lambda run, listed=listed: listed)
        with pytest.raises(SystemExit) as stopped:
            app(["doctor", "--numerics", str(file), "--json"])
        result = json.loads(capsys.readouterr().out)
        assert [kernel["is_right"] for kernel in result["kernels"]] == [True, False][: len(listed)]
        assert stopped.value.code == code
    assert "product: toy differs from float64 (4 numbers)" in result["problems"][-1]


def test_doctor_needs_an_action_with_a_model(tmp_path: Path) -> None:
    run = {**build_run("llama", tmp_path), "actions": ["print"]}
    del run["trainer"]
    with pytest.raises(ConfigError, match="needs an action of the run file"):
        numerics.list_kernels(normalize(Document("run.yaml", value=run)))
