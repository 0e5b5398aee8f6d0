"""The comparison of a plan with the programs that a child process compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from ed_infra.compilation.launches import ChipSpeed
from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.plan import child, training
from ed_elarge.plan.buffers import ACCELERATOR, CPU
from ed_elarge.plan.devices import DeviceKind, Hardware, find_device
from ed_elarge.plan.estimate import RunPlan

#: Compilers of `--compile`.
_COMPILERS = ("cpu", "tpu", "gpu")
#: The interpreter of an environment with jax's plugin for CUDA.
CUDA_VARIABLE = "CUDA_JAX_PYTHON"
#: Distributions of the plugin.
_PLUGINS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
#: Seconds of a launch without work: the distance of two short kernels of one stream.
LAUNCH_SECONDS = {"gpu": 2e-6, "tpu": 0.0}
#: Tokens of each sequence in the cache during a compiled step, by default.
_CONTEXT = 1024
#: Without a GPU, the compiler cannot measure the variants of a kernel.
_GPU_FLAGS = ("--xla_gpu_autotune_level=0",)


def compare_with_compiler(
    plan: RunPlan, compiler: str, time_limit: float, context: int = _CONTEXT
) -> dict[str, Any]:
    """Compile the steps of a run, and compare the train step's buffers with the prediction.

    Args:
        plan: a plan.
        compiler: "cpu": the train step for simulated CPU devices; "tpu": all steps for the TPU
            slice of the plan, by libtpu; "gpu": all steps for the GPUs of the plan; "gpu:NAME": for
            as many GPUs of another kind.
        time_limit: seconds, after which the compiler is stopped.
        context: tokens of each sequence in the cache during a step of the engine.

    Returns:
        `rows`: name, bytes predicted, bytes compiled, and relative error of the arguments, the
        temporary buffers, and their sum; empty without training. `programs`: the counts of each
        program (`ed_infra.compilation.launches.ProgramReport`) with its memory. `steps`: sums of
        the programs of each step.

    Raises:
        ConfigError: the run does not train, the compiler is unknown or absent, or it failed.
    """
    kind, _, name = compiler.partition(":")
    if kind not in _COMPILERS or (name and kind != "gpu"):
        raise unknown_name("compiler", compiler, (*_COMPILERS, "gpu:NAME"))
    if kind == "cpu":
        return {"backend": "cpu", "device": "CPU", **_compare_on_cpu(plan, time_limit)}
    hardware = replace(plan.hardware, device=find_device(name)) if name else plan.hardware
    details = _describe_tpu(hardware) if kind == "tpu" else _describe_gpu(hardware)
    part, served = plan.training, plan.serving
    parts = [word for word, one in (("train", part), ("serve", served)) if one is not None]
    programs = child.ask_child(
        plan.run,
        "programs",
        devices=hardware.count,
        time_limit=time_limit,
        accelerator_flags=_GPU_FLAGS if kind == "gpu" else (),
        parts=parts,
        vocab=plan.shapes.vocabulary,
        length=0 if part is None else part.settings.length,
        pages={} if served is None else served.engine.pages,
        context=context,
        speed=asdict(measure_chip(hardware.device)),
        **details,
    )["programs"]
    trained = [one["memory"] for one in programs if one["step"] == "train step"]
    return {
        "backend": kind,
        "device": hardware.device.title,
        "context": context,
        "rows": _compare_train_step(plan, trained[0], kind) if trained else [],
        "programs": programs,
        "steps": summarize_steps(plan, programs, hardware.device),
    }


def _compare_on_cpu(plan: RunPlan, time_limit: float) -> dict[str, Any]:
    part = plan.training
    if part is None:
        raise ConfigError(
            "--compile cpu compiles a train step, and this run does not train: use --compile gpu "
            "or tpu, which also compile the steps of the engine"
        )
    compiled_bytes = child.ask_child(
        plan.run,
        "train",
        devices=plan.hardware.count,
        time_limit=time_limit,
        vocab=plan.shapes.vocabulary,
        length=part.settings.length,
    )
    return {"rows": _compare_train_step(plan, compiled_bytes, "cpu")}


def _compare_train_step(
    plan: RunPlan, compiled_bytes: Mapping[str, int], kind: str
) -> list[dict[str, Any]]:
    part = plan.training
    assert part is not None, "the train step was compiled"
    backend = CPU if kind == "cpu" else ACCELERATOR
    step = training.step(part.settings, plan.shapes, part.mesh, backend)
    sizes = {
        "arguments": (step.arguments, compiled_bytes["arguments"]),
        "temporary buffers": (step.temporary, compiled_bytes["temporary"]),
        "sum": (
            step.arguments + step.temporary,
            compiled_bytes["arguments"] + compiled_bytes["temporary"],
        ),
    }
    return [
        {"name": name, "predicted": ours, "compiled": theirs, "error": ours / theirs - 1}
        for name, (ours, theirs) in sizes.items()
    ]


def measure_chip(device: DeviceKind) -> ChipSpeed:
    """Return the speed of a device, for the bound of a compiled program."""
    is_torus = device.links == "torus"
    return ChipSpeed(
        bandwidth=device.bandwidth,
        peak16=device.bf16,
        peak8=device.int8,
        launch=LAUNCH_SECONDS[device.kind],
        # An axis of a torus uses both directions of one dimension.
        link=2 * device.link if is_torus else device.link,
        network=device.network,
        node=0 if is_torus else device.node,
    )


def summarize_steps(
    plan: RunPlan, programs: list[dict[str, Any]], device: DeviceKind
) -> list[dict[str, Any]]:
    """Return the sums of the programs of each step, with tokens/s and MFU.

    Args:
        plan: the plan.
        programs: the programs of `ed_elarge.plan.programs.compile_steps`.
        device: the device of the programs.
    """
    layers = max(1, plan.shapes.layers)
    steps: list[dict[str, Any]] = []
    for name in dict.fromkeys(one["step"] for one in programs):
        members = [one for one in programs if one["step"] == name]
        names = ("launches", "launches_at_most", "bytes", "flops", "seconds")
        names = (*names, "host_loops", "host_branches", "pool_copies", "pool_copied_bytes")
        sums = {field: sum(one[field] for one in members) for field in names}
        tokens, mfu = members[0]["tokens"], None
        if plan.training is not None and name == "train step":
            time = plan.training.time
            tokens, mfu = time.tokens, time.model_flops / sums["seconds"] / device.bf16
        elif plan.serving is not None:
            tokens *= plan.serving.engine.replicas
        steps.append(
            {
                "name": name,
                "tokens": tokens,
                "seqs": members[0]["seqs"],
                **sums,
                "launches_per_layer": sums["launches"] / layers,
                "tokens_per_second": tokens / sums["seconds"],
                "mfu": mfu,
                # The programs of a step run one after the other.
                "memory": {
                    kind: max(one["memory"][kind] for one in members)
                    for kind in members[0]["memory"]
                },
                "operations": _merge_operations(members),
            }
        )
    return steps


def _merge_operations(programs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    merged: dict[str, dict[str, Any]] = {}
    for row in (row for one in programs for row in one["operations"]):
        total = merged.setdefault(row["operation"], {**row, **dict.fromkeys(_SUMMED, 0.0)})
        for field in _SUMMED:
            total[field] += row[field]
    return sorted(merged.values(), key=lambda row: -row["seconds"])


#: Fields of `ed_infra.compilation.launches.OperationRow` that are sums.
_SUMMED = ("launches", "bytes", "flops", "sent_bytes", "seconds")


def _describe_tpu(hardware: Hardware) -> dict[str, Any]:
    """Return the name that libtpu has for a slice.

    Raises:
        ConfigError: the hardware is no TPU slice, or libtpu is not installed.
    """
    device = hardware.device
    if device.links != "torus":
        raise ConfigError(
            f"--compile tpu needs a TPU, and the plan is for {device.title}: name a slice with "
            "--topology, or use --compile gpu"
        )
    if find_spec("libtpu") is None:
        raise ConfigError("--compile tpu needs libtpu, which is not installed: pip install libtpu")
    sizes = (*hardware.shape, *[1] * (device.torus - len(hardware.shape)))
    return {"topology": f"{device.name}:{'x'.join(map(str, sizes))}"}


def _describe_gpu(hardware: Hardware) -> dict[str, Any]:
    """Return the description of GPUs for XLA, and the folder of jax's plugin for CUDA.

    Raises:
        ConfigError: the hardware is a TPU slice, the GPUs do not fill their nodes, or the plugin is
            not installed.
    """
    device, count = hardware.device, hardware.count
    target = device.get_target_config()
    nodes = -(-count // device.node)
    if count % nodes:
        raise ConfigError(
            f"{count} GPUs do not fill nodes of {device.node} {device.title}: use a multiple of "
            f"{device.node} with --compile gpu"
        )
    return {"target": target, "nodes": [nodes, count // nodes], "packages": find_cuda_packages()}


def find_cuda_packages() -> list[str]:
    """Return the folder of jax's plugin for CUDA; [] if this environment contains the plugin.

    Raises:
        ConfigError: no environment contains the plugin, or its version is not that of jax.
    """
    if any(_get_version(name) for name in _PLUGINS):
        return []
    python, jax_version = os.environ.get(CUDA_VARIABLE), version("jax")
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    install = (
        f"install it into an environment of its own (4.3 GB), and name its interpreter: "
        f"python{minor} -m venv cuda; cuda/bin/pip install 'jax[cuda13]=={jax_version}'; "
        f"export {CUDA_VARIABLE}=cuda/bin/python"
    )
    if not python:
        raise ConfigError(
            f"--compile gpu needs jax's plugin for CUDA, which is not installed: {install}"
        )
    code = (
        "import json, sys, sysconfig; from importlib.metadata import distributions; "
        "print(json.dumps([sysconfig.get_path('purelib'), '%d.%d' % sys.version_info[:2], "
        "{x.name: x.version for x in distributions()}]))"
    )
    try:
        done = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        folder, named, packages = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigError(
            f"{CUDA_VARIABLE}={python} is no interpreter of Python ({error}): {install}"
        ) from None
    plugins = [packages[name] for name in _PLUGINS if name in packages]
    if named != minor or jax_version not in plugins:
        raise ConfigError(
            f"{CUDA_VARIABLE}={python} has Python {named} and jax's plugin for CUDA in versions "
            f"{plugins or 'none'}, and this environment has Python {minor} and jax {jax_version}: "
            f"{install}"
        )
    return [folder]


def _get_version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
