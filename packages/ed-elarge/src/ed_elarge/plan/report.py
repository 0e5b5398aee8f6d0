"""A plan as text, and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ed_elarge.plan.changes import PlanChange, list_changes
from ed_elarge.plan.devices import FRACTION_VARIABLE, GIB, MemoryParts
from ed_elarge.plan.estimate import RunPlan, ServingPlan, TrainingPlan, compute_limits
from ed_elarge.plan.meshes import Candidate, format_candidate, rank_meshes
from ed_elarge.plan.timing import Time

#: Meshes that the text shows; the files contain all of them.
SHOWN = 5
#: Distance from the limit, relative to it, within which the estimate cannot decide. Of the steps in
#: `docs/slices.json` beyond this distance, libtpu disagrees with one of 29.
CLOSE = 0.06
CLOSE_TEXT = (
    f"within {CLOSE:.0%} of the limit the estimate can be wrong: --compile tpu, or a first step on "
    "the hardware, decides"
)


def to_dict(plan: RunPlan, compiled: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a plan as JSON values: bytes, seconds, and counts.

    Args:
        plan: the plan.
        compiled: the result of `ed_elarge.plan.compiled.compare_with_compiler`, if the run was
            compiled.
    """
    device = plan.hardware.device
    work = plan.training or plan.serving
    assert work is not None
    names = tuple(work.mesh.sizes)
    out: dict[str, Any] = {
        "hardware": {
            "name": plan.hardware.text,
            "device": device.title,
            "count": plan.hardware.count,
            "memory_bytes": device.memory_gib * GIB,
            "usable_bytes": device.usable,
            "source": device.source,
        },
        "model": {
            "model_type": plan.shapes.model_type,
            "parameters": plan.shapes.parameters,
            "parameters_per_token": plan.shapes.active,
            "shapes": "model class",
        },
        "fits": plan.fits,
    }
    candidates = rank_meshes(plan)
    if plan.training is not None:
        most = compute_limits(plan.training, plan.shapes, plan.hardware)
        out["training"] = {
            **_part(plan.training),
            "likely_step_seconds": plan.training.time.step / device.reached
            if device.reached
            else None,
            "moment": plan.training.step.moment,
            "samples": plan.training.settings.form.samples,
            "exact_bytes": plan.training.step.arguments,
            "estimated_bytes": plan.training.step.temporary,
            "close": is_close(plan.training.memory),
            "largest_microbatch": most.rows,
            "longest_sequence": most.length,
            "changes": [*map(vars, list_changes(plan, plan.training, candidates))],
        }
    if plan.serving is not None:
        engine = plan.serving.engine
        out["serving"] = {
            **_part(plan.serving),
            "pages": engine.pages,
            "page_bytes": engine.page_bytes,
            "pages_of_longest_sequence": engine.needed,
            "max_model_len": engine.longest,
            "concurrent_requests": engine.concurrent,
            "state_bytes": engine.state_bytes,
            "saved_states": engine.saved_states,
            "cached_tokens": engine.cached_tokens,
            "replicas": engine.replicas,
            "changes": [*map(vars, list_changes(plan, plan.serving, candidates))]
            if plan.training is None
            else [],
        }
    out["meshes"] = [_mesh(candidate, names) for candidate in candidates]
    if compiled is not None:
        out["compiled"] = dict(compiled)
    return out


def _part(part: TrainingPlan | ServingPlan) -> dict[str, Any]:
    return {
        "mesh": dict(part.mesh.sizes),
        "memory": _memory(part.memory),
        "time": _time(part.time),
    }


def is_close(memory: MemoryParts) -> bool:
    """Return whether the memory is so close to the limit that the estimate cannot decide."""
    return abs(memory.total / memory.limit - 1) < CLOSE


def _memory(memory: MemoryParts) -> dict[str, Any]:
    return {
        "parts": {name: size for name, size in memory.parts.items() if size},
        "total": memory.total,
        "limit": memory.limit,
        "free": memory.free,
        "fits": memory.fits,
    }


def _time(time: Time) -> dict[str, Any]:
    return {
        "checked": False,
        "step_seconds": time.step,
        "bound": time.bound,
        "seconds": dict(time.seconds),
        "flops_per_device": time.flops,
        "memory_bytes": time.memory_bytes,
        "collective_bytes": dict(time.collectives),
        "tokens_per_second": time.tokens_per_second,
        "mfu": time.mfu,
    }


