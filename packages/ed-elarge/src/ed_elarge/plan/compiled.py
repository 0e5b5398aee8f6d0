"""The comparison of a plan with the program that a child process compiles."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.plan import child, training
from ed_elarge.plan.buffers import ACCELERATOR, CPU
from ed_elarge.plan.estimate import RunPlan

#: Compilers of `--compile`.
_COMPILERS = ("cpu", "tpu")


def compare_with_compiler(plan: RunPlan, compiler: str, time_limit: float) -> dict[str, Any]:
    """Compile the train step, and compare its buffers with the prediction.

    Args:
        plan: a plan of training.
        compiler: "cpu": for simulated CPU devices; "tpu": for the TPU slice of the plan, by libtpu.
        time_limit: seconds, after which the compiler is stopped.

    Returns:
        `rows`: name, bytes predicted, bytes compiled, and relative error of the arguments, the
        temporary buffers, and their sum.

    Raises:
        ConfigError: the run does not train, the compiler is unknown or absent, or it failed.
    """
    if compiler not in _COMPILERS:
        raise unknown_name("compiler", compiler, _COMPILERS)
    part = plan.training
    if part is None:
        raise ConfigError("--compile compiles a train step, and this run does not train: omit it")
    compiled_bytes = child.ask_child(
        plan.run,
        "train",
        devices=plan.hardware.count,
        time_limit=time_limit,
        vocab=plan.shapes.vocabulary,
        length=part.settings.length,
        topology=_topology(plan) if compiler == "tpu" else None,
    )
    backend = CPU if compiler == "cpu" else ACCELERATOR
    step = training.step(part.settings, plan.shapes, part.mesh, backend)
    sizes = {
        "arguments": (step.arguments, compiled_bytes["arguments"]),
        "temporary buffers": (step.temporary, compiled_bytes["temporary"]),
        "sum": (
            step.arguments + step.temporary,
            compiled_bytes["arguments"] + compiled_bytes["temporary"],
        ),
    }
    rows = [
        {"name": name, "predicted": ours, "compiled": theirs, "error": ours / theirs - 1}
        for name, (ours, theirs) in sizes.items()
    ]
    return {"backend": compiler, "rows": rows}


def _topology(plan: RunPlan) -> str:
    """Return the name that libtpu has for the hardware of a plan.

    Raises:
        ConfigError: the hardware is no TPU slice, or libtpu is not installed.
    """
    device, shape = plan.hardware.device, plan.hardware.shape
    if device.links != "torus":
        raise ConfigError(
            f"--compile tpu needs a TPU, and the plan is for {device.title}: name a slice with "
            "--topology, or use --compile cpu"
        )
    if find_spec("libtpu") is None:
        raise ConfigError("--compile tpu needs libtpu, which is not installed: pip install libtpu")
    sizes = (*shape, *[1] * (device.torus - len(shape)))
    return f"{device.name}:{'x'.join(map(str, sizes))}"
