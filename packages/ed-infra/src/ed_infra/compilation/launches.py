"""The launches of a compiled program, and a bound of their time. No jax.

A launch is an instruction that a device executes: a fusion, a kernel, a copy or a collective. The
bound of its time is a roofline: the largest of its bytes / bandwidth, its operations / peak and its
sent bytes / link, plus the time of a launch. Loops whose number of iterations the program does not
contain wait for the host on GPUs after each iteration.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from ed_infra.compilation.hlo import HloComputation, HloInstruction, HloProgram, HloShape

#: Instructions without a launch.
_FREE = frozenset(
    {
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
        *("opt-barrier", "add-dependency", "domain", "partition-id", "replica-id"),
    }
)
#: Targets of custom calls without a launch.
_FREE_TARGETS = ("AllocateBuffer", "ConcatBitcast", "SliceBitcast", "Sharding", "annotate_device")
_COLLECTIVES = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"),
    *("ragged-all-to-all", "collective-broadcast"),
)
#: Instructions of a fusion that only moves numbers.
_MOVES = frozenset(
    {
        *("parameter", "constant", "bitcast", "reshape", "copy", "transpose", "tuple"),
        *("get-tuple-element", "dynamic-slice", "slice", "iota", "broadcast", "clamp"),
        *("convert", "add", "compare", "select", "multiply"),
    }
)
_INDEXED = {
    "sort": "sort",
    "scatter": "writes at indices",
    "gather": "reads at indices",
    "dynamic-update-slice": "writes at indices",
}
_SLICES = frozenset({"dynamic-slice", "slice", "gather"})


@dataclass(frozen=True, slots=True)
class ChipSpeed:
    """The speed of one device.

    Attributes:
        bandwidth: bytes/s of the memory.
        peak16, peak8: operations/s of products of 16-bit and of 8-bit numbers. Products of 32-bit
            numbers have half of the first.
        launch: seconds of a launch without work.
        link, network: bytes/s that one device sends inside a node, and between nodes.
        node: devices of a node; 0 = all.
    """

    bandwidth: float
    peak16: float
    peak8: float
    launch: float
    link: float
    network: float
    node: int = 0

    def get_peak(self, bits: int) -> float:
        """Return the operations/s of products of numbers with `bits` bits."""
        if bits <= 8:
            return self.peak8
        return self.peak16 * min(1.0, 16 / bits)

    def get_link(self, devices: int) -> float:
        """Return the bytes/s that a device of a group of devices sends."""
        return self.link if not self.node or devices <= self.node else self.network


@dataclass(frozen=True, slots=True)
class PageArray:
    """The pages of one array of a cache.

    Attributes:
        shape: the array of one layer on one device.
        layers: number of layers that share the array.
        step_bytes: bytes of one layer that a step must read.
    """

    shape: HloShape
    layers: int
    step_bytes: float

    def matches(self, shape: HloShape) -> bool:
        """Return whether an array has the dimensions of the pool, or of one of its layers: also if
        they are permuted, or if neighbors are merged."""
        layers = shape.size // self.shape.size if self.shape.size else 0
        if shape.dtype != self.shape.dtype or shape.size not in (
            self.shape.size,
            self.shape.size * self.layers,
        ):
            return False
        whole = HloShape(shape.dtype, (layers, *self.shape.dims))
        ours, theirs = ([x for x in one.dims if x != 1] for one in (whole, shape))
        return sorted(ours) == sorted(theirs) or _list_strides(theirs) <= _list_strides(ours)


@dataclass(frozen=True, slots=True)
class Launch:
    """An instruction that the device executes.

    Attributes:
        name: name of the instruction.
        operation: kind of the work.
        source: name of the operation in the traced program.
        times: number of executions.
        read, written: bytes of the memory of one execution.
        flops, bits: operations of matrix products, and the size of their numbers.
        sent, group: bytes that a collective sends, and the number of devices.
        pool_read: bytes of `read` that come from a page pool.
        pool_copied: bytes of a page pool that are written as a copy.
    """

    name: str
    operation: str
    source: str
    times: float
    read: float
    written: float
    flops: float = 0.0
    bits: int = 16
    sent: float = 0.0
    group: int = 1
    pool_read: float = 0.0
    pool_copied: float = 0.0

    def bound_seconds(self, speed: ChipSpeed) -> float:
        """Return the bound of the time of all executions."""
        parts = (
            (self.read + self.written) / speed.bandwidth,
            self.flops / speed.get_peak(self.bits),
            self.sent / speed.get_link(self.group),
        )
        return self.times * (max(parts) + speed.launch)


class OperationRow(TypedDict):
    """Sums over all launches of one kind."""

    operation: str
    launches: float
    bytes: float
    flops: float
    sent_bytes: float
    seconds: float


class ProgramReport(TypedDict):
    """The counts of a program, as JSON values.

    Of each branch, the program runs the part with the fewest launches; `launches_at_most` counts
    the part with the most. `host_loops` counts executed loops that wait for the host,
    `host_branches` executed branches whose condition the host reads, and `pool_copies` copies of a
    page pool or of one of its layers.
    """

    launches: float
    launches_at_most: float
    bytes: float
    flops: float
    seconds: float
    host_loops: float
    host_branches: float
    pool_copies: float
    pool_copied_bytes: float
    collectives: dict[str, dict[str, float]]
    operations: list[OperationRow]


@dataclass
class LaunchList:
    """The launches of a program.

    Attributes:
        program: the program.
        pools: pages; a step reads a part of them.
        waits: whether loops and branches wait for the host, as on GPUs.
        launches: result.
        host_loops, host_branches: see `ProgramReport`.
        more_launches: launches of the longest parts of branches, minus those of the shortest.
    """

    program: HloProgram
    pools: Sequence[PageArray] = ()
    waits: bool = True
    launches: list[Launch] = field(default_factory=list)
    host_loops: float = 0.0
    host_branches: float = 0.0
    more_launches: float = 0.0

    def __post_init__(self) -> None:
        self.launches += self._list_launches(self.program.entry, 1.0)

    def _list_launches(self, computation: HloComputation, times: float) -> list[Launch]:
        listed: list[Launch] = []
        for one in computation.instructions.values():
            if one.opcode in _FREE or one.opcode.endswith(("-done", "-update")):
                continue
            if one.opcode == "while":
                listed += self._list_loop(one, times)
            elif one.opcode == "conditional":
                listed += self._list_branches(one, times)
            elif one.opcode in ("call", "async-start"):
                for called in self.program.get_called(one):
                    listed += self._list_launches(called, times)
            elif not is_free_call(one):
                listed.append(self._describe(computation, one, times))
                if listed[-1].operation == "sort" and "kind=kCustom" in one.attributes:
                    # GPUs sort in place, in a copy of the input.
                    size = listed[-1].read
                    listed.append(Launch(one.name, "copies", listed[-1].source, times, size, size))
        return listed

    def _list_loop(self, loop: HloInstruction, times: float) -> list[Launch]:
        body = self.program.computations[loop.read_word(r"\bbody=%?([\w.\-]+)")]
        condition = self.program.computations[loop.read_word(r"\bcondition=%?([\w.\-]+)")]
        count = loop.read_word(r'"known_trip_count":\{"n":"(\d+)"\}')
        if count:
            return self._list_launches(body, times * int(count))
        self.host_loops += times if self.waits else 0
        # The number of iterations follows from the pages that the step must read.
        counters = self._counters
        trial = self._list_launches(body, 1.0)
        self._counters = counters
        read = sum(one.times * one.pool_read for one in trial)
        needed = max((pool.step_bytes for pool in self.pools), default=0.0)
        trips = max(1.0, math.ceil(needed / read - 1e-6)) if read else 1.0
        return [
            *self._list_launches(body, times * trips),
            *self._list_launches(condition, times * (trips + 1)),
        ]

    def _list_branches(self, branch: HloInstruction, times: float) -> list[Launch]:
        self.host_branches += times if self.waits else 0
        counters, parts = self._counters, []
        for computation in self.program.get_called(branch):
            launches = self._list_launches(computation, times)
            count = sum(one.times for one in launches)
            parts.append((count, self.more_launches - counters[2], launches, self._counters))
            self._counters = counters
        if not parts:
            return []
        count, more, launches, self._counters = min(parts, key=lambda part: part[0])
        self.more_launches += max(part[0] + part[1] for part in parts) - count - more
        return launches

    @property
    def _counters(self) -> tuple[float, float, float]:
        return self.host_loops, self.host_branches, self.more_launches

    @_counters.setter
    def _counters(self, values: tuple[float, float, float]) -> None:
        self.host_loops, self.host_branches, self.more_launches = values

    def _describe(self, computation: HloComputation, one: HloInstruction, times: float) -> Launch:
        reads = self._count_reads(computation, one)
        pool_read = sum(
            size
            for size, operand in zip(reads, one.operands, strict=True)
            if self._find_pool(computation.read_shapes(operand)) is not None
        )
        written, pool_copied = self._count_writes(computation, one)
        flops, bits = self._count_products(computation, one)
        kind, sent, group = measure_collective(computation, one)
        if kind:
            written = min(written, float(max(sum(reads), sent)))
        name = re.search(r'op_name="([^"]*)"', one.attributes)
        source = name[1] if name else ""
        return Launch(
            one.name,
            kind or self._name_operation(one, source, flops),
            source,
            *(times, sum(reads), written, flops, bits, sent, group),
            pool_read=pool_read,
            pool_copied=pool_copied,
        )

    def _find_pool(self, shapes: Iterable[HloShape]) -> PageArray | None:
        for shape in shapes:
            for pool in self.pools:
                if pool.matches(shape):
                    return pool
        return None

    # ---- bytes

    def _count_reads(self, computation: HloComputation, one: HloInstruction) -> list[float]:
        """Return the bytes that an instruction reads of each operand."""
        sizes = [
            float(sum(shape.bytes for shape in computation.read_shapes(name)))
            for name in one.operands
        ]
        if one.opcode == "fusion":
            body = self.program.get_called(one)[0]
            pairs = zip(body.parameters, sizes, strict=True)
            return [min(size, self._read_parameter(body, x.name)) for x, size in pairs]
        if one.opcode in _SLICES:
            return [float(one.bytes), *sizes[1:]]
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return [0.0, *sizes[1:]]
        if one.opcode == "custom-call":
            # A kernel that returns the pages in place writes new tokens; attention reads them.
            written_in_place = list_aliased_operands(one)
            for index, name in enumerate(one.operands):
                pool = self._find_pool(computation.read_shapes(name))
                if pool is not None:
                    read = 0.0 if index in written_in_place else pool.step_bytes
                    sizes[index] = min(sizes[index], read)
        return sizes

    def _read_parameter(self, body: HloComputation, name: str) -> float:
        size = float(sum(shape.bytes for shape in body.read_shapes(name)))
        total = 0.0
        for user, operand in body.follow_users(name):
            if user.opcode in _SLICES and user.operands[0] == operand:
                total += user.bytes
            elif operand in get_updated(user):
                continue
            elif user.opcode == "fusion":
                nested = self.program.get_called(user)[0]
                for parameter, argument in zip(nested.parameters, user.operands, strict=True):
                    if argument == operand:
                        total += self._read_parameter(nested, parameter.name)
            else:
                return size
        return total

    def _count_writes(
        self, computation: HloComputation, one: HloInstruction
    ) -> tuple[float, float]:
        """Return the bytes that an instruction writes, and those of copied page pools."""
        if one.opcode == "fusion":
            return self._write_result(self.program.get_called(one)[0])
        if one.opcode in ("dynamic-update-slice", "scatter"):
            return count_updates(computation, one), 0.0
        if one.opcode == "custom-call":
            return float(sum(x.bytes for x in one.shapes if self._find_pool([x]) is None)), 0.0
        if one.opcode == "copy-start":
            return self._split_copies(one.shapes[:1])
        return self._split_copies(one.shapes)

    def _write_result(self, body: HloComputation) -> tuple[float, float]:
        root = body.root
        if root is None:
            return 0.0, 0.0
        written = copied = 0.0
        names = root.operands if root.opcode == "tuple" else (root.name,)
        for name in names:
            result = body.skip_views(name)
            if result is not None and result.opcode in ("dynamic-update-slice", "scatter"):
                base = body.skip_views(result.operands[0])
                if base is not None and base.opcode == "parameter":
                    written += count_updates(body, result)
                    continue
            elif result is not None and result.opcode == "fusion":
                parts = self._write_result(self.program.get_called(result)[0])
                written, copied = written + parts[0], copied + parts[1]
                continue
            parts = self._split_copies(body.read_shapes(name))
            written, copied = written + parts[0], copied + parts[1]
        return written, copied

    def _split_copies(self, shapes: Sequence[HloShape]) -> tuple[float, float]:
        written = float(sum(shape.bytes for shape in shapes))
        return written, float(sum(x.bytes for x in shapes if self._find_pool([x]) is not None))

    # ---- operations

    def _count_products(
        self, computation: HloComputation, one: HloInstruction
    ) -> tuple[float, int]:
        """Return the operations of matrix products, and the bits of their smallest numbers."""
        if one.opcode == "fusion":
            parts = [
                self._count_products(body, inner)
                for body in self.program.get_called(one)
                for inner in body.instructions.values()
            ]
            products = [part for part in parts if part[0]]
            bits = max((part[1] for part in products), default=16)
            return sum(part[0] for part in products), bits
        flops = count_flops(computation, one)
        inputs = [shape.bits for name in one.operands for shape in computation.read_shapes(name)]
        return flops, max(inputs[:2], default=16) if flops else 16

    def _name_operation(self, one: HloInstruction, source: str, flops: float) -> str:
        if one.opcode == "custom-call":
            target = one.read_word(r'custom_call_target="([^"]*)"')
            if "cublas" in target:
                return "matrix products"
            if "fmha" in target:
                return "attention of cuDNN"
            if "triton" in target or target in ("tpu_custom_call", "mosaic_gpu_v2"):
                return f"kernel {get_kernel_name(one, source)}"
            return f"call {target}"
        if flops:
            return "matrix products"
        if one.opcode in ("sort", "copy", "copy-start"):
            return "sort" if one.opcode == "sort" else "copies"
        bodies = self.program.get_called(one) if one.opcode == "fusion" else []
        opcodes = {x.opcode for body in bodies for x in self.program.iterate_nested(body)}
        opcodes |= {one.opcode} - {"fusion"}
        for name in ("sort", "scatter", "gather"):
            if name in opcodes:
                return {"scatter": "writes at indices", "gather": "reads at indices"}.get(
                    name, name
                )
        if "dynamic-update-slice" in opcodes:
            return "writes at indices"
        if opcodes & {"reduce", "reduce-window"}:
            return "reductions"
        moves_only = opcodes <= _MOVES and opcodes & {"dynamic-slice", "slice", "copy", "transpose"}
        return "copies" if moves_only else "elementwise"


def _list_strides(dims: Sequence[int]) -> set[int]:
    """Return the products of the last dimensions."""
    return {math.prod(dims[index:]) for index in range(len(dims))}


def is_free_call(one: HloInstruction) -> bool:
    """Return whether an instruction is a custom call without a launch."""
    target = one.read_word(r'custom_call_target="([^"]*)"') if one.opcode == "custom-call" else ""
    return target.startswith(_FREE_TARGETS)


def get_updated(one: HloInstruction) -> tuple[str, ...]:
    """Return the operands that an instruction replaces in part; () for other instructions."""
    if one.opcode == "dynamic-update-slice":
        return one.operands[:1]
    return one.operands[: len(one.operands) // 2] if one.opcode == "scatter" else ()


def list_aliased_operands(one: HloInstruction) -> set[int]:
    """Return the numbers of the operands whose memory a custom call returns."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", one.attributes)
    return {int(x) for x in re.findall(r"\((\d+),", found[1])} if found else set()


