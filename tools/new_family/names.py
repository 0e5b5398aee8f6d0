"""The names of a checkpoint: which of our names differ in the files, and which tensors are fused.

The files of the small model are read, and their tensors are matched with the parameters by value,
because `transformers` writes some parameters under other names than the modules have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tools.new_family.parts import find_linears
from tools.new_family.trace import NotTraced, Trace


@dataclass(frozen=True)
class Names:
    """Names of the files of a model.

    Attributes:
        renames: parts of our names -> parts of theirs.
        rules: rules of fused or stacked tensors.
        modules: parts of the names of matrices in the files -> their modules in memory.
    """

    renames: dict[str, str]
    rules: tuple[str, ...]
    modules: dict[str, str]


def read_files(folder: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a saved model."""
    from safetensors.numpy import load_file

    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


class FileNames:
    """The names of parameters in the files of a model.

    Args:
        trace: the traced model. tensors: the tensors of its files.
    """

    def __init__(self, trace: Trace, tensors: Mapping[str, np.ndarray]):
        by_value = {value.tobytes(): name for name, value in tensors.items()}
        state: dict[str, np.ndarray] = {
            n: v.detach().numpy() for n, v in trace.model.state_dict().items()
        }
        self.names: dict[str, str] = {
            name: name if name in tensors else by_value.get(value.tobytes(), name)
            for name, value in state.items()
        }
        # A tied head and the embedding are one tensor, which has the name of the embedding.
        head, embedding = f"{trace.head}.weight", f"{trace.embedding}.weight"
        if self.names.get(head) == self.names[embedding]:
            self.names[head] = head
        self.tensors = tensors

    def get_module(self, name: str) -> str:
        """Return the name of a module in the files."""
        for leaf in ("weight", "bias"):
            if f"{name}.{leaf}" in self.names:
                return self.names[f"{name}.{leaf}"].removesuffix(f".{leaf}")
        return name


def build_names(
    trace: Trace,
    files: FileNames,
    norms: Mapping[str, str],
    attention: Mapping[str, Any],
    dense: Mapping[str, Any] | None,
    sparse: Mapping[str, Any] | None,
    positions: str | None,
    *,
    fused_groups: str | None,
) -> Names:
    """Return the renames and rules of a draft.

    Args:
        trace, files: the traced model and the names of its files.
        norms: our names of the norms of a layer -> theirs.
        attention, dense, sparse: the facts of the parts.
        positions: name of the table of learned positions.
        fused_groups: `groups` of the fused projection of queries, keys and values.
    """
    layer = trace.layers[-1]
    prefix = f"{files.get_module(f'{trace.stack}.{layer.index}.{layer_leaf(trace)}')}"
    stack = prefix.split(f".{layer.index}.", 1)[0]
    body = stack.rpartition(".")[0]
    pairs: dict[str, str] = {}
    _add(pairs, "lm_head", files.get_module(trace.head or "lm_head"))
    if trace.norm:
        _add_below(pairs, "model.norm", files.get_module(trace.norm), body)
    _add_below(pairs, "model.embed_tokens", files.get_module(trace.embedding), body)
    if positions is not None:
        _add_below(pairs, "model.embed_positions", files.get_module(positions), body)
    _add_below(pairs, "model.layers", stack, body)
    _add(pairs, "model", body)

    def get_relative(name: str) -> str:
        full = files.get_module(f"{trace.stack}.{layer.index}.{name}")
        return full.removeprefix(f"{stack}.{layer.index}.")

    rules: list[str] = []
    for ours, theirs in norms.items():
        _add(pairs, ours, get_relative(theirs))
    modules = attention["modules"]
    inner = {o: get_relative(f"{attention['name']}.{t}") for o, t in modules.items() if o != "qkv"}
    holder = inner["o_proj"].rpartition(".")[0]
    _add_part(pairs, "self_attn", holder, inner)
    sinks = f"{trace.stack}.{layer.index}.{attention['name']}.sinks"
    if sinks in files.names and not files.names[sinks].endswith(".sinks"):
        pairs["self_attn.sinks"] = files.names[sinks].removeprefix(f"{stack}.{layer.index}.")
    if "qkv" in modules:
        name = modules["qkv"].rpartition(".")[2]
        groups = f', groups="{fused_groups}"' if fused_groups else ""
        if hasattr(trace.config, "multi_query"):
            groups = ", groups=lambda c: 1 if c.multi_query else c.num_attention_heads"
        layout = (
            ", layout=equal" if _is_conv(layer, f"{attention['name']}.{modules['qkv']}") else ""
        )
        rules.append(f'*fused(("q_proj", "k_proj", "v_proj"), "{name}"{groups}{layout})')
    if sparse is not None:
        rules += _name_sparse(pairs, files, trace, stack, sparse, get_relative)
    if dense is not None:
        rules += _name_dense(pairs, layer, dense, get_relative, sparse)
    if any(_is_conv(module, "") for module in find_linears(layer.module).values()):
        rules += [
            'Rule("lm_head.kernel", "lm_head.weight", transpose)',
            'Rule("{path}.kernel", "{path}.weight", equal)',
        ]
    ordered = dict(sorted(pairs.items(), key=lambda pair: -pair[0].count(".")))
    return Names(ordered, tuple(rules), _name_modules(files, f"{trace.stack}.{layer.index}."))


