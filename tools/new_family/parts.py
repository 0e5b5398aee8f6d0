"""Express the layers of a trace in the vocabulary of this project: norms, attention, head.

Each function returns a part of a `Draft`. Functions raise `NotTraced` where the vocabulary has no
word for the measured facts.

Legend: b rows, s positions, d hidden, k head dim, h heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tools.new_family.tiny import list_fields
from tools.new_family.trace import STREAM, Layer, NotTraced, Trace, is_norm
from tools.new_family.values import find_ratio, is_near, name_value

QUERIES = ("q_proj", "query", "q_lin", "Wq")
KEYS = ("k_proj", "key", "k_lin", "Wk")
VALUES = ("v_proj", "value", "v_lin", "Wv")
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "output_dense", "wo")
FUSED = ("query_key_value", "qkv_proj", "c_attn", "Wqkv", "wqkv", "qkv", "W_pack")
QUERY_NORMS = ("q_norm", "query_layernorm", "q_layernorm", "query_norm")
KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm", "key_norm")
GATES = ("g_proj", "gate_proj", "gate")
#: Attributes of attention modules of transformers that hold the factor on the scores.
SCALES = ("scaling", "scale_attn", "softmax_scale")
CAPS = ("attn_logit_softcapping", "softcap", "logit_cap")


def find_part(layer: Layer, *, attention: bool) -> str:
    """Return the name of the attention of a layer, or of its feed-forward part."""
    for name, child in layer.children.items():
        is_attention = "attention" in type(child).__name__.lower() and not is_norm(child)
        if is_attention == attention and not is_norm(child):
            return name
    raise NotTraced(f"a layer has no {'attention' if attention else 'feed-forward part'}")


def describe_order(trace: Trace) -> tuple[str, dict[str, str], dict[str, str]]:
    """Return the class of the layers, its arguments, and our names of its norms -> theirs.

    Raises:
        NotTraced: no class of `ed_models.body.layers` has the order of the parts.
    """
    shapes = [_order_layer(trace, layer) for layer in trace.layers]
    if any(shape != shapes[0] for shape in shapes):
        raise NotTraced("the layers differ in the order of their parts")
    return shapes[0]


def _order_layer(trace: Trace, layer: Layer) -> tuple[str, dict[str, str], dict[str, str]]:
    attention = find_part(layer, attention=True)
    mixers = [n for n, c in layer.children.items() if not is_norm(c) and n != attention]
    norms = {n for n, child in layer.children.items() if is_norm(child)}
    sources = layer.sources
    before = _get_single(sources[attention], norms)
    after = _find_reader(sources, attention, norms)
    branch = after or attention
    inputs = {mixer: _get_single(sources[mixer], norms) for mixer in mixers}
    second = next(iter(inputs.values()))
    if any(name != second for name in inputs.values()):
        raise NotTraced("the feed-forward parts of a layer have different inputs")
    mixed_terms = [_find_reader(sources, mixer, norms) or mixer for mixer in mixers]
    last = mixed_terms[0] if mixed_terms[0] in norms else None
    out = sources["out"]
    factor = out.get(branch, 0.0)
    expected = {STREAM: 1.0, branch: factor, **dict.fromkeys(mixed_terms, factor)}
    if out != expected:
        raise NotTraced(f"a layer returns {_show(out)}")
    entered = sources[second] if second is not None else sources[mixers[0]]
    is_parallel = entered == {STREAM: 1.0} or second == before
    if not is_parallel and entered != {STREAM: 1.0, branch: factor}:
        raise NotTraced(f"the feed-forward part of a layer receives {_show(entered)}")
    names: Mapping[str, str | None]
    arguments: dict[str, str] = {}
    if is_parallel and before and not after and not last:
        own = second if second != before else None  # the norm of the feed-forward part
        kind, names = "ParallelLayer", {"input_layernorm": before, "post_attention_layernorm": own}
        arguments |= {"norms": "2"} if own else {}
    elif before and after and second and last:
        kind = "SandwichLayer"
        names = {
            "input_layernorm": before,
            "post_attention_layernorm": after,
            "pre_feedforward_layernorm": second,
            "post_feedforward_layernorm": last,
        }
    elif before and second and not after and not last:
        kind = "DecoderLayer"
        names = {"input_layernorm": before, "post_attention_layernorm": second}
    elif after and last and not before and not second:
        kind = "PostNormLayer"
        names = {"post_attention_layernorm": after, "post_feedforward_layernorm": last}
    else:
        shown = {n: _show(of) for n, of in sources.items()}
        raise NotTraced(f"no layer of this project has the order {shown}")
    if not is_near(factor, 1.0):
        text = name_value(trace.config, factor)
        if text is None or kind not in ("DecoderLayer", "SandwichLayer"):
            raise NotTraced(f"{kind} adds its branches with the factor {factor}")
        arguments["factor"] = text
    return kind, arguments, {ours: name for ours, name in names.items() if name}


def _get_single(source: Mapping[str, float], norms: set[str]) -> str | None:
    """Return the norm that is the only source; None if the source is no norm."""
    name = next(iter(source))
    return name if len(source) == 1 and name in norms else None


def _find_reader(
    sources: Mapping[str, Mapping[str, float]], name: str, norms: set[str]
) -> str | None:
    """Return the norm that reads only one output."""
    return next((n for n, of in sources.items() if n in norms and dict(of) == {name: 1.0}), None)


def _show(terms: Mapping[str, float]) -> str:
    return " + ".join(f"{factor:g} {name}" for name, factor in terms.items())


# Norms.


def describe_norm(trace: Trace, name: str) -> str | None:
    """Return the function that creates a norm of the model; None = `parts.norm`.

    Raises:
        NotTraced: the norm is neither a root-mean-square norm nor a layer norm.
    """
    module, call = trace.model.get_submodule(name), trace.calls[name]
    x, out = call.inputs[0].astype(np.float64), call.outputs[0]
    weight = module.weight.detach().numpy().astype(np.float64)
    if out.shape[-1] != weight.shape[-1]:
        raise NotTraced(f"{name} has weights of shape {weight.shape} for {out.shape[-1]} features")
    bias_parameter = getattr(module, "bias", None)
    bias = 0.0 if bias_parameter is None else bias_parameter.detach().numpy()
    eps = next(
        (
            float(getattr(module, n))
            for n in ("eps", "variance_epsilon", "epsilon")
            if hasattr(module, n)
        ),
        1e-6,
    )
    root = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + eps)
    centered = x - x.mean(-1, keepdims=True)
    layer = centered / np.sqrt(np.square(centered).mean(-1, keepdims=True) + eps)
    for is_layer, value in ((False, root), (True, layer)):
        for offset in (0.0, 1.0):
            if np.allclose(value * (weight + offset) + bias, out, atol=1e-4):
                return _write_norm(trace, module, is_layer, offset, eps)
    raise NotTraced(f"{name} ({type(module).__name__}) is neither an RMS norm nor a layer norm")


def _write_norm(trace: Trace, module: Any, is_layer: bool, offset: float, eps: float) -> str | None:
    config = trace.config
    fields = [n for n in list_fields(type(config)) if "eps" in n and getattr(config, n) == eps]
    arguments = []
    if is_layer or (fields and "rms_norm_eps" not in fields) or not hasattr(config, "rms_norm_eps"):
        eps_name = f"parts.config.{fields[0]}" if fields else f"{eps:g}"
        arguments.append(f"eps={eps_name}")
    if is_layer and getattr(module, "bias", None) is None:
        arguments.append("bias=False")
    if offset:
        arguments.append("offset=1.0")
    if not is_layer and _scales_first(module):
        arguments.append("scale_first=True")
    if not is_layer and not arguments:
        return None
    return f"partial(parts.{'layer_norm' if is_layer else 'norm'}, {', '.join(arguments)})"


def _scales_first(module: Any) -> bool:
    """Return whether a norm multiplies by its weight before the cast; torch.nn's does."""
    if type(module).__module__.startswith("torch.nn"):
        return True
    text = inspect.getsource(type(module).forward).replace(" ", "")
    last = text.rsplit("return", 1)[-1]
    return ("self.weight*" in last and last.startswith("(") and ").to(" in last) or (
        "self.weight.float()" in text
    )