def _mesh(candidate: Candidate, names: tuple[str, ...]) -> dict[str, Any]:
    plan = candidate.plan
    return {
        "axis_dims": list(candidate.dims),
        "axes": format_candidate(candidate, names),
        "fits": plan.fits,
        "total": plan.memory.total,
        "step_seconds": plan.time.step,
        "bound": plan.time.bound,
        "tokens_per_second": plan.time.tokens_per_second
        * (plan.engine.replicas if isinstance(plan, ServingPlan) else 1),
        "why_not": candidate.reason,
    }


def lines(values: Mapping[str, Any]) -> list[str]:
    """Return the text of a plan from its JSON values."""
    hardware, model = values["hardware"], values["model"]
    usable = hardware["usable_bytes"] / GIB
    out = [
        f"model: {model['model_type']}, {model['parameters']:,} parameters",
        f"hardware: {hardware['count']} x {hardware['device']}, {usable:.1f} GiB usable each"
        + (
            f" (jax's share of {hardware['memory_bytes'] / GIB:.1f} GiB; {FRACTION_VARIABLE})"
            if usable * GIB < hardware["memory_bytes"] - 1
            else ""
        ),
    ]
    for name in ("training", "serving"):
        if name in values:
            out += ["", *_format_part(name, values[name])]
    out += ["", "meshes by predicted time"]
    for mesh in values["meshes"][:SHOWN]:
        reason = mesh["why_not"] or "best"
        out.append(
            f"  {mesh['axes']:<24}{mesh['total'] / GIB:>8.2f} GiB "
            f"{mesh['tokens_per_second']:>12,.0f} tokens/s  {reason}"
        )
    hidden = len(values["meshes"]) - SHOWN
    if hidden > 0:
        out.append(f"  {hidden} more in plan.json")
    if "compiled" in values:
        out += ["", *_format_compiled(values["compiled"])]
    return out


def _format_part(name: str, part: Mapping[str, Any]) -> list[str]:
    memory, time = part["memory"], part["time"]
    mesh = " ".join(f"{axis}={size}" for axis, size in part["mesh"].items() if size > 1)
    out = [f"{name} on {mesh or 'one device'}: memory of a device"]
    for key, size in memory["parts"].items():
        out.append(f"  {key:<20}{size / GIB:>10.3f} GiB")
    out.append(f"  {'total':<20}{memory['total'] / GIB:>10.3f} GiB of {memory['limit'] / GIB:.2f}")
    out.append(_verdict(memory) + (_margin(part) if name == "training" else ""))
    if part.get("close"):
        out.append(f"  {CLOSE_TEXT}")
    changes = part.get("changes", ()) if not memory["fits"] else ()
    if changes and not any(change["fits"] for change in changes):
        out.append("  no change fits, also not three together; those that save memory:")
    for change in changes[:SHOWN]:
        out.append("  " + change_text(change))
    if name == "training":
        out.append(
            f"largest microbatch: {part['largest_microbatch']:,} sequences; longest sequence: "
            f"{part['longest_sequence']:,} tokens (each with all other values unchanged)"
        )
    else:
        out.append(
            f"requests of {part['max_model_len']:,} tokens at the same time: "
            f"{part['concurrent_requests']}; the pages hold {part['cached_tokens']:,} tokens"
        )
        if part.get("state_bytes"):
            out.append(
                f"recurrent states of a sequence: {part['state_bytes'] / 2**20:,.2f} MiB; "
                f"{part['saved_states']:,} saved states for prompts with an equal prefix"
            )
    rate = f"{time['tokens_per_second']:,.0f} tokens/s"
    step_name = "optimizer step" if name == "training" else "decode step"
    share = f", MFU {time['mfu']:.0%}" if name == "training" else ""
    out.append(
        f"{step_name}: at least {time['step_seconds'] * 1e3:,.1f} ms, at most {rate}{share}; bound "
        "by "
        f"{time['bound']} (a roofline; not measured on this hardware)"
    )
    if part.get("likely_step_seconds"):
        out.append(
            f"likely {part['likely_step_seconds'] * 1e3:,.1f} ms, if the step comes as near to its "
            "bound as MaxText's published runs on this device"
        )
    if part.get("samples"):
        out += [
            "the time includes neither the sampling nor the scoring of completions",
            "the pages stay allocated while the model is trained: esurge.num_pages or "
            "esurge.max_num_seqs limits them",
        ]
    return out


