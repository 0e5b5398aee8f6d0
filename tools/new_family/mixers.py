"""Express the feed-forward parts of a trace: dense layers, and experts with their router.

Legend: b rows, s positions, d hidden, f intermediate, e experts, k experts of a token.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from tools.new_family.draft import Sparse
from tools.new_family.parts import find_linears, find_part, pick
from tools.new_family.tiny import list_fields
from tools.new_family.trace import Call, Layer, NotTraced, Trace, is_norm
from tools.new_family.values import find_ratio, name_value

#: Names of the last projection of a feed-forward layer.
DOWN = (
    "down_proj",
    "w2",
    "c_proj",
    "fc2",
    "fc_out",
    "dense_4h_to_h",
    "output_linear",
    "output_dense",
)
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation", "afn")
#: Fields of sizes of feed-forward layers, in the order in which they are tried.
SIZES = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("shared_intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
)
COUNTS = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SCALES = (
    "routed_scaling_factor",
    "router_scaling_factor",
    "route_scale",
    "moe_routed_scaling_factor",
)
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k")


def activate(name: str, x: np.ndarray) -> np.ndarray:
    """Apply an activation of transformers."""
    import torch
    from transformers.activations import ACT2FN

    return ACT2FN[name](torch.tensor(x)).numpy()


def multiply(linear: Any, x: np.ndarray) -> np.ndarray:
    """Apply a linear layer of torch, or a `Conv1D`."""
    import torch

    with torch.no_grad():
        return linear(torch.tensor(x, dtype=torch.float32)).numpy()


def name_size(config: Any, size: int, default: str = "intermediate_size") -> str | None:
    """Return an expression for a size of a feed-forward layer; None = the default field has it."""
    if getattr(config, default, None) == size:
        return None
    fields = list_fields(type(config))
    for name in SIZES:
        if name in fields and getattr(config, name) == size:
            return f"config.{name}"
    for name, count in itertools.product(SIZES, COUNTS):
        known = name in fields and count in fields and getattr(config, name)
        if known and getattr(config, name) * getattr(config, count) == size:
            return f"config.{name} * config.{count}"
    if size % config.hidden_size == 0:
        multiple = f"{size // config.hidden_size} * config.hidden_size"
        inner = [n for n in ("n_inner",) if n in fields and getattr(config, n) is None]
        return f"config.{inner[0]} or {multiple}" if inner else multiple
    raise NotTraced(f"no field of the configuration gives the intermediate size {size}")


def list_mixers(layer: Layer) -> list[str]:
    """Return the names of the feed-forward parts of a layer."""
    attention = find_part(layer, attention=True)
    return [n for n, child in layer.children.items() if not is_norm(child) and n != attention]


def is_sparse(module: Any) -> bool:
    """Return whether a feed-forward part has experts."""
    return any("Experts" in type(child).__name__ for child in module.modules())


def describe_dense(
    trace: Trace, layer: Layer, names: list[str], toggled: Callable[[str], set[str]]
) -> dict[str, Any]:
    """Return the class of a dense layer, its arguments, and the modules of its projections."""
    if len(names) == 1:
        prefix, module = names[0], layer.children[names[0]]
        linears = find_linears(module)
        call = trace.calls[trace.name_child(layer, prefix)]
    else:  # the layer itself has the projections
        prefix, linears = "", {name: getattr(layer.module, name) for name in names}
        full = [trace.name_child(layer, name) for name in names]
        call = Call(trace.calls[full[0]].inputs, trace.calls[full[-1]].outputs)
    facts = _match_dense(trace.config, linears, call, toggled)
    return {**facts, "prefix": prefix}


def _match_dense(
    config: Any, linears: Mapping[str, Any], call: Call, toggled: Callable[[str], set[str]]
) -> dict[str, Any]:
    down = pick(linears, DOWN)
    others = [name for name in linears if name != down]
    if down is None or not 1 <= len(others) <= 2:
        raise NotTraced(f"a feed-forward part has the linear layers {sorted(linears)}")
    fields = list_fields(type(config))
    activations = [n for n in ACTIVATIONS if n in fields and isinstance(getattr(config, n), str)]
    if not activations:
        activations = [""]
    width = multiply(linears[others[0]], np.zeros((1, config.hidden_size))).shape[-1]
    field, kind, modules = _find_form(config, linears, activations, others, down, call)
    arguments: dict[str, str] = {}
    size = name_size(config, width // (2 if kind == "fused" else 1))
    if size is not None:
        arguments["*size"] = size
    if field != "hidden_act":
        arguments["hidden_act"] = f"config.{field}" if field else '"gelu"'
    first = next(iter(modules.values()))
    bias = sorted(toggled(f"{first}.bias"))
    value = f"config.{bias[0]}" if bias else str(linears[first].bias is not None)
    if value != ("True" if kind == "MLP" else "False"):
        arguments["bias"] = value
    return {
        "feed_forward": "MLP" if kind == "MLP" else "GatedMLP",
        "feed_forward_arguments": arguments,
        "modules": {**modules, "down_proj": down},
    }


def _find_form(
    config: Any,
    linears: Mapping[str, Any],
    activations: list[str],
    others: list[str],
    down: str,
    call: Call,
) -> tuple[str, str, dict[str, str]]:
    """Return the field of the activation, the kind of the layer, and the names of projections."""
    for field, (kind, modules) in itertools.product(activations, list(_list_forms(others))):
        name = getattr(config, field) if field else "gelu"
        out = _run_dense(linears, kind, modules, down, name, call.inputs[0])
        if out.shape == call.outputs[0].shape and np.allclose(out, call.outputs[0], atol=1e-4):
            return field, kind, modules
    raise NotTraced("no known feed-forward layer computes the outputs of this one")


def _list_forms(others: list[str]) -> Iterator[tuple[str, dict[str, str]]]:
    if len(others) == 1:
        yield "fused", {"gate_up": others[0]}
        yield "MLP", {"up_proj": others[0]}
        return
    for gate, up in itertools.permutations(others):
        yield "GatedMLP", {"gate_proj": gate, "up_proj": up}


def _run_dense(
    linears: Mapping[str, Any],
    kind: str,
    modules: dict[str, str],
    down: str,
    act: str,
    x: np.ndarray,
) -> np.ndarray:
    first = multiply(linears[next(iter(modules.values()))], x)
    if kind == "fused":
        gate, up = np.split(first, 2, axis=-1) if first.shape[-1] % 2 == 0 else (first, first)
        inner = activate(act, gate) * up
    elif kind == "MLP":
        inner = activate(act, first)
    else:
        inner = activate(act, first) * multiply(linears[modules["up_proj"]], x)
    try:
        return multiply(linears[down], inner)
    except RuntimeError:  # another size
        return np.full((1,), np.nan)


# Experts.


def describe_sparse(
    trace: Trace, layer: Layer, names: list[str], toggled: Callable[[str], set[str]]
) -> dict[str, Any]:
    """Return the experts of a layer, and the modules of their parts.

    Raises:
        NotTraced: the router computes other weights than those of `Router`.
    """
    config = trace.config
    block = next(name for name in names if is_sparse(layer.children[name]))
    module, prefix = layer.children[block], trace.name_child(layer, block)
    experts = next(n for n, m in module.named_modules() if "Experts" in type(m).__name__)
    call = trace.calls[f"{prefix}.{experts}"]
    hidden = next(a for a in call.inputs if a.shape[-1] == config.hidden_size)
    ids = next((a for a in call.inputs if a.dtype.kind == "i"), None)
    weights = next(
        (
            a
            for a in call.inputs
            if ids is not None and a.shape == ids.shape and a.dtype.kind == "f"
        ),
        None,
    )
    if ids is None or weights is None:
        raise NotTraced("the experts receive no numbers and weights of experts")
    linears = {
        n: m for n, m in module.named_modules() if n and getattr(m, "weight", None) is not None
    }
    gate, matrix = _find_gate(linears, experts, config)
    logits = hidden.reshape(-1, config.hidden_size) @ matrix.T
    bias = getattr(linears[gate], "bias", None)
    if bias is not None and bias.shape == (matrix.shape[0],):
        logits = logits + bias.detach().numpy()
    router = match_router(config, module, logits, ids, weights)
    if bias is not None and bias.shape == (matrix.shape[0],):
        router["bias"] = "True"
    fields = list_fields(type(config))
    size = _find_expert_size(module.get_submodule(experts), config)
    modules = {"gate": gate, "experts": experts}
    shared_name, shared_linears = _find_shared(layer, names, block, module, experts, gate)
    shared, is_optional, arguments = None, False, dict[str, str]()
    if shared_name is not None:
        down = pick(shared_linears, DOWN)
        assert down is not None
        width = multiply(
            shared_linears[next(n for n in shared_linears if n != down)],
            np.zeros((1, config.hidden_size)),
        ).shape[-1]
        width //= 2 if len(shared_linears) == 2 else 1
        shared = name_size(config, width, default="") or "None"
        is_optional = _is_shared_optional(trace, shared, shared_name.removeprefix("../"))
        modules["shared"] = shared_name
        biases = sorted(toggled(f"{shared_name}.{down}.bias"))
        shared += f", bias=config.{biases[0]}" if biases else ""
    if "shared_expert_gate" in linears:
        arguments["shared_gate"] = "True"
        modules["shared_gate"] = "shared_expert_gate"
    count = next(f"config.{n}" for n in EXPERTS if n in fields)
    per_token = next(f"config.{n}" for n in PER_TOKEN if n in fields)
    sparse = Sparse(count, per_token, size, router, shared, is_optional, arguments=arguments)
    correction = find_correction(module)
    if correction is not None:
        modules["correction"] = correction
    return {
        "sparse": sparse,
        "modules": modules,
        "prefix": block,
        "shared_linears": sorted(shared_linears),
    }


def _is_shared_optional(trace: Trace, size: str, name: str) -> bool:
    """Return whether the model has no shared experts if the field of their size is 0."""
    field = size.removeprefix("config.")
    if field not in list_fields(type(trace.config)):
        return False
    import torch

    config = copy.deepcopy(trace.config)
    setattr(config, field, 0)
    with torch.device("meta"):
        model = type(trace.model)(config)
    return not any(f".{name}." in parameter for parameter, _ in model.named_parameters())


def _find_gate(linears: Mapping[str, Any], experts: str, config: Any) -> tuple[str, np.ndarray]:
    counts = [getattr(config, name, None) for name in EXPERTS]
    for name, module in linears.items():
        weight = module.weight.detach().numpy()
        is_router = weight.ndim == 2 and weight.shape[1] == config.hidden_size
        if is_router and weight.shape[0] in counts and not name.startswith(experts):
            return name, weight
    raise NotTraced("the experts have no router with a matrix [e, d]")


def _find_expert_size(experts: Any, config: Any) -> str:
    sizes = {tuple(p.shape) for _, p in experts.named_parameters()}
    for name in ("moe_intermediate_size", "intermediate_size"):
        size = getattr(config, name, None)
        if any(size in shape for shape in sizes):
            return f"config.{name}"
    raise NotTraced(f"no field gives the size of the experts {sorted(sizes)}")


def _find_shared(
    layer: Layer, names: list[str], block: str, module: Any, experts: str, gate: str
) -> tuple[str | None, dict[str, Any]]:
    """Return the shared experts and their linear layers: in the block, or beside it."""
    for name in names:
        if name != block:
            return f"../{name}", find_linears(layer.children[name])
    for name, child in module.named_children():
        linears = find_linears(child)
        if name not in (experts, gate) and len(linears) >= 2 and not gate.startswith(f"{name}."):
            return name, linears
    return None, {}


def match_router(
    config: Any, module: Any, logits: np.ndarray, ids: np.ndarray, weights: np.ndarray
) -> dict[str, str]:
    """Return the arguments of `Router` with which it chooses the same experts and weights.

    Args:
        config: the configuration of the model.
        module: the block with the experts.
        logits: [n, e]. ids, weights: [n, k].
    """
    n, k = ids.shape[0], ids.shape[-1]
    ids, weights = ids.reshape(n, k), weights.reshape(n, k)
    correction = find_correction(module)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    forms = {
        "softmax": exponents / exponents.sum(-1, keepdims=True),
        "sigmoid": 1 / (1 + np.exp(-logits)),
    }
    fields = list_fields(type(config))
    for score, values in forms.items():
        chosen = np.take_along_axis(values, ids.astype(int), axis=-1)
        for normalize in (True, False):
            expected = chosen / chosen.sum(-1, keepdims=True) if normalize else chosen
            factor = find_ratio(weights, expected)
            if factor is None:
                continue
            router = {} if score == "softmax" else {"score": '"sigmoid"'}
            if "norm_topk_prob" in fields:
                router["normalize"] = "config.norm_topk_prob"
            elif not normalize:
                router["normalize"] = "False"
            scale = _name_scale(config, factor)
            if scale != "1.0":
                router["scale"] = scale
            if correction is not None:
                router["selection_bias"] = "True"
                bias = dict([*module.named_parameters(), *module.named_buffers()])[correction]
                if not chooses(values, bias, ids) and chooses(logits, bias, ids):
                    router["ranks_logits"] = "True"
            if getattr(config, "n_group", None) and getattr(config, "topk_group", None):
                router |= {"groups": "config.n_group", "groups_chosen": "config.topk_group"}
            return router
    raise NotTraced("the router weighs its experts neither by a softmax nor by sigmoids")


def chooses(ranks: np.ndarray, bias: Any, ids: np.ndarray) -> bool:
    """Return whether the chosen experts have the largest sums of ranks [n, e] and bias [e]."""
    order = np.argsort(-(ranks + bias.detach().numpy().reshape(-1)), axis=-1)
    return bool((np.sort(order[:, : ids.shape[-1]]) == np.sort(ids)).all())


def find_correction(module: Any) -> str | None:
    """Return the name of a bias that takes part only in the choice of experts."""
    names = [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]
    return next((n for n in names if "correction_bias" in n or n.endswith("expert_bias")), None)


def _name_scale(config: Any, factor: float) -> str:
    for name in SCALES:
        if name in list_fields(type(config)):
            return f"config.{name}"
    text = name_value(config, factor)
    if text is None:
        raise NotTraced(f"the router multiplies its weights by {factor}")
    return text


def describe_condition(trace: Trace) -> tuple[str | None, str | None]:
    """Return which layers have experts, as an expression for `index`, and that of `layer_kinds`."""
    config = trace.config
    has = [any(is_sparse(layer.children[n]) for n in list_mixers(layer)) for layer in trace.layers]
    if all(has):
        return None, None
    fields = list_fields(type(config))
    forms: list[tuple[str, Callable[[int], bool], str]] = []
    if "mlp_layer_types" in fields:
        forms.append(
            (
                'config.mlp_layer_types[index] == "sparse"',
                lambda i: config.mlp_layer_types[i] == "sparse",
                "config.mlp_layer_types",
            )
        )
    for name in ("first_k_dense_replace", "num_dense_layers"):
        if name in fields:
            forms.append(
                (
                    f"index >= config.{name}",
                    lambda i, name=name: i >= getattr(config, name),
                    f"[i >= config.{name} for i in range(config.num_hidden_layers)]",
                )
            )
    if {"decoder_sparse_step", "mlp_only_layers"} <= fields.keys():
        forms.append(
            (
                "has_experts(config, index)",
                lambda i: (
                    (i + 1) % config.decoder_sparse_step == 0
                    and i not in (config.mlp_only_layers or [])
                ),
                "[has_experts(config, i) for i in range(config.num_hidden_layers)]",
            )
        )
    for text, function, kinds in forms:
        if [function(i) for i in range(len(has))] == has:
            return text, kinds
    raise NotTraced(f"layers have experts or not: {has}")
