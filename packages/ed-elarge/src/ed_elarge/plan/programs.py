"""Steps of a run that are compiled for devices which this machine does not have.

This module imports jax, so only the child process of `ed_elarge.plan.compiled` imports it. jax
describes TPU slices with libtpu, and GPUs with its plugin for CUDA and XLA's message
`GpuTargetConfigProto`. The compiler's text of a program becomes counts (`ed_infra.compilation`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ed_infra.compilation.hlo import parse_hlo
from ed_infra.compilation.launches import ChipSpeed, LaunchList, PageArray, report_program

from ed_elarge.config.run_config import RunConfig

if TYPE_CHECKING:
    from ed_infra.sharding.mesh import Device


class MemoryStats(Protocol):
    """The result of `compiled.memory_analysis()`."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    peak_memory_in_bytes: int


class ProgramText(Protocol):
    """A compiled function."""

    def as_text(self) -> str:
        """Return the optimized program."""
        ...

    def memory_analysis(self) -> MemoryStats:
        """Return the bytes by kind."""
        ...


class Lowered(Protocol):
    """A traced function."""

    def compile(self) -> ProgramText:
        """Return the compiled function."""
        ...


@dataclass(frozen=True)
class DescribedStep:
    """One program of a step.

    Attributes:
        step, program: names: "decode step" consists of the programs "forward" and "sample".
        tokens, seqs: tokens and sequences of the step.
        lowered: the traced program.
        pools: pages that the program reads.
    """

    step: str
    program: str
    tokens: int
    seqs: int
    lowered: Lowered
    pools: Sequence[PageArray] = ()


def describe_devices(request: Mapping[str, Any]) -> Sequence[Device] | None:
    """Return the devices that a request names; None = the devices of jax.

    Args:
        request: `topology`, a TPU slice that libtpu knows, such as `v5e:4x4`; or `target`, the text
            of XLA's `GpuTargetConfigProto`, with `nodes`, the numbers of nodes and of GPUs in a
            node.
    """
    from jax.experimental import topologies

    if request.get("topology"):
        name = request["topology"]
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    if request.get("target"):
        nodes, devices = request["nodes"]
        description = topologies.get_topology_desc(
            platform="cuda",
            topology_name="",
            topology=f"1x{nodes}x{devices}",
            target_config=request["target"],
        )
        return description.devices
    return None


def read_memory(analysis: MemoryStats, *, tpu: bool) -> dict[str, int]:
    """Return bytes by kind.

    libtpu reports the largest number of bytes at the same time. The sizes of its temporary buffers
    add buffers that never exist at the same time. Other compilers report the latter only.
    """
    arguments = analysis.argument_size_in_bytes
    return {
        "arguments": arguments,
        "outputs": analysis.output_size_in_bytes,
        "aliased": analysis.alias_size_in_bytes,
        "temporary": analysis.peak_memory_in_bytes - arguments
        if tpu
        else analysis.temp_size_in_bytes,
    }


def compile_steps(run: RunConfig, request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compile the steps of a run, and return the counts of each program.

    Args:
        run: the run.
        request: the devices of `describe_devices`; `parts`, "train" and "serve"; `vocab` and
            `length` of training; `pages`, `context`, `rows` and the names `steps` of serving;
            `speed`, the fields of `ChipSpeed`.
    """
    devices, speed = describe_devices(request), ChipSpeed(**request["speed"])
    steps: list[DescribedStep] = []
    if "train" in request["parts"]:
        steps.append(trace_train_step(run, request, devices))
    if "serve" in request["parts"]:
        steps += trace_serving_steps(run, request, devices)
    compiled: dict[int, tuple[ProgramText, float]] = {}
    for step in steps:
        if id(step.lowered) not in compiled:
            start = time.perf_counter()
            compiled[id(step.lowered)] = step.lowered.compile(), time.perf_counter() - start
    tpu = bool(request.get("topology"))
    return [count_step(step, *compiled[id(step.lowered)], speed, tpu=tpu) for step in steps]


def trace_train_step(
    run: RunConfig, request: Mapping[str, Any], devices: Sequence[Device] | None
) -> DescribedStep:
    """Trace the optimizer step of a run."""
    from ed_elarge.plan.abstract import abstract_model, lowered_train_step

    model, length = abstract_model(run, request["vocab"], devices), request["length"]
    assert run.trainer is not None, "a plan of training has a trainer"
    rows = run.trainer.sequences_per_step
    lowered = lowered_train_step(run, model, length)
    return DescribedStep("train step", "train", rows * length, rows, lowered)


def trace_serving_steps(
    run: RunConfig, request: Mapping[str, Any], devices: Sequence[Device] | None
) -> list[DescribedStep]:
    """Trace the largest decode step of the engine, and the largest step that computes prompts."""
    from ed_esurge.engine.abstract_runner import (
        create_abstract_runner,
        list_page_arrays,
        list_steps,
    )
    from ed_esurge.engine.setup import Setup

    from ed_elarge.plan.abstract import abstract_model

    model = abstract_model(run, request["vocab"], devices, serves=True)
    # The programs of several steps repeat the program of one step.
    setup = Setup.resolve(model, run.esurge.replace(num_scheduler_steps=1))
    runner = create_abstract_runner(setup, request["pages"])
    lowered: dict[object, Lowered] = {}  # steps with as many sequences share a sampler
    steps: list[DescribedStep] = []
    for name, step in list_steps(setup, rows=request.get("rows")).items():
        if name not in request.get("steps", (name,)):
            continue
        context = min(request["context"], setup.limits.max_model_len)
        pools = list_page_arrays(runner, setup, seqs=step.seqs, context=context)
        for program, key in zip(("forward", "sample"), step.keys, strict=True):
            if key not in lowered:
                lowered[key] = runner.functions.lower(key)
            steps.append(DescribedStep(name, program, step.tokens, step.seqs, lowered[key], pools))
    return steps


def count_step(
    step: DescribedStep, compiled: ProgramText, seconds: float, speed: ChipSpeed, *, tpu: bool
) -> dict[str, Any]:
    """Return the memory, counts and bound of a compiled program.

    Args:
        step: the program.
        compiled: the compiled function.
        seconds: time of the compilation.
        speed: speed of the device.
        tpu: whether the device is a TPU.
    """
    listed = LaunchList(parse_hlo(compiled.as_text()), step.pools, waits=not tpu)
    return {
        "step": step.step,
        "program": step.program,
        "tokens": step.tokens,
        "seqs": step.seqs,
        "compile_seconds": seconds,
        "memory": read_memory(compiled.memory_analysis(), tpu=tpu),
        **report_program(listed, speed),
    }