def _verdict(memory: Mapping[str, Any]) -> str:
    free = abs(memory["free"]) / GIB
    return (
        f"fits: {free:.2f} GiB free" if memory["fits"] else f"does not fit: {free:.2f} GiB missing"
    )


def _margin(part: Mapping[str, Any]) -> str:
    """Return how much the estimated part can grow, or the exact part of a run that does not fit."""
    exact, estimated = part["exact_bytes"], part["estimated_bytes"]
    if not part["memory"]["fits"]:
        return f"; the exact parts alone need {exact / GIB:.2f} GiB"
    times = (part["memory"]["limit"] - exact) / estimated
    return f", also if the estimated parts (from gradients on) are {times:.1f} times larger"


def change_text(change: Mapping[str, Any] | PlanChange) -> str:
    """Return a change with its effect on one line."""
    one = change if isinstance(change, Mapping) else vars(change)
    verdict = "fits" if one["fits"] else "does not fit"
    note = "" if one["same"] else ", other numbers"
    return (
        f"{one['text']}: saves {one['saved'] / GIB:.2f} GiB, then {one['total'] / GIB:.2f} GiB "
        f"({verdict}), {one['slower']:.2f} times the time{note}"
    )


#: Name of a compiler in texts.
COMPILER_TITLES = {
    "cpu": "simulated CPU devices",
    "tpu": "the TPU slice, by libtpu",
    "gpu": "described GPUs",
}


def _format_compiled(compiled: Mapping[str, Any]) -> list[str]:
    on = f"{compiled['device']} ({COMPILER_TITLES[compiled['backend']]})"
    out = [f"compiled for {on}"]
    if compiled["rows"]:
        out.append("  train step                predicted       compiled    error")
    for row in compiled["rows"]:
        out.append(
            f"  {row['name']:<20}{row['predicted'] / GIB:>10.3f} GiB "
            f"{row['compiled'] / GIB:>10.3f} GiB {row['error']:>+8.1%}"
        )
    for step in compiled.get("steps", ()):
        out += ["", *_format_step(step, compiled["context"])]
    return out


def _format_step(step: Mapping[str, Any], context: int) -> list[str]:
    memory = step["memory"]
    total = memory["arguments"] + memory["outputs"] - memory["aliased"] + memory["temporary"]
    cached = "" if step["mfu"] is not None else f", {context:,} tokens of each in the cache"
    sent = {row["operation"]: row for row in step["operations"] if row["sent_bytes"]}
    collectives = ", ".join(
        f"{row['launches']:,.0f} {name} ({row['sent_bytes'] / GIB:.3f} GiB)"
        for name, row in sent.items()
    )
    out = [
        f"{step['name']}: {step['tokens']:,} tokens of {step['seqs']:,} sequences{cached}",
        f"  memory: {memory['arguments'] / GIB:.3f} GiB of arguments, "
        f"{memory['temporary'] / GIB:.3f} GiB temporary, {total / GIB:.3f} GiB together",
        f"  launches: {step['launches']:,.0f} ({step['launches_per_layer']:.1f} per layer), "
        f"{step['launches_at_most']:,.0f} with the longest branches",
        f"  waits for the host: {step['host_loops']:,.0f} loops, {step['host_branches']:,.0f} "
        f"branches; copies of the page pool: {step['pool_copies']:,.0f} "
        f"({step['pool_copied_bytes'] / GIB:.3f} GiB)",
        f"  collectives: {collectives or 'none'}",
        f"  {'operation':<28}{'launches':>10}{'GiB':>10}{'TFLOP':>10}{'ms':>10}{'share':>8}",
    ]
    for row in step["operations"]:
        out.append(
            f"  {row['operation']:<28}{row['launches']:>10,.0f}{row['bytes'] / GIB:>10.3f}"
            f"{row['flops'] / 1e12:>10.3f}{row['seconds'] * 1e3:>10.3f}"
            f"{row['seconds'] / step['seconds']:>8.1%}"
        )
    mfu = "" if step["mfu"] is None else f", MFU {step['mfu']:.0%}"
    out.append(
        f"  at least {step['seconds'] * 1e3:,.3f} ms, at most "
        f"{step['tokens_per_second']:,.0f} tokens/s{mfu} (each launch alone, without overlap)"
    )
    return out
