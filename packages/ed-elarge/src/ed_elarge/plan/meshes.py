"""All meshes of a number of devices, ranked by the predicted time, with reasons."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ed_elarge.plan.devices import GIB
from ed_elarge.plan.estimate import RunPlan, ServingPlan, TrainingPlan, plan_serving, plan_training
from ed_elarge.plan.mesh import PlanMesh, build_mesh
from ed_elarge.plan.settings import Serving, Training
from ed_elarge.plan.tensors import ModelShapes


@dataclass(frozen=True)
class Candidate:
    """A mesh with its plan.

    Attributes:
        dims: sizes of the mesh axes, in the order of `sharding.axis_names`.
        plan: memory and time.
        reason: why the mesh is not the best; empty for the best.
    """

    dims: tuple[int, ...]
    plan: TrainingPlan | ServingPlan
    reason: str = ""


def rank_meshes(plan: RunPlan) -> list[Candidate]:
    """Return the meshes of the run's devices, best first.

    Meshes that fit precede those that do not. Of equal times, the mesh with less memory is first.
    """
    part = plan.training or plan.serving
    assert part is not None, "a plan trains or serves"
    ranking = []
    for mesh in candidates(plan, part):
        if isinstance(part, TrainingPlan):
            mesh_plan: TrainingPlan | ServingPlan = plan_training(
                part.settings, plan.shapes, mesh, plan.hardware
            )
        else:
            mesh_plan = plan_serving(part.settings, plan.shapes, mesh, plan.hardware)
        ranking.append(Candidate(tuple(mesh.sizes.values()), mesh_plan))
    ranking.sort(
        key=lambda one: (not one.plan.fits, get_token_seconds(one.plan), one.plan.memory.total)
    )
    best = ranking[0]
    return [best, *(Candidate(c.dims, c.plan, _why(c.plan, best.plan)) for c in ranking[1:])]


def candidates(plan: RunPlan, part: TrainingPlan | ServingPlan) -> Iterator[PlanMesh]:
    """Yield the meshes whose axes divide what they split.

    Tensor parallelism divides heads and keys, expert parallelism the experts, and the axes of the
    batch divide the rows of a microbatch.
    """
    run, shapes = plan.run, plan.shapes
    for sizes in _factor_count(plan.hardware.count, len(part.mesh.sizes)):
        mesh = build_mesh(run, plan.hardware.count, sizes)
        if can_use_mesh(mesh, shapes, part.settings):
            yield mesh


def _factor_count(count: int, axes: int) -> Iterator[tuple[int, ...]]:
    divisors = [n for n in range(1, count + 1) if count % n == 0]
    for sizes in itertools.product(divisors, repeat=axes - 1):
        quotient = count
        for size in sizes:
            quotient = quotient // size if quotient % size == 0 else 0
            if not quotient:
                break
        if quotient:
            yield (sizes[0], quotient, *sizes[1:])


def can_use_mesh(mesh: PlanMesh, shapes: ModelShapes, settings: Training | Serving) -> bool:
    """Return whether the axes of a mesh divide what they split; see `candidates`."""
    axis = mesh.axis
    tp, ep = mesh.ways(axis.tensor_parallel_axis), mesh.ways(axis.expert_parallel_axis)
    sp = mesh.ways(axis.sequence_parallel_axis)
    experts = next((t.shape[0] for t in shapes.tensors if t.axes[:1] == ("expert",)), 1)
    if shapes.heads % tp or shapes.kv_heads % tp or experts % ep:
        return False
    if isinstance(settings, Training):
        batch = mesh.ways(axis.batch_axis)
        return settings.microbatch % batch == 0 and settings.length % sp == 0
    return sp == 1 and mesh.ways(axis.fully_sharded_data_parallel_axis) == 1


def get_token_seconds(plan: TrainingPlan | ServingPlan) -> float:
    """Return the seconds of a token over all devices."""
    if isinstance(plan, TrainingPlan):
        return plan.time.step / plan.time.tokens
    return 1 / (plan.time.tokens_per_second * plan.engine.replicas)


def _why(plan: TrainingPlan | ServingPlan, best: TrainingPlan | ServingPlan) -> str:
    if not plan.fits and best.fits:
        return f"does not fit: {-plan.memory.free / GIB:.1f} GiB too much"
    slower = get_token_seconds(plan) / get_token_seconds(best)
    if slower > 1.005:
        bound = plan.time.bound
        part = {"compute": "repeated work", "memory": "memory traffic"}.get(
            bound, f"collectives along {bound}"
        )
        return f"{slower:.2f} times the time: {part}"
    more = plan.memory.total - best.memory.total
    return f"equal time, {more / GIB:.1f} GiB more memory" if more > 0 else "equal"


def format_candidate(candidate: Candidate, names: tuple[str, ...]) -> str:
    """Return a mesh as text: `fsdp=8 tp=2`."""
    axis_texts = [f"{n}={d}" for n, d in zip(names, candidate.dims, strict=True) if d > 1]
    return " ".join(axis_texts) or "one device"
