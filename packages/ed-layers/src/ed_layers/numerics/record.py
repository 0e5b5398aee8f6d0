"""The kernels of the programs that a block traces.

with record_kernels(gradients=True) as uses:
    jax.jit(train_step).lower(state, batch)
errors = [measure_errors(use) for use in uses.values()]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ed_layers.fixed_order import KernelChoice
from ed_layers.numerics import KernelUse
from ed_layers.numerics.attention import describe_attention
from ed_layers.numerics.layers import describe_experts, describe_recurrence
from ed_layers.numerics.products import describe_codes, describe_product, describe_products

#: Kind of `KernelChoice.note` -> the function that describes a use; None = the kernel has no check.
USE_KINDS: Mapping[str, Callable[..., KernelUse | None]] = {
    "attention": describe_attention,
    "product": describe_product,
    "products": describe_products,
    "codes": describe_codes,
    "experts": describe_experts,
    "recurrence": describe_recurrence,
}


@dataclass(eq=False)
class KernelRecorder:
    """Collects kernels; each one once.

    Attributes:
        gradients: whether the traced program differentiates its kernels.
        uses: result, by title and case.
    """

    gradients: bool
    uses: dict[tuple[str, str], KernelUse] = field(default_factory=dict)

    def __call__(self, kind: str, *arguments: object) -> None:
        choice = KernelChoice.get_current()._replace(recorder=None)
        use = USE_KINDS[kind](*arguments)
        if use is None:
            return
        gradient = use.has_gradient and self.gradients
        key = (use.title, use.case)
        if key not in self.uses or (gradient and not self.uses[key].has_gradient):
            self.uses[key] = replace(use, has_gradient=gradient, choice=choice)


@contextmanager
def record_kernels(*, gradients: bool) -> Iterator[dict[tuple[str, str], KernelUse]]:
    """Collect the kernels of the programs that the block traces.

    Args:
        gradients: whether the programs differentiate the kernels.
    """
    recorder = KernelRecorder(gradients)
    with KernelChoice.get_current()._replace(recorder=recorder).restore():
        yield recorder.uses