def _name_modules(files: FileNames, prefix: str) -> dict[str, str]:
    """Return the parts of the names of matrices that differ between the files and the modules."""
    modules: dict[str, str] = {}
    for name, file_name in files.names.items():
        if name == file_name or not name.startswith(prefix) or not name.endswith("_proj.weight"):
            continue
        ours, theirs = name.split("."), file_name.split(".")
        if len(ours) == len(theirs):
            modules |= {b: a for a, b in zip(ours, theirs, strict=True) if a != b}
    if any(name.endswith("block_sparse_moe.input_linear.weight") for name in files.tensors):
        for theirs, ours in (("input_linear", "gate_up_proj"), ("output_linear", "down_proj")):
            modules[f"block_sparse_moe.{theirs}"] = f"block_sparse_moe.experts.{ours}"
    return modules


def layer_leaf(trace: Trace) -> str:
    """Return a module of the last layer with a weight; its file name contains that of the stack."""
    for name, module in trace.layers[-1].module.named_modules():
        if getattr(module, "weight", None) is not None:
            return name
    raise NotTraced("a layer has no weight")


def _add(pairs: dict[str, str], ours: str, theirs: str) -> None:
    if ours != theirs:
        pairs[ours] = theirs


def _add_below(pairs: dict[str, str], ours: str, theirs: str, body: str) -> None:
    """Add a part of the body, unless it has our name below the body."""
    if theirs != f"{body}.{ours.removeprefix('model.')}":
        pairs[ours] = theirs


def _add_part(pairs: dict[str, str], ours: str, theirs: str, inner: Mapping[str, str]) -> None:
    """Add the name of a part of a layer, and the names within it that differ."""
    for name, full in inner.items():
        if full != f"{theirs}.{name}":
            pairs[f"{ours}.{name}"] = full
    if theirs:
        _add(pairs, ours, theirs)


def _is_conv(module: Any, name: str) -> bool:
    """Return whether a linear layer of torch stores [in, out]."""
    child = module.module.get_submodule(name) if name else module
    return type(child).__name__ == "Conv1D"


def _name_dense(
    pairs: dict[str, str],
    layer: Any,
    dense: Mapping[str, Any],
    get_relative: Any,
    sparse: Mapping[str, Any] | None,
) -> list[str]:
    prefix, modules = dense["prefix"], dict(dense["modules"])
    full = {o: get_relative(f"{prefix}.{t}" if prefix else t) for o, t in modules.items()}
    gate_up = full.pop("gate_up", None)
    holder = full["down_proj"].rpartition(".")[0]
    if sparse is None:
        _add_part(pairs, "mlp", holder, full)
    if gate_up is None:
        return []
    return [f'*fused(("gate_proj", "up_proj"), "{gate_up.rpartition(".")[2]}")']


def _name_sparse(
    pairs: dict[str, str],
    files: FileNames,
    trace: Trace,
    stack: str,
    sparse: Mapping[str, Any],
    get_relative: Any,
) -> list[str]:
    """Add the names of the experts, the router and the shared experts; return their rules."""
    modules, block = sparse["modules"], sparse["prefix"]
    index = trace.layers[-1].index
    gate = get_relative(f"{block}.{modules['gate']}")
    holder = _find_holder(files, stack, index, gate, block)
    if "correction" in modules:
        full = f"{trace.stack}.{index}.{block}.{modules['correction']}"
        name = files.names[full].split(f".{index}.", 1)[1]
        if name != f"{gate}.e_score_correction_bias":
            pairs["mlp.gate.e_score_correction_bias"] = name
    if gate != f"{holder}.gate":
        pairs["mlp.gate"] = gate
    rules = _name_experts(pairs, files, f"{stack}.{index}.{holder}.")
    if "shared" in modules:
        shared = modules["shared"]
        path = shared.removeprefix("../") if shared.startswith("../") else f"{block}.{shared}"
        names = {linear: get_relative(f"{path}.{linear}") for linear in sparse["shared_linears"]}
        their_path = next(iter(names.values())).rpartition(".")[0]
        if "input_linear" in names:
            pairs["mlp.shared_experts.down_proj"] = f"{their_path}.output_linear"
            rules.append('*fused(("gate_proj", "up_proj"), "input_linear")')
        if their_path != f"{holder}.shared_experts":
            pairs["mlp.shared_experts"] = their_path
    _add(pairs, "mlp", holder)
    return rules


def _find_holder(files: FileNames, stack: str, index: int, gate: str, block: str) -> str:
    """Return the name of the block with the experts in the files."""
    prefix = f"{stack}.{index}."
    for name in files.tensors:
        if name.startswith(prefix) and ".experts." in name:
            return name.removeprefix(prefix).split(".experts.")[0]
    return gate.split(".")[0] if "." in gate else block


def _name_experts(pairs: dict[str, str], files: FileNames, prefix: str) -> list[str]:
    inner = {name.removeprefix(prefix) for name in files.tensors if name.startswith(prefix)}
    if "experts.0.gate_proj.weight" in inner:
        return ["EXPERTS"]
    if "experts.0.w1.weight" in inner:
        pairs |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
        return ["EXPERTS"]
    experts = '"{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"'
    if "experts.gate_up_proj" in inner:
        return [
            f'Rule(({experts}), "{{path}}.experts.gate_up_proj", split(-2))',
            'Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", transpose)',
        ]
    if "input_linear.weight" in inner:
        return [
            f'Rule(({experts}), "{{path}}.input_linear.weight", split(-2))',
            'Rule("{path}.experts.down_proj.kernel", "{path}.output_linear.weight", transpose)',
        ]
    raise NotTraced(f"the experts have the tensors {sorted(inner)[:6]}")
