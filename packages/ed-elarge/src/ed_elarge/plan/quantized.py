"""The bytes of quantized weights, by format. No jax; a test compares every format with the layers.

A matrix has codes, and groups of its inputs share a scale (`ed_layers.quantization.formats`).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ed_infra.specs import KEPT_CODES

from ed_elarge.plan.mesh import PlanMesh
from ed_elarge.plan.tensors import DTYPE_SIZES, CodeStorage, PlanTensor

#: Format -> its storage, with the default size of a group.
_STORAGES = {
    "nf4": CodeStorage(0.5, 4, 64),
    "int8": CodeStorage(1, 4, None),
    "int4": CodeStorage(0.5, 3, 64),  # a float16 scale, and a zero of a byte
    "fp8": CodeStorage(1, 4, None),
    "mxfp8": CodeStorage(1, 1, 32),
    "mxfp4": CodeStorage(0.5, 1, 32),
}
_STORAGES |= {"w8a8": _STORAGES["int8"], "w4a8": _STORAGES["int4"]}
#: Scales that share a scale in double quantization, and bytes of a float32 number.
_BLOCK, _FLOAT = 256, 4


@dataclass(frozen=True)
class PlannedCodes:
    """The format of the quantized weights of a model.

    Attributes:
        dtype: name of the format. `gguf` and `gguf_a8` keep the codes of a file, whose storage is
            that of each tensor.
        group_size: values that share a scale; None = the default of the format.
        double: whether the scales are quantized, too.
        pattern: regular expression over the names of layers.
        matrices: names of the matrices of these layers.
    """

    dtype: str
    group_size: int | None = None
    double: bool = False
    pattern: str = ""
    matrices: tuple[str, ...] = ("kernel", "embedding")

    def selects(self, tensor: PlanTensor) -> bool:
        """Return whether a parameter is a matrix that the format stores."""
        if self.dtype in KEPT_CODES:
            return tensor.codes is not None
        layer, _, last = tensor.name.replace("*", "0").rpartition(".")
        is_matrix = len(tensor.shape) == 2 or tensor.axes[:1] == ("expert",)
        if tensor.adapter or tensor.dtype or not is_matrix or layer.endswith(".gate"):
            return False
        return last in self.matrices and re.search(self.pattern, layer) is not None

    def count_bytes(self, tensor: PlanTensor, mesh: PlanMesh) -> int:
        """Return the bytes of codes and scales on one device."""
        storage = tensor.codes or _STORAGES[self.dtype]
        *lead, inputs, outputs = tensor.shape
        axes = mesh.parameter(tensor)
        axes = (*axes, *(None for _ in range(len(tensor.shape) - len(axes))))
        *lead_axes, input_axes, output_axes = axes
        if tensor.is_table:  # the groups run along the columns
            inputs, outputs, input_axes, output_axes = outputs, inputs, output_axes, input_axes
        groups = inputs // self._get_group_size(inputs, storage)
        parts = mesh.ways(input_axes)
        group_rows = groups // parts if groups % parts == 0 else groups
        copies = tensor.layers * math.prod(
            size // mesh.ways(axes) for size, axes in zip(lead, lead_axes, strict=True)
        )
        columns = outputs // mesh.ways(output_axes)
        codes = int(storage.code * mesh.shard(tensor))
        if not self.double:
            return codes + storage.scale * copies * group_rows * columns
        block = max(size for size in range(1, min(outputs, _BLOCK) + 1) if outputs % size == 0)
        blocks = outputs // block
        ways = mesh.ways(output_axes)
        outer = group_rows * (blocks // ways if blocks % ways == 0 else blocks)
        return codes + copies * (group_rows * columns + _FLOAT * (outer + 1))

    def _get_group_size(self, inputs: int, storage: CodeStorage) -> int:
        if self.group_size is not None:
            return self.group_size
        if storage.group is None:
            return inputs
        step = 2 if storage.code < 1 else 1  # 4-bit codes fill whole bytes
        sizes = [n for n in range(step, min(inputs, storage.group) + 1, step) if inputs % n == 0]
        return max(sizes, default=inputs)


def count_weight_bytes(
    tensor: PlanTensor, dtype: str, codes: PlannedCodes | None, mesh: PlanMesh
) -> int:
    """Return the bytes of a parameter on one device.

    Args:
        tensor: the parameter.
        dtype: dtype of parameters that are not quantized.
        codes: format of the quantized weights, if any.
        mesh: the mesh.
    """
    if codes is not None and codes.selects(tensor):
        return codes.count_bytes(tensor, mesh)
    return DTYPE_SIZES[tensor.dtype or dtype] * mesh.shard(tensor)


def count_dequantized_values(
    tensors: tuple[PlanTensor, ...], codes: PlannedCodes | None, mesh: PlanMesh
) -> int:
    """Return the values of one layer's quantized matrices, which products read as numbers."""
    if codes is None:
        return 0
    return max(
        (mesh.count_gathered_values(one) for one in tensors if codes.selects(one)), default=0
    )


def compute_mean_size(
    tensors: tuple[PlanTensor, ...], dtype: str, codes: PlannedCodes | None, mesh: PlanMesh
) -> float:
    """Return the mean bytes of a value of the parameters that products read."""
    read = [tensor for tensor in tensors if not tensor.is_table]
    total = sum(count_weight_bytes(tensor, dtype, codes, mesh) for tensor in read)
    return total / max(1, sum(map(mesh.shard, read)))
