"""Changes of a run that make it fit, each with its computed effect, the cheapest first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ed_elarge.plan.devices import Hardware
from ed_elarge.plan.estimate import RunPlan, TrainingPlan, of_training
from ed_elarge.plan.meshes import Candidate, text
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


def of_plan(plan: RunPlan, best: Candidate) -> list[PlanChange]:
    """Return the changes that save memory: those that fit first, then by time.

    Of changes that fit, those that keep the numbers of training precede those that change them.

    Args:
        plan: the plan.
        best: the best mesh of the run.
    """
    part = plan.training
    if part is None:
        return []
    found = [
        _compared(part, of_training(changed, plan.shapes, part.mesh, plan.hardware), words, same)
        for words, changed, same in _variants(part, plan.shapes, plan.hardware)
    ]
    names = tuple(part.mesh.sizes)
    if best.dims != tuple(part.mesh.sizes.values()):
        assert isinstance(best.plan, TrainingPlan), "the run trains"
        words = f"sharding.axis_dims={list(best.dims)} ({text(best, names)})"
        found.append(_compared(part, best.plan, words, True))
    found = [change for change in found if change.saved > 0]
    return sorted(found, key=lambda c: (not c.fits, not c.same, c.slower, -c.saved))


def _compared(before: TrainingPlan, after: TrainingPlan, words: str, same: bool) -> PlanChange:
    total = after.memory.total
    slower = (after.time.step / after.time.tokens) / (before.time.step / before.time.tokens)
    return PlanChange(words, total, before.memory.total - total, slower, after.fits, same)


def _variants(
    part: TrainingPlan, shapes: ModelShapes, hardware: Hardware
) -> Iterator[tuple[str, Training, bool]]:
    own = part.settings
    policy = "base_config.values.gradient_checkpointing"
    for name in ("dots_saveable", "nothing_saveable"):
        if own.remat != name:
            yield f"{policy}={name}", replace(own, remat=name, targets=()), True
    yield from _accumulated(part, own, "")
    if own.remat != "nothing_saveable":
        both = replace(own, remat="nothing_saveable", targets=())
        yield from _accumulated(part, both, f"{policy}=nothing_saveable ")
    if own.chunk > 256:
        yield "trainer.lmhead_chunksize=256", replace(own, chunk=256), True
    if own.dtype == "float32":
        yield "loader.dtype=bfloat16", replace(own, dtype="bfloat16"), False
    if own.arguments.optimizer == "adamw":
        eight = own.arguments.model_copy(update={"optimizer": "adamw_8bit", "tx_mu_dtype": None})
        yield "trainer.optimizer=adamw_8bit", replace(own, arguments=eight), False
        if own.arguments.tx_mu_dtype is None:
            low = own.arguments.model_copy(update={"tx_mu_dtype": "bfloat16"})
            yield "trainer.tx_mu_dtype=bfloat16", replace(own, arguments=low), False


def _accumulated(
    part: TrainingPlan, own: Training, before: str
) -> Iterator[tuple[str, Training, bool]]:
    """Yield more microbatches of fewer rows, as long as every device has a row."""
    ways = part.mesh.ways(part.mesh.axis.batch_axis)
    count = own.accumulation * 2
    while own.rows % count == 0 and own.rows // count >= ways:
        words = f"{before}trainer.gradient_accumulation_steps={count}"
        yield words, replace(own, accumulation=count), True
        count *= 2