# Attention.


def find_linears(module: Any) -> dict[str, Any]:
    """Return the linear layers of a module by their names under it."""
    return {
        name: child
        for name, child in module.named_modules()
        if name and hasattr(child, "weight") and type(child).__name__ in ("Linear", "Conv1D")
    }


def pick(names: Mapping[str, Any], known: tuple[str, ...]) -> str | None:
    """Return the name whose last part is one of the known ones, in their order."""
    last = {name.rpartition(".")[2]: name for name in names}
    return next((last[name] for name in known if name in last), None)


def describe_attention(trace: Trace, toggled: Callable[[str], set[str]]) -> dict[str, Any]:
    """Return the class of the attention, its arguments, and the modules of its projections.

    Args:
        trace: the trace.
        toggled: a parameter's name without its layer -> the Boolean fields that create it.
    """
    layer = trace.layers[-1]
    name = find_part(layer, attention=True)
    module = layer.children[name]
    linears = find_linears(module)
    modules: dict[str, str] = {}
    if any(linear.endswith("kv_a_proj_with_mqa") for linear in linears):
        return _describe_latent(trace, name, linears)
    fused = pick(linears, FUSED)
    for ours, known in (
        ("q_proj", QUERIES),
        ("k_proj", KEYS),
        ("v_proj", VALUES),
        ("o_proj", OUTPUTS),
    ):
        if (found := pick(linears, known)) is not None:
            modules[ours] = found
    if "o_proj" not in modules or ("q_proj" not in modules and fused is None):
        raise NotTraced(f"the attention has the linear layers {sorted(linears)}")
    if fused is not None:
        modules["qkv"] = fused
    config = trace.config
    heads = config.num_attention_heads
    query = trace.calls[f"{trace.name_child(layer, name)}.{modules.get('q_proj', fused)}"].outputs[
        0
    ]
    arguments: dict[str, str] = {}
    bias = {ours: _name_bias(linears[of], of, toggled) for ours, of in modules.items()}
    first = bias.get("q_proj", bias.get("qkv", "False"))
    if first != "False":
        arguments["bias"] = first
    for ours, argument in (
        ("k_proj", "key_bias"),
        ("v_proj", "value_bias"),
        ("o_proj", "out_bias"),
    ):
        if ours in bias and bias[ours] != first:
            arguments[argument] = bias[ours]
    norms = {n: m for n, m in module.named_modules() if n and is_norm(m)}
    queries, keys = pick(norms, QUERY_NORMS), pick(norms, KEY_NORMS)
    if queries and keys:
        modules |= {"q_norm": queries, "k_norm": keys}
        arguments["norm"] = _describe_query_norm(trace, layer, name, queries, query, toggled)
    further = norms.keys() - {queries, keys}
    if further:
        raise NotTraced(f"the attention has the further norms {sorted(further)}")
    gate = pick({n: m for n, m in linears.items() if n not in modules.values()}, GATES)
    if gate is not None:
        modules["g_proj"] = gate
        arguments["gated"] = "True"
        gate_bias = _name_bias(linears[gate], gate, toggled)
        if gate_bias != first:
            arguments["gate_bias"] = gate_bias
    arguments |= describe_mask(trace, name)
    arguments |= _describe_scores(trace, module, heads)
    return {
        "attention_class": "SelfAttention",
        "attention": arguments,
        "modules": modules,
        "name": name,
    }


