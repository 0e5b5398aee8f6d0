"""Sums in one order: the same inputs produce the same bits in every program and on every mesh.

`batch_invariant` of a configuration selects this order. The native library computes products and
attention: a sum has one order, whatever the other rows are. On several devices each sum is computed
whole on one device, so that no order of a reduction over devices matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Logical axis of each dimension of an array; None = the dimension is not split.
Axes = Sequence[str | None]


class KernelChoice(NamedTuple):
    """How a model computes: a context of the trace, and a static argument of functions with a
    gradient of their own, whose forward pass jax may trace after the block of `chosen_by`.

    Attributes:
        allowed: whether kernels of the native library are allowed.
        ordered: the configuration that selects sums in one order; None without one.
        on_one_gpu: whether the model is on one GPU. A partitioner cannot split a call of a kernel,
            so kernels without a `shard_map` need whole arrays.
        recorder: receives the kernels of the trace (`ed_layers.numerics`).
    """

    allowed: bool = True
    ordered: EasyDeLBaseConfig | None = None
    on_one_gpu: bool = False
    recorder: Callable[..., None] | None = None

    @classmethod
    def get_current(cls) -> KernelChoice:
        """Return the present choice."""
        return _CHOICE.get()

    @property
    def allows_gpu_kernels(self) -> bool:
        """Whether kernels of one GPU may compute, whose order of sums is their own."""
        return self.allowed and self.on_one_gpu and self.ordered is None

    @classmethod
    def note(cls, kind: str, *arguments: object) -> None:
        """Tell the recorder which kernel a program uses.

        Args:
            kind: key of `ed_layers.numerics.record.USE_KINDS`.
            arguments: arguments of the function of the kind.
        """
        recorder = cls.get_current().recorder
        if recorder is not None:
            recorder(kind, *arguments)

    @contextmanager
    def restore(self) -> Iterator[None]:
        """Trace the block with this choice."""
        token = _CHOICE.set(self)
        try:
            yield
        finally:
            _CHOICE.reset(token)

    def wrap_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of trees of arrays that is always traced with this choice."""

        def call_with_choice(*arguments: object) -> Any:
            with self.restore():
                if self.ordered is None:
                    return function(*arguments)
                from ed_layers.ordered_program import round_operations

                return round_operations(function)(*arguments)

        return call_with_choice


_DEFAULT_CHOICE = KernelChoice()
_CHOICE = ContextVar("kernels and order of sums", default=_DEFAULT_CHOICE)


def chosen_by(config: EasyDeLBaseConfig) -> AbstractContextManager[None]:
    """Trace the block with the kernels of a configuration: none with `native_kernels: false`, and
    kernels for every size and sums in one order with `batch_invariant: true`."""
    choice, devices = KernelChoice.get_current(), config.mesh.devices
    return choice._replace(
        allowed=config.native_kernels and choice.allowed,
        ordered=config if config.batch_invariant else None,
        on_one_gpu=devices.size == 1 and devices.flat[0].platform == "gpu",
    ).restore()


def active() -> bool:
    """Return whether sums have one order."""
    return KernelChoice.get_current().ordered is not None


def several_devices() -> bool:
    """Return whether sums have one order on a mesh of several devices, outside a `shard_map`."""
    config = KernelChoice.get_current().ordered
    if config is None or config.mesh.size == 1:
        return False
    return not jax.sharding.get_abstract_mesh().manual_axes


def in_part() -> bool:
    """Return whether sums have one order, and the code runs on one device: a mesh of one device, or
    a part of a `shard_map`."""
    return active() and not several_devices()


def unshard_last_axis(x: jax.Array) -> jax.Array:
    """Return an array whose last axis is not split over devices, so that its sum has one order."""
    config = KernelChoice.get_current().ordered
    if config is None or not several_devices():
        return x
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1), None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(config.mesh, spec))


@jax.custom_jvp
def replace_gradient(value: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the first array with the gradient of the second, which has other roundings."""
    return value


replace_gradient.defjvp(lambda arrays, tangents: (arrays[0], tangents[1]))


def with_ordinary_gradient(values: object, function: Callable[[], Any]) -> Any:
    """Return a tree of arrays with the gradients of the tree that a function returns.

    The function is traced without the order, and only a program with gradients computes it. Its
    arrays have the sizes of `values`.
    """

    def only_for_gradients() -> Any:
        return function()

    with KernelChoice.get_current()._replace(ordered=None).restore():
        reference_values = jax.jit(only_for_gradients)()
    return jax.tree.map(
        lambda value, reference: replace_gradient(value.reshape(reference.shape), reference),
        values,
        reference_values,
    )


def run_on_shards(
    function: Callable[..., Any],
    arrays: Sequence[jax.Array],
    axes: Sequence[Axes],
    results: Sequence[tuple[Axes, tuple[int, ...]]],
) -> Any:
    """Return `function(*arrays)`, computed by each device on its part of the arrays.

    Args:
        function: a function of arrays whose results are a list.
        arrays, axes: the arguments and their logical axes, as `batch` and `heads`.
        results: logical axes and shapes of the results.
    """
    config = KernelChoice.get_current().ordered
    if config is None or not several_devices():
        return function(*arrays)

    def spec(names: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        return config.partition_manager.resolve(tuple(names), "train", shape, config.mesh)

    run = jax.shard_map(
        function,
        mesh=config.mesh,
        in_specs=tuple(spec(names, x.shape) for names, x in zip(axes, arrays, strict=True)),
        out_specs=[spec(names, shape) for names, shape in results],
        check_vma=False,
    )
    return run(*arrays)
