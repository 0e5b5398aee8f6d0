"""`elarge doctor --numerics FILE`: the kernels of a run file against plain float64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig

if TYPE_CHECKING:
    from ed_layers.numerics import KernelErrors, KernelUse

#: Pages of each group of the traced engine, whose number no kernel depends on.
_PAGES = {"full": 64}


def list_kernels(run: RunConfig) -> list[KernelUse]:
    """Return the kernels of the train step and of the engine's steps, each once.

    Args:
        run: the run; its programs are traced for the devices of this machine.

    Raises:
        ConfigError: the run neither trains nor serves, or its steps cannot be traced.
    """
    from ed_layers.numerics.record import record_kernels

    from ed_elarge.plan import settings
    from ed_elarge.plan.programs import trace_serving_steps, trace_train_step
    from ed_elarge.plan.shapes import read_config_values

    trains = run.trainer is not None and (run.will("train") or not run.actions)
    serves = run.will("serve", "generate", "eval")
    if not trains and not serves:
        raise ConfigError(
            "--numerics needs an action of the run file: train, serve, generate or eval"
        )
    values = read_config_values(run)
    request: dict[str, Any] = {"vocab": values.get("vocab_size"), "pages": _PAGES, "context": 1}
    uses: dict[tuple[str, str], KernelUse] = {}
    if trains:
        length = settings.training(run).length
        with record_kernels(gradients=True) as recorded:
            trace_train_step(run, {**request, "length": length}, None)
        uses |= recorded
    if serves:
        with record_kernels(gradients=False) as recorded:
            trace_serving_steps(run, request, None)
        uses = {**recorded, **uses}
    return [*uses.values()]


def check_kernels(run: RunConfig) -> Iterator[KernelErrors]:
    """Yield the errors of each kernel of a run."""
    from ed_layers.numerics import measure_errors

    for use in list_kernels(run):
        yield measure_errors(use)


def describe_errors(errors: KernelErrors) -> str:
    """Return a line of the report."""
    forward, backward = errors.limits
    parts = [f"{errors.title:<44}error {errors.forward:.1e} (at most {forward:.0e})"]
    if errors.backward is not None:
        parts.append(f"gradients {errors.backward:.1e} (at most {backward:.0e})")
    return f"{', '.join(parts)}\n    {errors.case}"


def convert_errors(errors: KernelErrors) -> Mapping[str, Any]:
    """Return the errors of a kernel as JSON values."""
    return {**errors._asdict(), "limits": [*errors.limits], "is_right": errors.is_right}