def _name_bias(module: Any, name: str, toggled: Callable[[str], set[str]]) -> str:
    fields = toggled(f"{name}.bias")
    if fields:
        return f"config.{sorted(fields)[0]}"
    return str(getattr(module, "bias", None) is not None)


def _describe_query_norm(
    trace: Trace,
    layer: Layer,
    attention: str,
    name: str,
    query: np.ndarray,
    toggled: Callable[[str], set[str]],
) -> str:
    full = f"{trace.name_child(layer, attention)}.{name}"
    weight = trace.model.get_submodule(full).weight
    size = trace.config.num_attention_heads * _get_head_dim(trace.config)
    make = "parts.norm" if describe_norm(trace, full) is None else "parts.own_norm"
    fields = toggled(f"{name}.weight")
    if fields:
        make += f" if config.{sorted(fields)[0]} else None"
    arguments = [make]
    if weight.ndim > 1:
        arguments.append('heads="own"')
    elif weight.numel() == size and size != _get_head_dim(trace.config):
        arguments.append('heads="all"')
    entered, projected = trace.calls[full].inputs[0].reshape(-1), np.sort(query.reshape(-1))
    nearest = projected[np.searchsorted(projected, entered - 1e-5).clip(max=projected.size - 1)]
    if not np.allclose(entered, nearest, atol=1e-4):
        arguments.append("last=True")
    return f"QKNorm({', '.join(arguments)})"


