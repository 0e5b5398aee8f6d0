"""The commands `plan` and `ladder`: memory and time of a run file, and its loss, before the run.

`plan` does not import jax.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from ed_esurge.command.program import Result, show_result

from ed_elarge.command.runs import File, RunSettings


def plan(
    file: File,
    topology: Annotated[
        str | None,
        typer.Option(metavar="TPU:SIZES", help="A TPU slice: --topology v5e:4x4 or v5litepod-16."),
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="NxDEVICE", help="Devices: --devices 8xH200, 4090, or a TPU slice, v6e-8."
        ),
    ] = None,
    compiler: Annotated[
        str | None,
        typer.Option(
            "--compile",
            metavar="cpu|tpu|gpu[:NAME]",
            help="Also compile: the train step for simulated CPUs, or all steps for a TPU or GPUs.",
        ),
    ] = None,
    context: Annotated[
        int,
        typer.Option(min=1, help="Tokens of each sequence in the cache, with --compile gpu|tpu."),
    ] = 1024,
    time_limit: Annotated[
        float, typer.Option(min=1, help="Seconds for the compiler, with --compile.")
    ] = 600.0,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="A folder for plan.json and plan.html."),
    ] = None,
    settings: RunSettings = None,
) -> Result:
    """Predict memory and time of FILE on hardware that this machine does not need to have.

    The exit code is 1 if the run does not fit.
    """
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize
    from ed_elarge.plan import devices as hardware
    from ed_elarge.plan.estimate import plan_run as estimate
    from ed_elarge.plan.report import lines, to_dict

    if topology is None and devices is None and compiler is not None:
        devices = compiler.partition(":")[2] or None  # --compile gpu:H100 names one GPU
    named = hardware.parse_hardware(topology, devices)
    run = normalize(with_settings(nodes.read_yaml(file), settings or (), nodes.parse_yaml))
    for warning in run.warning_texts():
        print(f"warning: {warning}", file=sys.stderr)
    estimated_plan = estimate(run, named)
    compiled = None
    if compiler is not None:
        from ed_elarge.plan.compiled import compare_with_compiler

        compiled = compare_with_compiler(estimated_plan, compiler, time_limit, context)
    values = to_dict(estimated_plan, compiled)
    show_result("\n".join(lines(values)))
    if output is not None:
        from ed_elarge.plan.page import render_page

        output.mkdir(parents=True, exist_ok=True)
        (output / "plan.json").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
        (output / "plan.html").write_text(render_page(values), "utf-8")
        print(f"wrote {output / 'plan.json'} and {output / 'plan.html'}")
    return Result(values, int(not estimated_plan.fits))


def ladder(
    file: File,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time for all small models: 600, 90min, 2h.")
    ] = "30min",
    rungs: Annotated[int, typer.Option(min=3, max=12, help="Largest number of sizes.")] = 4,
    ratio: Annotated[
        float, typer.Option(min=1.2, max=100, help="Factor between the parameters of two sizes.")
    ] = 3.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sizes and their steps, and exit.")
    ] = False,
    settings: RunSettings = None,
) -> Result:
    """Train small models, and predict the learning rate and the final loss of FILE.

    prediction.json in the directory of the run has the prediction; the report of the run grades it.
    """
    import pydantic
    from ed_infra.errors import ConfigError
    from ed_trainers.options.optimizers import Duration

    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize
    from ed_elarge.ladder import Ladder, write_prediction

    try:
        seconds = pydantic.TypeAdapter(Duration).validate_python(budget)
    except pydantic.ValidationError as error:
        raise ConfigError(f"--budget {budget!r}: {error.errors()[0]['msg']}") from error
    document = with_settings(nodes.read_yaml(file), settings or (), nodes.parse_yaml)
    run = normalize(document)
    plan = Ladder(document.value, run, seconds, rungs, ratio)
    target, sizes = plan.plan()
    for size in (*sizes, target):
        fields = ", ".join(f"{name} {value}" for name, value in size.fields.items())
        show_result(
            f"{size.parameters:>13,} parameters  {size.steps:>7,} steps  {size.flops:.2e} FLOPs  "
            f"{fields or 'the run'}"
        )
    if dry_run:
        return Result({"target": target.to_dict(), "rungs": [size.to_dict() for size in sizes]})
    prediction = plan.climb()
    path = write_prediction(run, prediction)
    loss, rate = prediction["loss"], prediction["learning_rate"]
    show_result(
        f"{loss['metric']} {loss['value']:.4f} ({loss['low']:.4f} to {loss['high']:.4f}, "
        f"{loss['level']:.0%}), learning rate {rate['value']:.3g} ({rate['low']:.3g} to "
        f"{rate['high']:.3g}), batch {prediction['batch_size']['value']}\n"
        f"elarge {file} --set trainer.learning_rate={rate['value']:.3g}  # graded by {path}"
    )
    return Result(prediction)
