"""Run a small model of `transformers`, and record how the parts of its layers depend on each other.

The inputs and outputs of all modules are recorded with hooks. The input of each part of a layer is
then expressed as a sum of earlier outputs, so the order of norms, the places of additions and their
factors are measurements, not guesses from the source.

Legend: b rows, s positions, d hidden.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

#: The input of a layer in the sums of `Layer.sources`.
STREAM = "x"
#: Smallest coefficient of a sum that counts.
LEAST = 1e-3


class NotTraced(ValueError):
    """The model has a structure that the tool cannot describe; the message names it."""


@dataclass
class Call:
    """The first tensors that a module received and returned."""

    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


@dataclass
class Rotation:
    """A call of the function that applies rotary positions: query, cosine, sine, and result."""

    layer: int
    arguments: list[np.ndarray]
    result: np.ndarray


@dataclass
class Layer:
    """One layer of the model.

    Attributes:
        index: number of the layer.
        module: the module of torch.
        children: name of a part -> its module.
        sources: name of a part, or `"out"` -> the outputs whose sum it receives, with factors.
        rotated: whether the layer rotates queries and keys.
        loose: linear layers that are parts of the layer itself: a feed-forward layer of which
            `children` contains only the last one.
    """

    index: int
    module: Any
    children: dict[str, Any]
    sources: dict[str, dict[str, float]]
    rotated: bool
    loose: tuple[str, ...] = ()


@dataclass
class Trace:
    """A small model of torch with its recorded calls.

    Attributes:
        model: the causal language model. config: its configuration.
        body: name of the body, such as `"transformer"`.
        embedding, stack, norm, head: full names of modules; `norm` and `head` may be None.
        layers: the layers.
        calls: name of a module -> its call.
        rotations: calls of the rotary function.
        added_parameters: embeddings beside that of the tokens, such as learned positions.
    """

    model: Any
    config: Any
    body: str
    embedding: str
    stack: str
    norm: str | None
    head: str | None
    layers: list[Layer]
    calls: dict[str, Call]
    rotations: list[Rotation]
    added_parameters: list[str] = field(default_factory=list)

    @property
    def source_file(self) -> Path:
        """The modeling file of the model."""
        return Path(inspect.getsourcefile(type(self.model)) or "")

    def name_child(self, layer: Layer, child: str) -> str:
        """Return the full name of a part of a layer."""
        return f"{self.stack}.{layer.index}.{child}"


def trace_model(model: Any, ids: np.ndarray) -> Trace:
    """Run a causal language model on token ids [b, s], and describe its layers.

    Raises:
        NotTraced: the model has no list of equal layers, or a part receives no sum of earlier ones.
    """
    import torch

    torch.manual_seed(0)
    calls: dict[str, Call] = {}
    names = {module: name for name, module in model.named_modules()}
    rotations: list[Rotation] = []
    running: list[int] = [-1]
    stack = _find_stack(model)
    handles = []
    for number, layer in enumerate(model.get_submodule(stack)):

        def enter(*_: object, number: int = number) -> None:
            running[0] = number

        handles.append(layer.register_forward_pre_hook(enter))
    for module, name in names.items():
        record = functools.partial(_record, calls, name)
        handles.append(module.register_forward_hook(record, with_kwargs=True))
    module = sys.modules[type(model).__module__]
    with _record_rotations(module, rotations, running), torch.no_grad():
        model(torch.tensor(ids, dtype=torch.long), use_cache=False)
    for handle in handles:
        handle.remove()
    return _describe(model, stack, calls, rotations)


def _record(
    calls: dict[str, Call], name: str, module: Any, args: Any, kwargs: Any, out: Any
) -> None:
    if name not in calls:
        inputs = [*args, *(value for key, value in kwargs.items() if "hidden" in key), out]
        arrays = list(_to_arrays(inputs[:-1]))
        # Experts receive the weights of the chosen experts by position.
        calls[name] = Call(arrays, list(_to_arrays([out])))


def _to_arrays(values: Any) -> Iterator[np.ndarray]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value.detach().float().numpy() if value.is_floating_point() else value.numpy()
        elif isinstance(value, tuple | list):
            yield from _to_arrays(value)
        elif hasattr(value, "last_hidden_state"):
            yield value.last_hidden_state.detach().numpy()
        elif hasattr(value, "logits") and value.logits is not None:
            yield value.logits.detach().numpy()


@contextmanager
def _record_rotations(module: Any, rotations: list[Rotation], running: list[int]) -> Iterator[None]:
    """Record the calls of the functions of a modeling file that apply rotary positions."""
    originals: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in vars(module).items()
        if callable(value) and name.startswith("apply_") and "rot" in name
    }

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            arrays = list(_to_arrays([*args, *kwargs.values()]))
            rotations.append(Rotation(running[0], arrays, next(_to_arrays([result]))))
            return result

        return call

    for name, function in originals.items():
        setattr(module, name, wrap(function))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(module, name, function)


def _find_stack(model: Any) -> str:
    """Return the name of the list of layers."""
    import torch

    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList)
        and len(module) == model.config.num_hidden_layers
        and "." in name
    ]
    if not lists:
        raise NotTraced("the model has no list of num_hidden_layers layers")
    return min(lists, key=lambda name: name.count("."))


def _describe(model: Any, stack: str, calls: dict[str, Call], rotations: list[Rotation]) -> Trace:
    names = {module: name for name, module in model.named_modules()}
    body = stack.rpartition(".")[0]
    body_children = dict(model.get_submodule(body).named_children())
    embedding = names[model.get_input_embeddings()]
    head = model.get_output_embeddings()
    layers = []
    for index, module in enumerate(model.get_submodule(stack)):
        prefix = f"{stack}.{index}"
        children = {
            name: child
            for name, child in module.named_children()
            if any(True for _ in child.parameters()) and f"{prefix}.{name}" in calls
        }
        outputs = {name: calls[f"{prefix}.{name}"].outputs for name in children}
        order = [
            n
            for n in calls
            if n.startswith(f"{prefix}.") and n.removeprefix(f"{prefix}.") in children
        ]
        ordered = [name.removeprefix(f"{prefix}.") for name in order]
        loose = tuple(name for name in ordered if type(children[name]).__name__ == "Linear")
        ordered = [name for name in ordered if name not in loose[:-1]]
        known = {STREAM: calls[prefix].inputs[0]}
        sources: dict[str, dict[str, float]] = {}
        for name in ordered:
            place = f"{prefix}.{loose[0] if name in loose else name}"
            sources[name] = find_sum(calls[place].inputs[0], known, place)
            known[name] = outputs[name][0]
        sources["out"] = find_sum(calls[prefix].outputs[0], known, f"{prefix}: output")
        rotated = any(rotation.layer == index for rotation in rotations)
        children = {name: children[name] for name in ordered}
        layers.append(Layer(index, module, children, sources, rotated, loose))
    norms = [
        f"{body}.{name}"
        for name, child in body_children.items()
        if is_norm(child) and f"{body}.{name}" in calls
    ]
    added = [
        f"{body}.{name}"
        for name, child in body_children.items()
        if type(child).__name__.endswith(("Embedding", "Positional"))
        and f"{body}.{name}" != embedding
        and any(True for _ in child.parameters())
    ]
    return Trace(
        model=model,
        config=model.config,
        body=body,
        embedding=embedding,
        stack=stack,
        norm=norms[-1] if norms else None,
        head=names.get(head),
        layers=layers,
        calls=calls,
        rotations=rotations,
        added_parameters=added,
    )


def is_norm(module: Any) -> bool:
    """Return whether a module is a norm with one weight."""
    parameters = dict(module.named_parameters())
    return "Norm" in type(module).__name__ and "weight" in parameters


def find_sum(target: np.ndarray, known: Mapping[str, np.ndarray], place: str) -> dict[str, float]:
    """Return the outputs whose sum is an array, with their factors.

    Raises:
        NotTraced: no sum of the outputs is the array.
    """
    target = target.reshape(-1)
    arrays = {n: a.reshape(-1) for n, a in known.items() if a.size == target.size}
    for name, array in reversed(arrays.items()):
        if np.allclose(array, target, atol=1e-6):
            return {name: 1.0}
    matrix = np.stack(list(arrays.values()), axis=1).astype(np.float64)
    solution = np.linalg.lstsq(matrix, target.astype(np.float64), rcond=None)[0]
    if np.abs(matrix @ solution - target).max() > 1e-3 * max(1.0, float(np.abs(target).max())):
        raise NotTraced(f"{place} receives no sum of {', '.join(arrays)}")
    terms = zip(arrays, solution, strict=True)
    return {name: round(float(f), 4) for name, f in terms if abs(f) > LEAST}
