"""Model FLOPs utilization: the share of the devices' peak that the arithmetic of a run uses.

`ed_models.base.flops` has the formula for the FLOPs of a token.
"""

from __future__ import annotations

from typing import NamedTuple

from ed_infra.config import EasyDeLBaseConfig

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
    from ed_models.base.flops import count_token_flops  # not read without a peak

    count = config.mesh.size
    flops = count_token_flops(state.graphstate, state.graphother, config)
    per_token = flops.count_training(length)
    parts = [f"6 x {flops.trained:,.0f} parameters that learn"]
    parts += [f"4 x {flops.frozen:,.0f} frozen ones"] if flops.frozen else []
    if flops.width:
        parts += [f"12 x {flops.width:,} features of heads x {length:,} tokens"]
    formula = (
        f"mfu = ({' + '.join(parts)}) FLOP/token x tokens_per_second / "
        f"({count} x {peak:.3g} FLOP/s of {device.device_kind})"
    )
    return Utilization(per_token, peak * count, formula)


def known_peak(device_kind: str) -> float | None:
    """Return the peak of a device, FLOP/s; None for an unknown kind."""
    fits = [name for name in PEAKS if device_kind.startswith(name)]
    return PEAKS[max(fits, key=len)] if fits else None
