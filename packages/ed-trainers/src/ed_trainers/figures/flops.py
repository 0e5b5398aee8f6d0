"""Model FLOPs utilization: the share of the devices' peak that the arithmetic of a run uses.

The formula is that of PaLM (Chowdhery et al. 2022, appendix B). Each parameter of a matrix and each
token count two FLOPs forward, two for the gradient of the input, and two for the gradient of the
parameter if it is trained. Attention counts 12 FLOPs per layer, feature of the heads and token of
the row. Recomputation in the backward pass does not count.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.parameter_names import canonical, normalize_parameter_name, parse_run
from ed_layers.quantization import QuantParam
from flax import nnx

from ed_trainers.optimizers.per_array import EXPERT, logical_axes
from ed_trainers.state import EasyDeLState

#: Peak of one device in dense bfloat16, FLOP/s, by the beginning of jax's `device_kind`; the
#: longest match applies. From the vendors' data sheets.
PEAKS = {
    "TPU v3": 61.5e12,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12,
    "NVIDIA A100": 312e12,
    "NVIDIA L4": 121e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA B200": 2250e12,
}


class Utilization(NamedTuple):
    """Converts tokens per second to a share of the peak.

    Attributes:
        per_token: FLOPs of a token.
        peak: FLOP/s of all devices together.
        formula: description of the computation, with its numbers.
    """

    per_token: float
    peak: float
    formula: str

    def of(self, tokens_per_second: float) -> float:
        """Return the share of the peak, 0 to 1."""
        return tokens_per_second * self.per_token / self.peak


def utilization(
    state: EasyDeLState, config: EasyDeLBaseConfig, *, length: int, peak: float | None
) -> Utilization | None:
    """Count the FLOPs of a token; None if the peak of the devices is unknown.

    Args:
        state: trained and frozen parameters.
        config: configuration of the model, with mesh, layers and heads.
        length: tokens of a row.
        peak: FLOP/s of one device; None = the known peak of its kind.
    """
    device = config.mesh.devices.flat[0]
    peak = known_peak(device.device_kind) if peak is None else peak
    if peak is None:
        return None
    count = config.mesh.size
    learning, frozen = matrix_parameters(state, config)
    width = attention_width(config)
    per_token = 6.0 * learning + 4.0 * frozen + 12.0 * width * length
    parts = [f"6 x {learning:,.0f} parameters that learn"]
    parts += [f"4 x {frozen:,.0f} frozen ones"] if frozen else []
    parts += [f"12 x {width:,} features of heads x {length:,} tokens"] if width else []
    formula = (
        f"mfu = ({' + '.join(parts)}) FLOP/token x tokens_per_second / "
        f"({count} x {peak:.3g} FLOP/s of {device.device_kind})"
    )
    return Utilization(per_token, peak * count, formula)


def known_peak(device_kind: str) -> float | None:
    """Return the peak of a device, FLOP/s; None for an unknown kind."""
    fits = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(fits, key=len)] if fits else None


def matrix_parameters(state: EasyDeLState, config: EasyDeLBaseConfig) -> tuple[float, float]:
    """Return the number of matrix parameters per token: trained parameters, and frozen parameters.

    A token uses `num_experts_per_tok` experts. An embedding table does not count as a matrix,
    unless it is also the head.
    """
    trees = (state.graphstate, state.graphother)
    counts = [_count_parameters(tree, config) for tree in trees]
    has_head = any(heads for _, _, heads in counts)
    sums = [matrices + (0.0 if has_head else tables) for matrices, tables, _ in counts]
    return sums[0], sums[1]


def _count_parameters(tree: nnx.State, config: EasyDeLBaseConfig) -> tuple[float, float, int]:
    """Return the parameters of matrices, of embedding tables, and the number of heads."""
    matrices, tables, heads = 0.0, 0.0, 0
    flat = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )[0]
    for path, variable in flat:
        shape = getattr(variable.get_value(), "shape", ())
        axes = logical_axes(variable)
        layers = sum(parse_run(key) is not None for key in normalize_parameter_name(path))
        experts = axes[:1] == (EXPERT,)
        if not isinstance(variable, nnx.Param | QuantParam) or len(shape) - layers - experts < 2:
            continue
        size = 1.0
        for n in shape:
            size *= n
        if experts:
            size *= min(
                getattr(config, "num_experts_per_tok", None) or shape[layers], shape[layers]
            )
            size /= shape[layers]
        name = canonical(path)[0]
        if axes[:1] == ("vocab",) or name.endswith("embedding"):
            tables += size
            continue
        heads += axes[-1:] == ("vocab",)
        matrices += size
    return matrices, tables, heads


def attention_width(config: EasyDeLBaseConfig) -> int:
    """Return the number of features of all heads of all layers; 0 if the configuration lacks it."""
    layers = getattr(config, "num_hidden_layers", None)
    heads = getattr(config, "num_attention_heads", None)
    if not layers or not heads:
        return 0
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(layers * heads * size)