def _get_head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def describe_mask(trace: Trace, attention: str) -> dict[str, str]:
    """Return the arguments for windows and positions, which may differ by layer."""
    config, arguments = trace.config, {}
    types = getattr(config, "layer_types", None) or [""] * len(trace.layers)
    slides = [kind == "sliding_attention" for kind in types]
    windows = [getattr(layer.children[attention], "sliding_window", None) for layer in trace.layers]
    kinds = getattr(config, "attention_layers", None)
    if kinds and set(kinds) == {"global", "local"}:  # GPT-Neo
        local = 'config.attention_layers[index] == "local"'
        arguments["mask"] = f"MaskRule(window=config.window_size if {local} else None)"
    elif any(slides) and not all(slides):
        arguments["mask"] = "MaskRule(window=get_layer_window(config, index))"
    elif any(slides) or any(windows) or getattr(config, "sliding_window", None):
        arguments["mask"] = "MaskRule(window=config.sliding_window)"
    rotated = [layer.rotated for layer in trace.layers]
    by_type = any(
        isinstance(v, dict) for v in (getattr(config, "rope_parameters", None) or {}).values()
    )
    inner = ["rope_kind(config, config.layer_types[index])"] if by_type else []
    if is_interleaved(trace):
        inner.append("interleaved=True")
    rotary = f"Rotary({', '.join(inner)})"
    thetas = getattr(config, "layer_rope_theta", None)
    if thetas and rotated == [bool(theta) for theta in thetas]:
        theta = "config.layer_rope_theta[index]"
        arguments["position"] = f"Rotary(str({theta})) if {theta} else None"
    elif not any(rotated):
        arguments["position"] = "None"
    elif not all(rotated):
        if rotated == slides:
            condition = "get_layer_window(config, index)"
        elif rotated == [bool(v) for v in getattr(config, "no_rope_layers", None) or []]:
            condition = "config.no_rope_layers[index]"
        else:
            raise NotTraced(f"layers rotate queries or do not: {rotated}")
        arguments["position"] = f"{rotary} if {condition} else None"
    elif inner:
        arguments["position"] = rotary
    return arguments


def is_interleaved(trace: Trace) -> bool:
    """Return whether rotary pairs are neighbours, from the first rotation of the trace.

    A rotation of halves keeps the length of each pair (i, i + k / 2), one of neighbours that of
    each pair (2 i, 2 i + 1).
    """
    for rotation in trace.rotations:
        query, result = rotation.arguments[0], rotation.result
        if query.shape != result.shape:
            continue
        turned = np.abs(query - result).reshape(-1, query.shape[-1]).max(0) > 1e-7
        size = int(np.flatnonzero(turned).max(initial=-1)) + 1
        size += size % 2
        if not size:
            continue
        before, after = query[..., :size], result[..., :size]
        return np.allclose(_get_pair_lengths(before), _get_pair_lengths(after), atol=1e-4)
    return False


def _get_pair_lengths(x: np.ndarray) -> np.ndarray:
    return np.square(x[..., 0::2]) + np.square(x[..., 1::2])


def _describe_scores(trace: Trace, module: Any, heads: int) -> dict[str, str]:
    config, parts = trace.config, []
    scales = [getattr(module, name) for name in SCALES if hasattr(module, name)]
    scale = next((float(s) for s in scales if not isinstance(s, bool)), None)
    usual = _get_head_dim(config) ** -0.5  # some models divide by the root instead
    if scale is not None and not is_near(scale, usual) and not is_near(scale, 1 / usual):
        text = name_value(config, scale)
        if text is None:
            raise NotTraced(f"the scores have the factor {scale}")
        parts.append(f"scale={text}")
    for name in CAPS:
        cap = getattr(module, name, None)
        if isinstance(cap, int | float) and not isinstance(cap, bool):
            text = name_value(config, float(cap))
            parts.append(f"soft_cap={text}")
            break
    if hasattr(module, "sinks") and module.sinks is not None:
        parts.append("sinks=True")
    return {"scores": f"ScoreRule({', '.join(parts)})"} if parts else {}


