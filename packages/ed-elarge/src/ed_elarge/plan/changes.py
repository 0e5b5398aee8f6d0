"""Changes of a run that make it fit, each with its computed effect, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ed_elarge.plan.devices import Hardware
from ed_elarge.plan.estimate import RunPlan, TrainingPlan, plan_training
from ed_elarge.plan.meshes import Candidate, format_candidate
from ed_elarge.plan.settings import Training
from ed_elarge.plan.tensors import ModelShapes


@dataclass(frozen=True)
class PlanChange:
    """A change of the run file.

    Attributes:
        text: the keys to change, as `--set` accepts them, or a mesh.
        total: bytes on a device after the change.
        saved: bytes that the change saves.
        slower: time of a token relative to the run before the change.
        fits: whether the run fits after the change.
        same: whether training computes the same numbers up to rounding.
    """

    text: str
    total: int
    saved: int
    slower: float
    fits: bool
    same: bool


def list_changes(plan: RunPlan, best: Candidate) -> list[PlanChange]:
    """Return the changes that save memory: those that fit first, then by time.

    Of changes that fit, those that keep the numbers of training precede those that change them.

    Args:
        plan: the plan.
        best: the best mesh of the run.
    """
    part = plan.training
    if part is None:
        return []
    changes = [
        _compare_plans(
            part, plan_training(changed, plan.shapes, part.mesh, plan.hardware), words, same
        )
        for words, changed, same in _variants(part, plan.shapes, plan.hardware)
    ]
    names = tuple(part.mesh.sizes)
    if best.dims != tuple(part.mesh.sizes.values()):
        assert isinstance(best.plan, TrainingPlan), "the run trains"
        words = f"sharding.axis_dims={list(best.dims)} ({format_candidate(best, names)})"
        changes.append(_compare_plans(part, best.plan, words, True))
    changes = [change for change in changes if change.saved > 0]
    return sorted(changes, key=lambda c: (not c.fits, not c.same, c.slower, -c.saved))


def _compare_plans(
    old_plan: TrainingPlan, new_plan: TrainingPlan, words: str, same: bool
) -> PlanChange:
    total = new_plan.memory.total
    slower = (new_plan.time.step / new_plan.time.tokens) / (
        old_plan.time.step / old_plan.time.tokens
    )
    return PlanChange(words, total, old_plan.memory.total - total, slower, new_plan.fits, same)


def _variants(
    part: TrainingPlan, shapes: ModelShapes, hardware: Hardware
) -> Iterator[tuple[str, Training, bool]]:
    settings = part.settings
    policy = "base_config.values.gradient_checkpointing"
    for name in ("dots_saveable", "nothing_saveable"):
        if settings.remat != name:
            yield f"{policy}={name}", replace(settings, remat=name, targets=()), True
    yield from _raise_accumulation(part, settings, "")
    if settings.remat != "nothing_saveable":
        recomputed_settings = replace(settings, remat="nothing_saveable", targets=())
        yield from _raise_accumulation(part, recomputed_settings, f"{policy}=nothing_saveable ")
    if settings.chunk > 256:
        yield "trainer.lmhead_chunksize=256", replace(settings, chunk=256), True
    if settings.dtype == "float32":
        yield "loader.dtype=bfloat16", replace(settings, dtype="bfloat16"), False
    if settings.arguments.optimizer == "adamw":
        eight = settings.arguments.model_copy(
            update={"optimizer": "adamw_8bit", "tx_mu_dtype": None}
        )
        yield "trainer.optimizer=adamw_8bit", replace(settings, arguments=eight), False
        if settings.arguments.tx_mu_dtype is None:
            low = settings.arguments.model_copy(update={"tx_mu_dtype": "bfloat16"})
            yield "trainer.tx_mu_dtype=bfloat16", replace(settings, arguments=low), False


def _raise_accumulation(
    part: TrainingPlan, settings: Training, prefix: str
) -> Iterator[tuple[str, Training, bool]]:
    """Yield more microbatches of fewer rows, as long as every device has a row."""
    ways = part.mesh.ways(part.mesh.axis.batch_axis)
    count = settings.accumulation * 2
    while settings.rows % count == 0 and settings.rows // count >= ways:
        words = f"{prefix}trainer.gradient_accumulation_steps={count}"
        yield words, replace(settings, accumulation=count), True
        count *= 2
