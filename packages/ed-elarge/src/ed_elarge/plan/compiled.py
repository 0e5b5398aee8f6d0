"""The comparison of a plan with the program that a child process compiles."""

from __future__ import annotations

from typing import Any

from ed_infra.errors import ConfigError

from ed_elarge.plan import child
from ed_elarge.plan.estimate import Plan


def compare(plan: Plan, time_limit: float) -> dict[str, Any]:
    """Compile the train step for simulated devices, and compare its buffers with the prediction.

    Args:
        plan: a plan of training.
        time_limit: seconds, after which the compiler is stopped.

    Returns:
        `rows`: name, bytes predicted, bytes compiled, and relative error of the arguments, the
        temporary buffers, and their sum.

    Raises:
        ConfigError: the run does not train, or the compiler failed.
    """
    part = plan.training
    if part is None:
        raise ConfigError("--compile compiles a train step, and this run does not train: omit it")
    found = child.ask(
        plan.run,
        "train",
        devices=plan.hardware.count,
        time_limit=time_limit,
        vocab=plan.shapes.vocabulary,
        length=part.settings.length,
    )
    sizes = {
        "arguments": (part.step.arguments, found["arguments"]),
        "temporary buffers": (part.step.temporary, found["temporary"]),
        "sum": (
            part.step.arguments + part.step.temporary,
            found["arguments"] + found["temporary"],
        ),
    }
    rows = [
        {"name": name, "predicted": ours, "compiled": theirs, "error": ours / theirs - 1}
        for name, (ours, theirs) in sizes.items()
    ]
    return {"backend": "cpu", "rows": rows}
