"""Changes of a run that make it fit, each with its computed effect, the cheapest first.

If no change alone makes the run fit, two changes together are searched, and then three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from ed_esurge.config import EngineConfig
from ed_infra.errors import ConfigError
from ed_infra.specs import EasyDeLQuantizationConfig

from ed_elarge.config.adaptation import LoraSection
from ed_elarge.plan.estimate import (
    RunPlan,
    ServingPlan,
    TrainingPlan,
    plan_serving,
    plan_training,
)
from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.meshes import Candidate, can_use_mesh, format_candidate, get_token_seconds
from ed_elarge.plan.quantized import PlannedCodes
from ed_elarge.plan.settings import Serving, Training

#: Number of changes that are combined, and of meshes that are tried with other changes.
_TOGETHER, _MESHES = 3, 3
#: Changes of this many that are listed, if none fits.
_LISTED = 12
_POLICY = "base_config.values.gradient_checkpointing"
_FORMAT = "quantization.model.quantization_method"


@dataclass(frozen=True)
class PlanChange:
    """A change of the run file, or several together.

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


class _Lever(NamedTuple):
    """One possible change. Levers of the same kind exclude each other.

    Attributes:
        kind: what is changed.
        text: the keys.
        change: returns the changed settings.
        same: whether the numbers of training stay.
        mesh: another mesh; None = the mesh of the run.
    """

    kind: str
    text: str
    change: Callable[[Training | Serving], Training | Serving]
    same: bool = True
    mesh: PlanMesh | None = None


def list_changes(
    plan: RunPlan, part: TrainingPlan | ServingPlan, candidates: Sequence[Candidate]
) -> list[PlanChange]:
    """Return the changes that save memory: those that fit first, then by time.

    Of changes that fit, those that keep the numbers of training precede those that change them.

    Args:
        plan: the plan.
        part: its training or its serving.
        candidates: the meshes of the run, the best first.
    """
    if isinstance(part, TrainingPlan):
        levers = [*_list_training_levers(part.settings)]
    else:
        levers = [*_list_serving_levers(part.settings, part.engine.longest)]
    levers += _list_mesh_levers(part, candidates)
    changes: list[PlanChange] = []
    for count in range(1, _TOGETHER + 1 if not part.fits else 2):
        more = [
            change
            for group in itertools.combinations(levers, count)
            if len({lever.kind for lever in group}) == count
            for change in _apply_levers(plan, part, group)
            if change.saved > 0
        ]
        changes += [change for change in more if change.fits or count == 1]
        if any(change.fits for change in changes):
            break
    ranking = sorted(changes, key=lambda one: (not one.fits, not one.same, one.slower, -one.saved))
    return ranking[:_LISTED]


def _apply_levers(
    plan: RunPlan, part: TrainingPlan | ServingPlan, group: Sequence[_Lever]
) -> Iterator[PlanChange]:
    """Yield the effect of changes together; nothing if they exclude each other."""
    settings: Training | Serving = part.settings
    for lever in group:
        settings = lever.change(settings)
    mesh = next((lever.mesh for lever in group if lever.mesh is not None), part.mesh)
    try:
        if isinstance(settings, Training):
            if not can_use_mesh(mesh, plan.shapes, settings):
                return
            new: TrainingPlan | ServingPlan = plan_training(
                settings, plan.shapes, mesh, plan.hardware
            )
        else:
            new = plan_serving(settings, plan.shapes, mesh, plan.hardware)
    except ConfigError:  # such as a pool that holds no sequence
        return
    total = new.memory.total
    yield PlanChange(
        " ".join(lever.text for lever in group),
        total,
        part.memory.total - total,
        get_token_seconds(new) / get_token_seconds(part),
        new.fits,
        all(lever.same for lever in group),
    )


