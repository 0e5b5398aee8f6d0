"""`RunPlan`: memory and time of a run on some hardware. No jax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig
from ed_elarge.plan import serving, settings, shapes, timing, training
from ed_elarge.plan.devices import Hardware, MemoryParts
from ed_elarge.plan.mesh import PlanMesh, build_mesh
from ed_elarge.plan.settings import Serving, Training
from ed_elarge.plan.tensors import ModelShapes
from ed_elarge.plan.timing import Time


@dataclass(frozen=True)
class TrainingPlan:
    """Memory and time of training on a mesh.

    Attributes:
        settings: settings of the step.
        mesh: the mesh.
        step: parts of the memory.
        memory: the parts and the limit of the device.
        time: bound of an optimizer step.
    """

    settings: Training
    mesh: PlanMesh
    step: training.PlannedStep
    memory: MemoryParts
    time: Time

    @property
    def fits(self) -> bool:
        """Whether the step fits."""
        return self.memory.fits


@dataclass(frozen=True)
class ServingPlan:
    """Memory and time of serving on a mesh.

    Attributes:
        settings: settings of the engine.
        mesh: the mesh.
        engine: memory, pages and requests.
        time: bound of a decode step of one replica with as many sequences as fit.
    """

    settings: Serving
    mesh: PlanMesh
    engine: serving.EngineMemory
    time: Time

    @property
    def memory(self) -> MemoryParts:
        """The parts and the limit of the device."""
        return self.engine.memory

    @property
    def fits(self) -> bool:
        """Whether weights and one sequence of the maximum length fit."""
        return self.memory.fits


@dataclass(frozen=True)
class RunPlan:
    """What `elarge plan` shows.

    Attributes:
        run: the run.
        hardware: the devices.
        shapes: the model.
        training, serving: None if the run has no such action.
    """

    run: RunConfig
    hardware: Hardware
    shapes: ModelShapes
    training: TrainingPlan | None
    serving: ServingPlan | None

    @property
    def fits(self) -> bool:
        """Whether every part of the run fits."""
        return all(part.fits for part in (self.training, self.serving) if part is not None)


def plan_run(run: RunConfig, hardware: Hardware) -> RunPlan:
    """Return the plan of a run.

    Raises:
        ConfigError: the run neither trains nor serves, or a plan does not know what it does.
        MeshError: the mesh does not fit the number of devices.
    """
    trains = run.trainer is not None and (run.will("train") or not run.actions)
    serves = run.will("serve", "generate", "eval") or not trains
    if not trains and not run.will("serve", "generate", "eval") and run.actions:
        raise ConfigError("elarge plan needs an action: train, serve, generate or eval")
    model, mesh = shapes.get_shapes(run), build_mesh(run, hardware.count)
    training_settings = settings.training(run) if trains else None
    served = settings.serving(run) if serves else None
    return RunPlan(
        run,
        hardware,
        model,
        None
        if training_settings is None
        else plan_training(training_settings, model, mesh, hardware),
        None if served is None else plan_serving(served, model, mesh, hardware),
    )


def plan_training(
    training_settings: Training, model: ModelShapes, mesh: PlanMesh, hardware: Hardware
) -> TrainingPlan:
    """Return memory and time of training."""
    step = plan_step(training_settings, model, mesh, hardware)
    memory = MemoryParts(step.parts, hardware.device.usable)
    time = timing.estimate_training(training_settings, model, mesh, hardware, step)
    return TrainingPlan(training_settings, mesh, step, memory, time)


def plan_step(
    training_settings: Training, model: ModelShapes, mesh: PlanMesh, hardware: Hardware
) -> training.PlannedStep:
    """Return the memory of a train step, and what stays allocated if an engine samples its rows."""
    step = training.step(training_settings, model, mesh)
    if training_settings.engine is None:
        return step
    engine = serving.plan_engine(
        training_settings.engine, model, mesh, hardware.device
    ).memory.parts
    names = ("KV pages", "recurrent states", "sampler state")
    engine_parts = {name: engine[name] for name in names if name in engine}
    engine_parts["reference"] = step.parts["parameters"] if training_settings.has_copy else 0
    return replace(step, parts={**step.parts, **engine_parts})


def plan_serving(
    serving_settings: Serving, model: ModelShapes, mesh: PlanMesh, hardware: Hardware
) -> ServingPlan:
    """Return memory and time of serving."""
    engine = serving.plan_engine(serving_settings, model, mesh, hardware.device)
    one, _ = serving.replica(serving_settings, mesh)
    seqs = max(1, min(engine.seqs, engine.concurrent // engine.replicas))
    size = sum(serving.token_bytes(cache, serving_settings, one) for cache in model.caches)
    # A step reads and writes the states of all its sequences.
    size += -(-2 * engine.state_bytes // engine.longest)
    time = timing.estimate_decoding(
        serving_settings, model, one, hardware, seqs=seqs, context=engine.longest, token_bytes=size
    )
    return ServingPlan(serving_settings, mesh, engine, time)


@dataclass(frozen=True)
class Limits:
    """The largest values that fit, each with all other settings unchanged; 0 = none fits.

    Attributes:
        rows: sequences of a microbatch over all devices.
        length: tokens of a sequence.
    """

    rows: int
    length: int


def compute_limits(plan: TrainingPlan, model: ModelShapes, hardware: Hardware) -> Limits:
    """Return the largest microbatch and the longest sequence of training.

    Rows grow in multiples of the devices that share a batch, and lengths in multiples of 128.
    """
    training_settings, mesh = plan.settings, plan.mesh
    ways = mesh.ways(mesh.axis.batch_axis)

    def fits(changed: Training) -> bool:
        step = plan_step(changed, model, mesh, hardware)
        return MemoryParts(step.parts, hardware.device.usable).fits

    def with_rows(n: int) -> Training:
        return replace(training_settings, rows=n * ways * training_settings.accumulation)

    positions = int(model.config.get("max_position_embeddings") or 2**31)
    rows = ways * _largest(lambda n: fits(with_rows(n)), 2**20)
    blocks = _largest(
        lambda n: fits(replace(training_settings, length=128 * n)), max(1, positions // 128)
    )
    return Limits(rows, 128 * blocks)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest number up to `most` that fits, by bisection; 0 if 1 does not."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
