"""The command `plan`: memory and time of a run file on named hardware. It does not import jax."""

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