def count_updates(computation: HloComputation, one: HloInstruction) -> float:
    """Return the bytes that a scatter or a dynamic-update-slice writes."""
    if one.opcode == "dynamic-update-slice":
        names: Sequence[str] = one.operands[1:2]
    else:
        names = one.operands[len(one.operands) // 2 + 1 :]
    return float(sum(shape.bytes for name in names for shape in computation.read_shapes(name)))


def count_flops(computation: HloComputation, one: HloInstruction) -> float:
    """Return the operations of a matrix product, a convolution or a call of a library."""
    target = one.read_word(r'custom_call_target="([^"]*)"') if one.opcode == "custom-call" else ""
    if one.opcode == "dot" or "cublas" in target:
        shapes = computation.read_shapes(one.operands[0]) if one.operands else ()
        axes = one.read_numbers("lhs_contracting_dims")
        if target:
            text = one.read_word(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
            axes = tuple(int(x) for x in re.findall(r"\d+", text))
        if not shapes or not one.shapes:
            return 0.0
        depth = math.prod(shapes[0].dims[axis] for axis in axes if axis < len(shapes[0].dims))
        return 2.0 * one.shapes[0].size * depth
    if one.opcode == "convolution":
        return _count_convolution(computation, one)
    if "fmha" in target:
        text = one.read_word(r'"intermediate_tensor_shape":\{[^{}]*"dimensions":\[([^\]]*)\]')
        sizes = [int(size) for size in re.findall(r"\d+", text)]
        queries = computation.read_shapes(one.operands[0]) if one.operands else ()
        if not sizes or not queries:
            return 0.0
        products = 5 if "Backward" in target else 2
        share = 0.5 if "CAUSAL" in one.attributes else 1.0
        return 2.0 * products * share * math.prod(sizes) * queries[0].dims[-1]
    return 0.0


def _count_convolution(computation: HloComputation, one: HloInstruction) -> float:
    """Count a convolution; TPUs also write matrix products as convolutions."""
    labels = one.read_word(r"dim_labels=([\w?]+_[\w?]+->[\w?]+)")
    kernels = computation.read_shapes(one.operands[1]) if len(one.operands) > 1 else ()
    if not labels or not kernels:
        return 0.0
    order = labels.partition("_")[2].partition("->")[0]
    dims = dict(zip(order, kernels[0].dims, strict=False))
    inner = math.prod(dims.values()) / max(1, dims.get("o", 1))
    # A batched product has the batch as a window, of which each output uses one element.
    sizes = _read_window(one, "size")
    for size, dilation in zip(sizes, _read_window(one, "lhs_dilate"), strict=False):
        inner /= size if dilation == size > 1 else 1
    return 2.0 * one.shapes[0].size * inner


def _read_window(one: HloInstruction, name: str) -> list[int]:
    text = one.read_word(rf"window=\{{[^}}]*\b{name}=([\dx]+)")
    return [int(size) for size in text.split("x")] if text else []


def measure_collective(computation: HloComputation, one: HloInstruction) -> tuple[str, float, int]:
    """Return the kind of a collective, the bytes that a device sends, and the group's size.

    The kind of other instructions is "".
    """
    kind = one.opcode.removesuffix("-start")
    if kind not in _COLLECTIVES:
        return "", 0.0, 1
    shapes = [shape for name in one.operands for shape in computation.read_shapes(name)]
    size, group = float(sum(shape.bytes for shape in shapes)), read_group_size(one.attributes)
    share = (group - 1) / group
    factor = {"all-reduce": 2 * share, "all-gather": group - 1, "reduce-scatter": share}
    factor["all-to-all"] = share
    return kind, size * factor.get(kind, 1.0), group


def read_group_size(attributes: str) -> int:
    """Return the number of devices of a group of a collective; 2 for pairs, 1 if unknown."""
    if "source_target_pairs=" in attributes:
        return 2
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", attributes)
    if mesh is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        axes = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in axes)
    counts = re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes)
    if counts is not None:
        return int(counts[2])
    first = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    return len(first[1].split(",")) if first is not None else 1