def _describe_latent(trace: Trace, name: str, linears: Mapping[str, Any]) -> dict[str, Any]:
    arguments = {}
    config = trace.config
    if hasattr(config, "rope_interleave"):
        arguments["interleaved"] = "config.rope_interleave"
    elif not is_interleaved(trace):
        arguments["interleaved"] = "False"
    module = trace.layers[-1].children[name]
    eps = getattr(
        module.kv_a_layernorm, "variance_epsilon", getattr(module.kv_a_layernorm, "eps", 1e-6)
    )
    if eps != 1e-6:
        arguments["norm_eps"] = "config.rms_norm_eps"
    modules = {n: n for n in (*linears, "q_a_layernorm", "kv_a_layernorm")}
    return {
        "attention_class": "LatentAttention",
        "attention": arguments,
        "modules": modules,
        "name": name,
    }


# Embedding and head.


def describe_entry(trace: Trace) -> dict[str, Any]:
    """Return what happens to the embeddings of tokens before the first layer."""
    name = f"{trace.stack}.0"
    stream = trace.calls[name].inputs[0]
    ids = trace.calls[trace.embedding].inputs[0].astype(int)
    table = trace.model.get_submodule(trace.embedding).weight.detach().numpy()
    embedded = table[ids]
    factor = find_ratio(stream, embedded)
    if factor is not None:
        text = name_value(trace.config, factor)
        if text is None:
            raise NotTraced(f"the embeddings have the factor {factor}")
        if text == "config.hidden_size**0.5":
            return {"scaled": True}
        return (
            {} if text == "1.0" else {"enter": (f"x * {text.replace('config.', 'self.config.')}",)}
        )
    for added in trace.added_parameters:
        rows = trace.model.get_submodule(added).weight.detach().numpy()
        for offset in (0, 2):
            positions = rows[offset : offset + stream.shape[1]][None]
            scale = find_ratio(stream - positions, embedded)
            text = name_value(trace.config, scale) if scale is not None else None
            if text is not None:
                size = "config.max_position_embeddings"
                facts: dict[str, Any] = {"positions": (size, offset), "position_module": added}
                if text == "config.hidden_size**0.5":
                    return facts | {"scaled": True}
                return facts if text == "1.0" else facts | {"enter": (f"x * self.{text}",)}
    raise NotTraced("the input of the first layer is no multiple of the embeddings")


def describe_head(trace: Trace) -> dict[str, Any]:
    """Return the factor and the bound of the logits, and whether the head has a bias."""
    if trace.norm is None or trace.head is None:
        raise NotTraced("the model has no final norm, or no head")
    hidden = trace.calls[trace.norm].outputs[0]
    module = trace.model.get_submodule(trace.head)
    weight = module.weight.detach().numpy()
    bias = getattr(module, "bias", None)
    raw = hidden @ weight.T + (0.0 if bias is None else bias.detach().numpy())
    logits = trace.calls[""].outputs[0] if "" in trace.calls else raw
    facts: dict[str, Any] = {} if bias is None else {"head_bias": "True"}
    factor = find_ratio(logits, raw)
    if factor is not None:
        text = name_value(trace.config, factor)
        if text is None:
            raise NotTraced(f"the logits have the factor {factor}")
        if text != "1.0":
            facts["head"] = {"scale": text.replace("config.", "self.config.")}
        return facts
    for name in list_fields(type(trace.config)):
        cap = getattr(trace.config, name, None)
        is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
        if is_number and cap and np.allclose(cap * np.tanh(raw / cap), logits, atol=1e-4):
            facts["head"] = {"soft_cap": f"self.config.{name}"}
            return facts
    raise NotTraced("the logits are no function of the head that this project has")
