"""The parameters of decoder families from their configuration, without jax.

`FORMS` states how each family differs from Llama. A test compares every entry with the parameters
of the model class. `ed_elarge.plan.shapes` reads the model class for families without an entry.

Legend: d hidden, h heads, g kv heads, k head dim, f intermediate, e experts, n layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ed_elarge.plan.tensors import CacheShape, PlanTensor, expert_linear, linear

Values = Mapping[str, Any]
#: The name of a field, or a constant.
Switch = bool | str


@dataclass(frozen=True)
class ExpertShapes:
    """The experts of a family; each field names a key of the configuration.

    Attributes:
        count, size: number of experts, and the size of one.
        shared: size of the expert that all tokens use; empty = none.
        bias: whether router and experts have biases.
        mixed: whether `decoder_sparse_step` and `mlp_only_layers` select the layers with experts.
    """

    count: str
    size: str
    shared: str = ""
    bias: bool = False
    mixed: bool = False


@dataclass(frozen=True)
class FamilyForm:
    """How the parameters of a family differ from Llama's.

    Attributes:
        bias, out_bias: biases of the projections of attention; None = same as `bias`.
        mlp: with a gate, or without.
        mlp_bias: biases of the feed-forward layer.
        norms: names of the norms of a layer with the hidden size.
        norm: parameters of a norm.
        qk: norms of queries and keys: of each head, of every head separately, or of all together.
        qk_if: the key that enables these norms; empty = always.
        experts: experts instead of the feed-forward layer.
        sinks: whether heads have attention sinks.
        positions: key with the number of learned positions; empty = none.
        head_bias: whether the head has a bias.
        window: which layers have a sliding window: none, all, or those of `layer_types`.
        every: default of `layer_types`: every n-th layer has no window.
        inner: keys of the intermediate size; the first that is set counts.
    """

    bias: Switch = "attention_bias"
    out_bias: Switch | None = None
    mlp: Literal["gated", "plain"] = "gated"
    mlp_bias: Switch = False
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    norm: tuple[str, ...] = ("weight",)
    qk: Literal["", "each", "own", "all"] = ""
    qk_if: str = ""
    experts: ExpertShapes | None = None
    sinks: bool = False
    positions: str = ""
    head_bias: bool = False
    window: Literal["", "all", "types"] = ""
    every: int = 0
    inner: str = "intermediate_size"


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
_LAYER_NORM = ("weight", "bias")

FORMS: dict[str, FamilyForm] = {
    "llama": FamilyForm(mlp_bias="mlp_bias"),
    "mistral": FamilyForm(bias=False, window="all"),
    "ministral3": FamilyForm(bias=False, window="all"),
    "qwen2": FamilyForm(bias=True, out_bias=False, window="types"),
    "qwen3": FamilyForm(qk="each", window="types"),
    "qwen3_moe": FamilyForm(
        qk="each",
        window="all",
        experts=ExpertShapes("num_experts", "moe_intermediate_size", mixed=True),
    ),
    "qwen2_moe": FamilyForm(
        bias="qkv_bias",
        out_bias=False,
        window="types",
        experts=ExpertShapes(
            "num_experts",
            "moe_intermediate_size",
            shared="shared_expert_intermediate_size",
            mixed=True,
        ),
    ),
    "mixtral": FamilyForm(
        bias=False, window="all", experts=ExpertShapes("num_local_experts", "intermediate_size")
    ),
    "olmoe": FamilyForm(qk="all", experts=ExpertShapes("num_experts", "intermediate_size")),
    "gpt_oss": FamilyForm(
        sinks=True,
        window="types",
        every=2,
        experts=ExpertShapes("num_local_experts", "intermediate_size", bias=True),
    ),
    "gemma": FamilyForm(),
    "gemma2": FamilyForm(norms=_SANDWICH, window="types", every=2),
    "gemma3_text": FamilyForm(norms=_SANDWICH, qk="each", window="types", every=6),
    "olmo": FamilyForm(norms=(), norm=()),
    "olmo2": FamilyForm(norms=_POST, qk="all"),
    "olmo3": FamilyForm(norms=_POST, qk="all", window="types", every=4),
    "phi": FamilyForm(
        bias=True,
        mlp="plain",
        mlp_bias=True,
        norms=("input_layernorm",),
        norm=_LAYER_NORM,
        qk="each",
        qk_if="qk_layernorm",
        head_bias=True,
    ),
    "phi3": FamilyForm(bias=False, window="all"),
    "smollm3": FamilyForm(mlp_bias="mlp_bias", window="types"),
    "granite": FamilyForm(mlp_bias="mlp_bias"),
    "seed_oss": FamilyForm(out_bias="attention_out_bias", mlp_bias="mlp_bias"),
    "starcoder2": FamilyForm(
        bias="use_bias", mlp="plain", mlp_bias="use_bias", norm=_LAYER_NORM, window="all"
    ),
    "cohere": FamilyForm(norms=("input_layernorm",), qk="own", qk_if="use_qk_norm"),
    "glm4": FamilyForm(out_bias=False, norms=_SANDWICH),
    "gpt2": FamilyForm(
        bias=True,
        mlp="plain",
        mlp_bias=True,
        norm=_LAYER_NORM,
        positions="max_position_embeddings",
        inner="n_inner",
    ),
}


def parameters(model_type: str, config: Values) -> Iterator[PlanTensor]:
    """Yield all parameters of a model whose family has an entry in `FORMS`."""
    form, d = FORMS[model_type], int(config["hidden_size"])
    vocabulary = int(config["vocab_size"])
    yield PlanTensor("model.embed_tokens.embedding", (vocabulary, d), ("vocab", "embed"))
    if form.positions:
        rows = int(config[form.positions])
        yield PlanTensor("model.embed_positions.embedding", (rows, d), ("vocab", "embed"))
    layers = int(config["num_hidden_layers"])
    if layers:
        yield from _attention(form, config, layers)
        yield from _feed_forward(form, config, layers)
        for name in form.norms:
            yield from _norm(form, f"model.layers.*.{name}", (d,), layers)
    yield from _norm(form, "model.norm", (d,), 1)
    if not config.get("tie_word_embeddings"):
        yield from linear("lm_head", d, vocabulary, ("embed", "vocab"), 1, bias=form.head_bias)


def _attention(form: FamilyForm, config: Values, n: int) -> Iterator[PlanTensor]:
    d, h, g, k = sizes(config)
    at = "model.layers.*.self_attn"
    bias = _on(form.bias, config)
    out = bias if form.out_bias is None else _on(form.out_bias, config)
    yield from linear(f"{at}.q_proj", d, h * k, ("embed", "heads"), n, bias=bias)
    yield from linear(f"{at}.k_proj", d, g * k, ("embed", "kv_heads"), n, bias=bias)
    yield from linear(f"{at}.v_proj", d, g * k, ("embed", "kv_heads"), n, bias=bias)
    yield from linear(f"{at}.o_proj", h * k, d, ("heads", "embed"), n, bias=out)
    if form.qk and (not form.qk_if or config.get(form.qk_if)):
        for name, heads in (("q_norm", h), ("k_norm", g)):
            shape = {"each": (k,), "own": (heads, k), "all": (heads * k,)}[form.qk]
            yield from _norm(form, f"{at}.{name}", shape, n)
    if form.sinks:
        yield PlanTensor(f"{at}.sinks", (h,), ("heads",), n)


def _feed_forward(form: FamilyForm, config: Values, n: int) -> Iterator[PlanTensor]:
    d, at = int(config["hidden_size"]), "model.layers.*.mlp"
    sparse, experts = 0, form.experts
    if experts is not None:
        sparse = sum(has_experts(experts, config, i) for i in range(n))
    if experts is not None and sparse:
        e, f, bias = int(config[experts.count]), int(config[experts.size]), experts.bias
        yield PlanTensor(f"{at}.gate.kernel", (d, e), ("embed", None), sparse)
        if bias:
            yield PlanTensor(f"{at}.gate.bias", (e,), (None,), sparse)
        for name, i, o, axes in _build_gated_mlp(d, f):
            yield from expert_linear(f"{at}.experts.{name}", e, i, o, axes, sparse, bias=bias)
        if experts.shared:
            for name, i, o, axes in _build_gated_mlp(d, int(config[experts.shared])):
                yield from linear(f"{at}.shared_experts.{name}", i, o, axes, sparse)
            yield from linear(f"{at}.shared_expert_gate", d, 1, ("embed", None), sparse)
    if sparse == n:
        return
    f, bias = int(config.get(form.inner) or 4 * d), _on(form.mlp_bias, config)
    for name, i, o, axes in _build_gated_mlp(d, f):
        if form.mlp == "gated" or name != "gate_proj":
            yield from linear(f"{at}.{name}", i, o, axes, n - sparse, bias=bias)


def _build_gated_mlp(d: int, f: int) -> tuple[tuple[str, int, int, tuple[str, str]], ...]:
    return (
        ("gate_proj", d, f, ("embed", "mlp")),
        ("up_proj", d, f, ("embed", "mlp")),
        ("down_proj", f, d, ("mlp", "embed")),
    )


def _norm(form: FamilyForm, name: str, shape: tuple[int, ...], n: int) -> Iterator[PlanTensor]:
    axes = (None,) * len(shape)
    yield from (PlanTensor(f"{name}.{part}", shape, axes, n) for part in form.norm)


def has_experts(experts: ExpertShapes, config: Values, index: int) -> bool:
    """Return whether a layer has experts."""
    if not experts.mixed:
        return True
    often = (index + 1) % int(config.get("decoder_sparse_step") or 1) == 0
    return (
        often and config[experts.count] > 0 and index not in (config.get("mlp_only_layers") or ())
    )


def sizes(config: Values) -> tuple[int, int, int, int]:
    """Return d, h, g and k."""
    d, h = int(config["hidden_size"]), int(config["num_attention_heads"])
    g = int(config.get("num_key_value_heads") or h)
    return d, h, g, int(config.get("head_dim") or d // h)


def _on(switch: Switch, config: Values) -> bool:
    return bool(config.get(switch)) if isinstance(switch, str) else switch


def caches(model_type: str, config: Values) -> tuple[CacheShape, ...]:
    """Return the cache of each layer."""
    _, _, g, k = sizes(config)
    windows = _windows(FORMS[model_type], config)
    return tuple(CacheShape(g, k, k, window) for window in windows)


def _windows(form: FamilyForm, config: Values) -> list[int | None]:
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if not form.window or window is None or config.get("use_sliding_window") is False:
        return [None] * layers
    if form.window == "all":
        return [int(window)] * layers
    kinds = config.get("layer_types") or [_kind(form, config, i) for i in range(layers)]
    return [int(window) if kind == "sliding_attention" else None for kind in kinds]


def _kind(form: FamilyForm, config: Values, index: int) -> str:
    """Return the default of `layer_types`, as the configuration classes of Hugging Face have it."""
    if form.every:
        every = int(config.get("sliding_window_pattern") or form.every)
        return "sliding_attention" if (index + 1) % every else "full_attention"
    slides = config.get("use_sliding_window") and index >= int(config.get("max_window_layers") or 0)
    return "sliding_attention" if slides else "full_attention"