def get_kernel_name(one: HloInstruction, source: str) -> str:
    """Return the name of a Pallas kernel."""
    name = one.read_word(r'"?kernel_name"?\s*[:=]\s*"([^"]+)"')
    source = source.removesuffix("/pallas_call")
    return name or re.sub(r"[.\d]+$", "", source.rpartition("/")[2] or one.name)


def report_program(listed: LaunchList, speed: ChipSpeed) -> ProgramReport:
    """Return the counts and the bound of a program."""
    rows: dict[str, list[Launch]] = defaultdict(list)
    for one in listed.launches:
        rows[one.operation].append(one)
    operations = [_sum_launches(name, members, speed) for name, members in rows.items()]
    operations.sort(key=lambda row: -row["seconds"])
    copied = [one for one in listed.launches if one.pool_copied]
    launches = sum(one.times for one in listed.launches)
    return {
        "launches": launches,
        "launches_at_most": launches + listed.more_launches,
        "bytes": sum(row["bytes"] for row in operations),
        "flops": sum(row["flops"] for row in operations),
        "seconds": sum(row["seconds"] for row in operations),
        "host_loops": listed.host_loops,
        "host_branches": listed.host_branches,
        "pool_copies": sum(one.times for one in copied),
        "pool_copied_bytes": sum(one.times * one.pool_copied for one in copied),
        "collectives": {
            row["operation"]: {"count": row["launches"], "sent_bytes": row["sent_bytes"]}
            for row in operations
            if row["operation"] in _COLLECTIVES
        },
        "operations": operations,
    }


def _sum_launches(name: str, launches: Sequence[Launch], speed: ChipSpeed) -> OperationRow:
    return {
        "operation": name,
        "launches": sum(one.times for one in launches),
        "bytes": sum(one.times * (one.read + one.written) for one in launches),
        "flops": sum(one.times * one.flops for one in launches),
        "sent_bytes": sum(one.times * one.sent for one in launches),
        "seconds": sum(one.bound_seconds(speed) for one in launches),
    }


def list_largest(listed: LaunchList, speed: ChipSpeed, count: int) -> Iterator[Launch]:
    """Yield the launches with the largest bounds."""
    yield from sorted(listed.launches, key=lambda one: -one.bound_seconds(speed))[:count]
