"""Replaces sub-modules by rules over their names; LoRA and quantization use this module.

A replacement receives the module of one layer in every storage layout: in a scanned stack the
replacement is mapped over the layers. Rules that treat the layers of a run differently split the
run; the names of the parameters do not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from ed_infra import parameter_names
from ed_infra.errors import ConfigError
from ed_infra.parameter_names import Run, split_runs
from ed_infra.rules import Rules
from flax import nnx

from ed_layers.depth.stack import Stack

M = TypeVar("M", bound=nnx.Module)

#: `(module, key) -> module`: creates the replacement; the key is for new parameters.
Replace = Callable[[nnx.Module, jax.Array], nnx.Module]
#: A class of modules, or several.
Kinds = type | tuple[type, ...]
ModulePath = tuple[str | int, ...]


def transform(
    model: M,
    rules: Rules[Replace] | Rules[Replace | None],
    *,
    key: jax.Array | None = None,
    of: Kinds = nnx.Module,
) -> M:
    """Return a copy of a model in which the sub-modules that rules match are replaced.

    Args:
        model: any module; the copy shares the unchanged arrays.
        rules: canonical name of a module (`model.layers.3.self_attn.q_proj`) -> replacement.
        key: of new random parameters; each module gets `fold_in(key, crc of its name)`.
        of: only modules of this class, or of one of these, are matched (`Linear`).

    Raises:
        ConfigError: a rule matches no module of the class, or a replacement refuses a module.
    """
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, state)
    key = jax.random.key(0) if key is None else key
    for path, stack in list(_stacks(model)):
        if stack.layout == "stacked" and _tells_layers_apart(stack, path, rules, of):
            _split_stack(stack, path, rules, of)
    for path, module in list(_modules(model, of)):
        replace = rules.at(path)
        if replace is not None:
            names = parameter_names.canonical(path)
            keys = [_derive_key(key, name) for name in names]
            try:
                module = _replace_module(
                    module, replace, keys, stacked=parameter_names.is_stacked(path)
                )
            except ConfigError as error:
                raise ConfigError(f"{names[0]}: {error}") from None
            _put(model, path, module)
    rules.check_used()
    return model


def _modules(model: nnx.Module, of: Kinds) -> Iterator[tuple[ModulePath, nnx.Module]]:
    """Return modules of a class with their storage paths; modules inside a match are omitted."""
    matched: list[ModulePath] = []
    for path, node in sorted(nnx.iter_modules(model), key=lambda item: len(item[0])):
        path = parameter_names.normalize_parameter_name(path)
        inside = any(path[: len(outer)] == outer for outer in matched)
        if path and isinstance(node, of) and not isinstance(node, nnx.List) and not inside:
            if of is not nnx.Module:
                matched.append(path)
            yield path, node


def _stacks(model: nnx.Module) -> Iterator[tuple[ModulePath, Stack]]:
    for path, node in nnx.iter_modules(model):
        if isinstance(node, Stack):
            yield parameter_names.normalize_parameter_name(path), node


def _tells_layers_apart(stack: Stack, path: ModulePath, rules: Rules[Any], of: Kinds) -> bool:
    """Return whether the layers of any run of a stack would get different replacements."""
    for inner, _ in _modules(stack, of):
        names = parameter_names.canonical((*path, *inner))
        if len({id(hit[1]) if (hit := rules.match(name)) else None for name in names}) > 1:
            return True
    return False


def _split_stack(stack: Stack, path: ModulePath, rules: Rules[Any], of: Kinds) -> None:
    """Split the runs of a stack, so that all layers of a run get the same replacements."""
    kinds: list[object] = []
    for layer in range(stack.num_layers):
        kind: list[object] = []
        for run in stack.runs:
            slots = [slot for slot in range(run.period) if layer in run.layers(slot)]
            for slot in slots:
                kind.append((run.start, slot))
                for inner, _ in _modules(getattr(stack, run.name)[slot], of):
                    name = ".".join(map(str, (*path, layer, *inner)))
                    hit = rules.match(name)
                    kind.append((inner, id(hit[1]) if hit else None))
        kinds.append(tuple(kind))
    if stack.uncut is None:
        stack.uncut = stack.runs
    stack.to_layout("leaves")
    stack.runs = split_runs(kinds)
    stack.to_layout("stacked")


def rejoin(model: nnx.Module) -> None:
    """Join split runs in place where their layers are equal again."""
    for _, stack in _stacks(model):
        if stack.layout != "stacked" or stack.uncut is None:
            continue
        stack.to_layout("leaves")
        kinds: list[object] = []
        for layer in range(stack.num_layers):
            graphdef, state = nnx.split(getattr(stack, f"layer_{layer}"))
            shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]
            kinds.append((_place(stack.uncut, layer), graphdef, shapes))
        stack.runs = split_runs(kinds)
        stack.to_layout("stacked")
        if stack.runs == stack.uncut:
            del stack.uncut


def _place(runs: tuple[Run, ...], layer: int) -> tuple[int, int]:
    """Return the first layer of the run that contains a layer, and its slot in the period."""
    run = next(run for run in runs if run.start <= layer < run.start + run.length)
    return run.start, (layer - run.start) % run.period


def _replace_module(
    module: nnx.Module, replace: Replace, keys: list[jax.Array], *, stacked: bool
) -> nnx.Module:
    """Return the replacement of one module, or of the equal modules of a scanned stack."""
    if not stacked:
        return replace(module, keys[0])
    graphdef, state = nnx.split(module)
    graphdefs: list[nnx.GraphDef] = []

    def one(layer: nnx.State, key: jax.Array) -> nnx.State:
        new, arrays = nnx.split(replace(nnx.merge(graphdef, layer), key))
        graphdefs.append(new)
        return arrays

    arrays = jax.vmap(one)(state, jnp.stack(keys))
    return nnx.merge(graphdefs[0], arrays)


def _derive_key(key: jax.Array, name: str) -> jax.Array:
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def _put(model: nnx.Module, path: ModulePath, module: nnx.Module) -> None:
    parent: Any = model
    for part in path[:-1]:
        parent = parent[part] if isinstance(part, int) else getattr(parent, part)
    if isinstance(path[-1], int):
        parent[path[-1]] = module
    else:
        setattr(parent, path[-1], module)
