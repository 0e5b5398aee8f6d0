"""The header of a run: what is trained, on which data, devices and dtypes, and for how long.

The loop prints the header of every method before the first program is compiled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

import jax
from ed_layers.quantization import QuantParam
from flax import nnx

from ed_trainers.batches import Feed
from ed_trainers.contract import MethodRun
from ed_trainers.figures.progress import format_duration
from ed_trainers.state import EasyDeLState


def format_header(
    method: MethodRun,
    state: EasyDeLState,
    feed: Feed,
    total_steps: int,
    settings: Mapping[str, object] | None = None,
    seconds_per_step: float | None = None,
) -> str:
    """Return the lines of the header.

    Args:
        method: the method with its options and its mesh.
        state: the state before the next step.
        feed: the training batches.
        total_steps: number of updates of the whole run.
        settings: values of a run file; `model` names the model.
        seconds_per_step: the rate of the run before this process, if it resumes.
    """
    arguments, done = method.arguments, int(state.step)
    lines = {
        "model": _describe_model(state, settings or {}),
        "data": _describe_data(feed, arguments.sequences_per_step),
        "steps": _describe_steps(total_steps, done, feed, arguments.gradient_accumulation_steps),
        "devices": _describe_devices(method, state),
        "directory": str(arguments.save_directory),
    }
    if seconds_per_step is not None:
        lines["time"] = f"about {format_duration((total_steps - done) * seconds_per_step)} left"
    return "\n".join(f"{name:<10} {text}" for name, text in lines.items() if text)


def format_count(count: float) -> str:
    """Return a number of parameters or tokens with three digits: `4.88M`."""
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:g}"


def _describe_model(state: EasyDeLState, settings: Mapping[str, object]) -> str:
    trained = sum(leaf.size for leaf in jax.tree.leaves(state.graphstate))
    total = trained + _count_frozen(state.graphother)
    section = settings.get("model")
    name = section.get("name_or_path") if isinstance(section, Mapping) else None
    share = "" if trained == total else f" ({trained / max(total, 1):.2%})"
    return (
        f"{name or type(state.model).__name__}, trains {format_count(trained)}{share} of "
        f"{format_count(total)} parameters"
    )


def _count_frozen(variables: nnx.State) -> int:
    """Return the number of frozen parameters; a quantized matrix counts its values."""
    count = 0
    for _, variable in nnx.to_flat_state(variables):
        if isinstance(variable, QuantParam):
            count += math.prod(variable.shape)
        elif issubclass(getattr(variable, "type", type(variable)), nnx.Param):
            count += sum(leaf.size for leaf in jax.tree.leaves(variable))
    return count


def _describe_data(feed: Feed, sequences: int) -> str:
    statistics = getattr(feed.dataset, "stats", None)
    known = statistics if isinstance(statistics, Mapping) else {}
    steps, length = feed.count_steps(1), getattr(feed.dataset, "seq_length", None)
    rows, size = known.get("rows"), getattr(feed.dataset, "batch_size", sequences)
    if isinstance(rows, int):
        parts = [f"{rows:,} {'row' if rows == 1 else 'rows'} in an epoch"]
    elif steps is None:
        parts = ["rows of a stream"]
    else:  # the last batch of an epoch may be smaller
        parts = [f"at most {steps * size:,} rows in an epoch"]
    if isinstance(tokens := known.get("tokens"), int):
        parts.append(f"{format_count(tokens)} tokens")
    if isinstance(length, int):
        parts.append(f"at most {length:,} tokens in a row")
    return ", ".join(parts)


def _describe_steps(total: int, done: int, feed: Feed, microbatches: int) -> str:
    epoch = feed.count_steps(1)
    epochs = f" ({total / epoch:.3g} epochs)" if epoch else ""
    first = f", after {done:,} steps that are done" if done else ""
    size = getattr(feed.dataset, "batch_size", None)
    batch = f", {size:,} rows in a step" if isinstance(size, int) else ""
    parts = f" in {microbatches} microbatches" if batch and microbatches > 1 else ""
    return f"{total:,}{epochs}{batch}{parts}{first}"


def _describe_devices(method: MethodRun, state: EasyDeLState) -> str:
    config = method.placement.config
    mesh, model = config.mesh, state.model
    device = mesh.devices.flat[0]
    axes = ", ".join(f"{name} {size}" for name, size in mesh.shape.items() if size > 1)
    dtypes = _list_dtypes(jax.tree.leaves(state.graphstate))
    frozen = _list_dtypes(jax.tree.leaves(state.graphother))
    text = f"{mesh.size} x {device.device_kind}" + (f" ({axes})" if axes else "")
    computes = getattr(model, "dtype", None)
    if computes is not None:
        text += f", computes in {jax.numpy.dtype(computes).name}"
    text += f", trained parameters {dtypes}"
    return text + (f", frozen {frozen}" if frozen and frozen != dtypes else "")


def _list_dtypes(leaves: Iterable[object]) -> str:
    """Return the most frequent dtype of arrays, by their size."""
    sizes: Counter[str] = Counter()
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and not jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            sizes[str(leaf.dtype)] += leaf.size
    return sizes.most_common(1)[0][0] if sizes else ""
