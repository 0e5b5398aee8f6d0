"""Models and train steps of a run without arrays, for the child process that compiles them.

This module imports jax, so only the child process of `ed_elarge.plan.compiled` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.sharding import placement
from ed_infra.sharding.mesh import Device, create_mesh, split_mesh
from ed_infra.specs import KEPT_CODES
from ed_layers.depth.stack import Stack
from ed_layers.quantization.formats import FORMATS
from ed_layers.quantization.model import QuantizationRules, quantized_matrices
from ed_models.checkpoints import hub
from ed_models.checkpoints.loading import prepare_module
from ed_models.checkpoints.pickled_files import open_tensors
from flax import nnx

from ed_elarge.config.run_config import RunConfig
from ed_elarge.plan.settings import ROW_ARRAYS, STEP_FORMS, token_arrays

if TYPE_CHECKING:
    import optax
    from ed_trainers.state import EasyDeLState


def abstract_model(
    run: RunConfig,
    vocab_size: int | None,
    devices: Sequence[Device] | None = None,
    *,
    is_base: bool = False,
    serves: bool = False,
) -> Any:
    """Return the model of a run; its variables hold shapes, dtypes and shardings.

    Args:
        run: the run.
        vocab_size: rows of the embedding of a new model; None = the configuration's.
        devices: devices, which may be described only; None = the devices of jax.
        is_base: whether the model has no adapters, and no quantized weights.
        serves: whether the model is one replica of the engine, without adapters.
    """
    config = _model_config(run, vocab_size, _default_layout(run, devices))
    if devices is not None or serves:
        config.set_model_mesh(_create_mesh(config, devices, run if serves else None))
    module = registry.get_module(run.task, config.model_type)
    rules = None
    if not is_base:
        config, rules = _find_weight_rules(run, module, config)
    loader = run.loader
    precision = None if loader.precision in (None, "default") else loader.precision

    def build() -> Any:
        model = module(config, loader.dtype, loader.param_dtype, precision, rngs=nnx.Rngs(0))
        section = run.adapters
        if rules is not None:
            model = model.quantize(rules)
        if section is None or is_base or serves:
            return model
        from ed_infra.specs import LoraSpec

        spec = LoraSpec(**section.model_dump(exclude={"name_or_path"}))
        return model.apply_lora(spec, seed=0)

    with nnx.use_eager_sharding(False):
        graphdef, state = nnx.split(nnx.eval_shape(build))
        placed = dict(nnx.to_flat_state(placement.shardings(state, config)))
        flat = [
            (path, variable.replace(_add_sharding(variable.get_value(), placed[path])))
            for path, variable in nnx.to_flat_state(state)
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(flat))


def _find_weight_rules(
    run: RunConfig, module: type, config: EasyDeLBaseConfig
) -> tuple[EasyDeLBaseConfig, QuantizationRules | None]:
    """Return the configuration of the model, and the rules of its quantized matrices or None."""
    from ed_elarge.building.parts import build_weight_format

    weights = run.weight_format
    if weights is None or weights.simulate:
        return config, None
    rules = build_weight_format(weights)
    if rules.dtype not in KEPT_CODES:
        return config, rules
    assert run.model is not None, "a plan has a model"
    revision = run.model.extra_kwargs.revision
    files = open_tensors(hub.resolve(str(run.model.name_or_path), revision=revision))
    checked = prepare_module(module, config, files, quantization=rules)
    return checked.config, checked.rules


def find_stored_codes(run: RunConfig, vocab_size: int | None) -> dict[str, tuple[float, int, int]]:
    """Return the matrices whose codes of a GGUF file a run keeps.

    Returns:
        canonical name -> bytes of a code, bytes of the scale and the zero of a group, and codes of
        a group; empty if the run keeps no codes.
    """
    weights = run.weight_format
    if weights is None or weights.quantization_method not in KEPT_CODES:
        return {}
    model = abstract_model(run, vocab_size, serves=True)
    stored_codes: dict[str, tuple[float, int, int]] = {}
    for names, matrix in quantized_matrices(model):
        code_bytes = matrix.codes.dtype.itemsize / FORMATS[matrix.format].in_byte
        group_arrays = jax.tree.leaves((matrix.scale, matrix.zero))
        group_bytes = sum(one.dtype.itemsize for one in group_arrays)
        stored_codes |= dict.fromkeys(names, (code_bytes, group_bytes, matrix.group_size))
    return stored_codes


def _default_layout(run: RunConfig, devices: Sequence[Device] | None) -> dict[str, bool]:
    """Return the layout of described devices, as the builders choose it for devices of jax."""
    from ed_esurge.model import choose_layout

    platform = devices[0].platform if devices else ""
    return choose_layout(platform) if run.trainer is None and platform == "gpu" else {}


def _model_config(run: RunConfig, vocab_size: int | None, layout: Mapping[str, bool]) -> Any:
    """Return the configuration of the model of a run, as the builders create it."""
    from ed_elarge.building.parts import new_config

    section = run.model
    assert section is not None, "a plan has a model"
    if section.config is not None:
        fields = None if vocab_size is None else {"vocab_size": vocab_size}
        return new_config(run, fields, layout)
    changes = {**layout, **{field: value for field, (_, value) in run.config_fields().items()}}
    changes.setdefault("sharding_axis_dims", run.sharding.axis_dims)
    changes.setdefault("sharding_axis_names", run.sharding.axis_names)
    directory = hub.resolve(str(section.name_or_path), revision=section.extra_kwargs.revision)
    return hub.read_config(directory, run.task, **changes)


def _create_mesh(
    config: EasyDeLBaseConfig, devices: Sequence[Device] | None, served: RunConfig | None
) -> Any:
    """Return the mesh of a configuration over devices; of a served run, that of one replica."""
    mesh = create_mesh(
        config.sharding_axis_dims,
        config.sharding_axis_names,
        config.sharding_dcn_axis_dims,
        devices=devices,
    )
    axis = None if served is None else served.esurge.data_parallelism_axis
    return mesh if axis is None or mesh.shape.get(axis, 1) == 1 else split_mesh(mesh, axis)[0]


def _add_sharding(value: object, sharding: object) -> Any:
    leaves, treedef = jax.tree.flatten(value)
    places = jax.tree.leaves(sharding)
    if len(places) != len(leaves):
        places = places * len(leaves)
    return jax.tree.unflatten(
        treedef,
        [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)
            for leaf, place in zip(leaves, places, strict=True)
        ],
    )


def lowered_train_step(run: RunConfig, model: Any, length: int) -> Any:
    """Return the lowered train step of a run whose method `settings.METHODS` lists."""
    from ed_trainers.methods import trainer_class
    from ed_trainers.optimizers import build_optimizer, build_schedule
    from ed_trainers.placement import Placement, microbatches
    from ed_trainers.roles.frozen import Frozen
    from ed_trainers.state import split_model
    from ed_trainers.step import build_train_step

    arguments = run.trainer
    assert arguments is not None, "a plan of training has a trainer"
    place = Placement(model.config)
    record = trainer_class(run.method).record
    method: Any = record.run(
        run.method,
        record,
        arguments,
        model,
        placement=place,
        weights=partial(_absent, "weights"),
        learned=partial(_absent, "learned"),
        present_reference=partial(_absent, "reference"),
    )
    frozen_models: dict[str, Any] = {}
    method.create_parts(frozen_models)
    method.frozen = Frozen(frozen_models)
    schedule = build_schedule(arguments, 1000)
    tx = build_optimizer(arguments, schedule)
    state = _state(split_model(model, arguments.trained_parameters), tx)
    rows = arguments.sequences_per_step
    host = _host_batch(run, length)
    parts = microbatches(method.prepare(host), arguments.gradient_accumulation_steps)
    names = list(parts)
    batch = jax.tree.unflatten(
        jax.tree.structure(parts),
        [
            jax.ShapeDtypeStruct(
                parts[name].shape,
                parts[name].dtype,
                sharding=place.sharding(
                    parts[name].shape,
                    parts.get_logical_axes(name)[: parts[name].ndim - 1],
                    stacked=True,
                ),
            )
            for name in names
        ],
    )
    step = build_train_step(
        state, method, schedule, rows=rows // arguments.gradient_accumulation_steps, seed=0
    )
    return step.lower(tuple(jax.tree.leaves(state)), batch)


def _host_batch(run: RunConfig, length: int) -> dict[str, np.ndarray]:
    """Return a batch as the method of the run reads it; every value is 1."""
    arguments, form = run.trainer, STEP_FORMS[run.method]
    assert arguments is not None, "a plan of training has a trainer"
    rows = arguments.sequences_per_step
    if form.samples:
        integer_names = ("input_ids", "segment_ids", "position_ids", "targets")
        tokens = {
            name: np.ones((rows, length), np.int32 if name in integer_names else np.float32)
            for name in token_arrays(arguments)
        }
        return tokens | {name: np.ones(rows, np.float32) for name in ROW_ARRAYS}
    sides = ("",) if form.sides == 1 else ("chosen_", "rejected_")
    return {
        f"{side}{name}": np.ones((rows, length), np.int32)
        for side in sides
        for name in ("input_ids", "segment_ids")
    }


def _state(
    parts: tuple[nnx.GraphDef, nnx.State, nnx.State], tx: optax.GradientTransformation
) -> EasyDeLState:
    from ed_trainers.placement import replicate_sharding
    from ed_trainers.state import EasyDeLState

    graphdef, graphstate, graphother = parts
    everywhere = replicate_sharding(jax.tree.leaves(graphstate)[0].sharding)
    step: Any = jax.ShapeDtypeStruct((), np.int32, sharding=everywhere)
    return EasyDeLState(step, graphstate, graphother, None, graphdef, tx).abstract(tx)


def _absent(name: str) -> Any:
    raise AssertionError(f"a step that is only compiled has no {name}")


def tensors(model: object) -> list[dict[str, Any]]:
    """Return name, shape of one layer, number of layers, axes and dtype of each variable."""
    from ed_infra import parameter_names

    out = []
    for path, variable in nnx.to_flat_state(nnx.state(model)):
        names = parameter_names.canonical(path)
        stacked = parameter_names.is_stacked(path)
        axes = variable.get_metadata().get("axes")
        for leaf in jax.tree.leaves(variable.get_value()):
            shape = leaf.shape[1:] if stacked else leaf.shape
            out.append(
                {
                    "names": list(names),
                    "shape": list(shape),
                    "axes": None if axes is None else list(axes),
                    "dtype": str(leaf.dtype),
                    "kind": type(variable).__name__,
                }
            )
    return out


__all__ = ["Stack", "abstract_model", "lowered_train_step", "tensors"]
