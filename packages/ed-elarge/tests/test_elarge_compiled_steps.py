"""`elarge plan --compile`: steps that are compiled for devices which this machine does not have.

The nightly tests compile for GPUs. They need jax's plugin for CUDA, in this environment or in the
one whose interpreter CUDA_JAX_PYTHON names; `elarge plan --compile gpu` states the installation.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from ed_elarge.config.normalize import normalize
from ed_elarge.errors import Document
from ed_elarge.plan import compiled, devices, report
from ed_elarge.plan.estimate import RunPlan, plan_run
from ed_elarge.plan.page import render_page
from ed_infra.compilation.launches import ChipSpeed
from ed_infra.errors import ConfigError

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "vocab_size": 512,
}
GPUS = [name for name, one in devices.read_devices().items() if one.kind == "gpu"]


#: What a child process reads of a model of this size.
SHAPES: dict[str, Any] = {
    "tensors": [
        {"name": name, "shape": shape, "axes": axes, "dtype": "", "layers": layers, "codes": None}
        for name, shape, axes, layers in (
            ("model.embed_tokens.embedding", [512, 64], ["vocab", "embed"], 1),
            ("model.layers.*.mlp.up_proj.kernel", [64, 96], ["embed", "mlp"], 4),
            ("lm_head.kernel", [64, 512], ["embed", "vocab"], 1),
        )
    ],
    "caches": [[4, 8, 8, None]] * 4,
    "states": [],
    "config": {key: value for key, value in SMALL.items() if key != "model_type"},
}


def plan_of(monkeypatch: pytest.MonkeyPatch, hardware: str, *actions: str) -> RunPlan:
    """Return the plan of a small model without its model class."""
    monkeypatch.setattr("ed_elarge.plan.shapes._load_shapes", lambda *_: SHAPES)
    run = normalize(Document("run.yaml", value=build_run(*actions)))
    return plan_run(run, devices.parse_hardware(None, hardware))


def build_run(*actions: str) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": {"config": SMALL, "tokenizer": "tokenizer"},
        "loader": {"dtype": "bf16", "param_dtype": "bf16"},
        "sharding": {"axis_dims": [1, -1, 1, 1, 1]},
        "esurge": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "page_size": 16},
        "actions": [*actions],
    }
    if "train" in actions:
        informs = [{"type": "json", "data_files": "rows.jsonl"}]
        values["mixture"] = {"informs": informs, "pack_tokens": True, "pack_seq_length": 64}
        values["trainer"] = {"trainer_type": "sft", "total_batch_size": 8, "max_training_steps": 2}
    return values


def count_program(step: str, program: str, seconds: float, **changes: Any) -> dict[str, Any]:
    """Return what a child process counts of a program."""
    row = {"launches": 40.0, "bytes": 2.0**30, "flops": 1e12, "seconds": seconds}
    counts = {"host_loops": 4.0, "host_branches": 1.0, "pool_copies": 2.0}
    return {
        "step": step,
        "program": program,
        "tokens": 8,
        "seqs": 8,
        "memory": {"arguments": 2**30, "outputs": 2**29, "aliased": 2**29, "temporary": 2**28},
        "collectives": {},
        "launches_at_most": 50.0,
        "pool_copied_bytes": 9.0,
        "operations": [{"operation": "copies", "sent_bytes": 0.0, **row}],
        **row,
        **counts,
        **changes,
    }


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_description_for_the_compiler(name: str):
    text = devices.find_device(name).get_target_config()
    assert text.count("{") == text.count("}")
    device = devices.find_device(name)
    assert f"memory_bandwidth: {int(device.bandwidth)} " in text
    assert 7 <= int(text.partition("major: ")[2].split()[0]) <= 12
    assert compiled.measure_chip(device).get_peak(16) == device.bf16


def test_tpu_has_no_description_for_the_compiler_of_gpus():
    with pytest.raises(ConfigError, match="--compile tpu"):
        devices.find_device("v5e").get_target_config()


@pytest.mark.parametrize(
    ("compiler", "hardware", "words"),
    [
        ("gcc", "H200", "unknown compiler"),
        ("tpu:v5e", "H200", "unknown compiler"),
        ("cpu", "H200", "does not train"),
        ("tpu", "H200", "needs a TPU"),
        ("gpu", "v5e", "is no GPU"),
        ("gpu:v6e", "H200", "is no GPU"),
        ("gpu:H900", "H200", "unknown device"),
        ("gpu", "9xH200", "do not fill nodes of 8"),
    ],
)
def test_compiler_that_does_not_fit_the_run_is_an_error(
    compiler: str, hardware: str, words: str, monkeypatch: pytest.MonkeyPatch
):
    plan = plan_of(monkeypatch, hardware, "serve")
    with pytest.raises(ConfigError, match=words):
        compiled.compare_with_compiler(plan, compiler, 10.0)


def write_interpreter(folder: Path, *answer: object) -> str:
    """Write a program that prints what an interpreter answers."""
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nprint({json.dumps(answer)!r})\n")
    path.chmod(0o755)
    return str(path)


def test_missing_plugin_for_cuda_is_an_error_that_names_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    jax = compiled.version("jax")
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    monkeypatch.setattr(compiled, "_get_version", lambda name: "")
    monkeypatch.delenv(compiled.CUDA_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=rf"pip install 'jax\[cuda13\]=={jax}'"):
        compiled.find_cuda_packages()
    monkeypatch.setenv(compiled.CUDA_VARIABLE, str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="no interpreter of Python"):
        compiled.find_cuda_packages()
    for answer in (("a", minor, {}), ("a", "2.7", {"jax-cuda13-pjrt": jax})):
        monkeypatch.setenv(compiled.CUDA_VARIABLE, write_interpreter(tmp_path, *answer))
        with pytest.raises(ConfigError, match=f"this environment has Python {minor} and jax {jax}"):
            compiled.find_cuda_packages()
    right = write_interpreter(tmp_path, "folder", minor, {"jax-cuda13-pjrt": jax})
    monkeypatch.setenv(compiled.CUDA_VARIABLE, right)
    assert compiled.find_cuda_packages() == ["folder"]
    monkeypatch.setattr(compiled, "_get_version", lambda name: jax)
    assert compiled.find_cuda_packages() == []


def test_steps_are_the_sums_of_their_programs(monkeypatch: pytest.MonkeyPatch):
    plan: RunPlan = plan_of(monkeypatch, "4xH200", "train", "serve")
    assert plan.training is not None and plan.serving is not None
    asked: dict[str, Any] = {}
    programs = [
        count_program("train step", "train", 0.5, tokens=512, host_loops=0.0),
        count_program("decode step", "forward", 0.002),
        count_program("decode step", "sample", 0.001, memory={"arguments": 2, "temporary": 2**29}),
    ]
    programs[2]["memory"] |= {"outputs": 1, "aliased": 0}

    def answer(run: Any, question: str, **details: Any) -> Any:
        asked.update(details, question=question)
        return {"programs": programs}

    monkeypatch.setattr("ed_elarge.plan.child.ask_child", answer)
    monkeypatch.setattr(compiled, "find_cuda_packages", lambda: ["folder"])
    result = compiled.compare_with_compiler(plan, "gpu:h100", 10.0, 512)
    assert (asked["question"], asked["parts"], asked["nodes"]) == (
        "programs",
        ["train", "serve"],
        [1, 4],
    )
    assert "NVIDIA H100 SXM" in asked["target"] and asked["packages"] == ["folder"]
    assert ChipSpeed(**asked["speed"]).bandwidth == devices.find_device("h100").bandwidth
    train, decode = result["steps"]
    assert train["tokens"] == 8 * 64
    peak = devices.find_device("h100").bf16
    assert train["mfu"] == pytest.approx(plan.training.time.model_flops / 0.5 / peak)
    assert decode["seconds"] == pytest.approx(0.003)
    assert decode["launches"] == 80 and decode["launches_per_layer"] == 20
    assert decode["tokens_per_second"] == pytest.approx(8 / 0.003)
    assert decode["memory"] == {
        "arguments": 2**30,
        "outputs": 2**29,
        "aliased": 2**29,
        "temporary": 2**29,
    }
    assert [row["launches"] for row in decode["operations"]] == [80]
    values = report.to_dict(plan, result)
    text = "\n".join(report.lines(values))
    assert "compiled for NVIDIA H100 SXM (described GPUs)" in text
    assert "decode step: 8 tokens of 8 sequences, 512 tokens of each in the cache" in text
    assert "launches: 80 (20.0 per layer), 100 with the longest branches" in text
    assert "waits for the host: 8 loops, 2 branches; copies of the page pool: 4" in text
    assert "at least 3.000 ms, at most 2,667 tokens/s (each launch alone" in text
    assert "decode step: 3.000 ms" in render_page(values)


def test_compiler_option_names_the_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from ed_elarge.command.main import app

    plan_of(monkeypatch, "H100", "serve")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(build_run("serve")))
    seen: list[Any] = []

    def compare(plan: RunPlan, *rest: Any) -> dict[str, Any]:
        seen.extend((plan.hardware.text, *rest))
        return {"backend": "gpu", "device": "GPU", "context": 1, "rows": [], "steps": []}

    monkeypatch.setattr(compiled, "compare_with_compiler", compare)
    with pytest.raises(SystemExit) as stopped:
        app(["plan", str(file), "--compile", "gpu:L40S", "--context", "77", "--json"])
    assert stopped.value.code == 0
    assert seen == ["1xl40s", "gpu:L40S", 600.0, 77]
    assert json.loads(capsys.readouterr().out)["compiled"]["backend"] == "gpu"


# ---- compiled programs


def has_cuda_plugin() -> bool:
    """Return whether steps can be compiled for GPUs here."""
    try:
        compiled.find_cuda_packages()
    except ConfigError:
        return False
    return True


NEEDS_PLUGIN = pytest.mark.skipif(
    not os.environ.get(compiled.CUDA_VARIABLE) and not has_cuda_plugin(),
    reason="jax's plugin for CUDA is not installed (CUDA_JAX_PYTHON)",
)