def _list_mesh_levers(
    part: TrainingPlan | ServingPlan, candidates: Sequence[Candidate]
) -> list[_Lever]:
    """Return the best mesh, and the meshes with the least memory."""
    names = tuple(part.mesh.sizes)
    small = sorted(candidates, key=lambda one: one.plan.memory.total)[: _MESHES - 1]
    dims = dict.fromkeys(one.dims for one in (*candidates[:1], *small))
    by_dims = {one.dims: one for one in candidates}
    return [
        _Lever(
            "mesh",
            f"sharding.axis_dims={list(one)} ({format_candidate(by_dims[one], names)})",
            lambda settings: settings,
            mesh=by_dims[one].plan.mesh,
        )
        for one in dims
        if one != tuple(part.mesh.sizes.values())
    ]


def _change(**values: object) -> Callable[[Training | Serving], Training | Serving]:
    fields = cast("dict[str, Any]", values)
    return lambda settings: replace(settings, **fields)


def _list_training_levers(settings: Training) -> Iterator[_Lever]:
    for name in ("dots_saveable", "nothing_saveable"):
        if settings.remat != name:
            yield _Lever("remat", f"{_POLICY}={name}", _change(remat=name, targets=()))
    count = settings.accumulation * 2
    while settings.rows % count == 0:
        words = f"trainer.gradient_accumulation_steps={count}"
        yield _Lever("rows", words, _change(accumulation=count))
        count *= 2
    if settings.chunk > 256:
        yield _Lever("chunk", "trainer.lmhead_chunksize=256", _change(chunk=256))
    if settings.dtype == "float32":
        yield _Lever("dtype", "loader.dtype=bfloat16", _change(dtype="bfloat16"), False)
    if settings.param_dtype == "float32" and settings.codes is None:
        words = "loader.param_dtype=bfloat16"
        yield _Lever("parameters", words, _change(param_dtype="bfloat16"), False)
    arguments = settings.arguments
    if arguments.optimizer == "adamw":
        eight = arguments.model_copy(update={"optimizer": "adamw_8bit", "tx_mu_dtype": None})
        words = "trainer.optimizer=adamw_8bit"
        yield _Lever("optimizer", words, _change(arguments=eight), False)
        if arguments.tx_mu_dtype is None:
            low = arguments.model_copy(update={"tx_mu_dtype": "bfloat16"})
            words = "trainer.tx_mu_dtype=bfloat16"
            yield _Lever("optimizer", words, _change(arguments=low), False)
    adapters = settings.lora or LoraSection()
    if settings.lora is None:
        yield _Lever("lora", f"lora.rank={adapters.rank}", _change(lora=adapters), False)
    if settings.codes is None and not adapters.decomposes_weights:
        codes = _plan_default_codes("nf4")
        change = _change(lora=adapters, codes=codes)
        yield _Lever("lora", f"{_FORMAT}=nf4 (QLoRA)", change, False)


def _list_serving_levers(settings: Serving, longest: int) -> Iterator[_Lever]:
    if settings.codes is None:
        for name in ("int8", "nf4"):
            change = _change(codes=_plan_default_codes(name))
            yield _Lever("weights", f"{_FORMAT}={name}", change, False)
        if settings.param_dtype == "float32":
            change = _change(dtype="bfloat16", param_dtype="bfloat16")
            words = "loader.dtype=bfloat16 loader.param_dtype=bfloat16"
            yield _Lever("weights", words, change, False)
    if settings.kv_dtype not in ("int8", "fp8"):
        change = _change(kv_dtype="int8", kv_group=None)
        yield _Lever("cache", "quantization.kv_cache.quantization_method=int8", change, False)
    length = longest // 2
    while length >= 1024:
        words = f"esurge.max_model_len={length}"
        yield _Lever("length", words, _change_engine(max_model_len=length))
        length //= 2
    for tokens in (512, 128):
        change = _change_engine(max_num_batched_tokens=tokens)
        yield _Lever("tokens", f"esurge.max_num_batched_tokens={tokens}", change)


def _change_engine(**values: object) -> Callable[[Training | Serving], Training | Serving]:
    def change(settings: Training | Serving) -> Training | Serving:
        assert isinstance(settings, Serving)
        options: EngineConfig = settings.options.replace(**values)
        return replace(settings, options=options)

    return change


def _plan_default_codes(name: str) -> PlannedCodes:
    return PlannedCodes(name, pattern=EasyDeLQuantizationConfig(name).pattern)
