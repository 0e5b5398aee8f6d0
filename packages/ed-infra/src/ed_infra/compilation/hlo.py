"""The text of a compiled XLA program: computations, instructions and shapes. No jax.

`compiled.as_text()` prints this text for every platform. The parser reads names, opcodes, shapes,
operands, and the computations that an instruction calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

#: Bits of a number of each type; types without an entry (tokens) have none.
_BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s16", "u16", "f16", "bf16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
}
_COMMENT = re.compile(r"/\*.*?\*/")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations)=\{([^}]*)\}"
)
#: Instructions whose result is an operand in another shape, without an access of the memory.
_VIEWS = frozenset({"bitcast", "reshape", "get-tuple-element"})
#: Instructions that a fusion computes while it reads their operand.
_READ_VIEWS = _VIEWS | {"copy", "tuple", "transpose"}


@dataclass(frozen=True, slots=True)
class HloShape:
    """The type of an array.

    Attributes:
        dtype: XLA's name of the type: "bf16", "s32".
        dims: sizes on one device.
    """

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 0)

    @property
    def bytes(self) -> int:
        """Bytes of all elements."""
        return -(-self.size * self.bits // 8)


@dataclass(frozen=True, slots=True)
class HloInstruction:
    """One instruction.

    Attributes:
        name, opcode: as in the text, without a percent sign.
        shapes: the result; several arrays for a tuple.
        operands: names of other instructions of the computation.
        arguments: text between the parentheses; the number of a parameter.
        attributes: text behind the operands.
    """

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    arguments: str
    attributes: str

    @property
    def bytes(self) -> int:
        """Bytes of the result."""
        return sum(shape.bytes for shape in self.shapes)

    @property
    def called(self) -> list[str]:
        """Names of the computations that the instruction calls."""
        names: list[str] = []
        for one, several in _CALLED.findall(self.attributes.partition(", metadata=")[0]):
            names += [one] if one else re.findall(r"[\w.\-]+", several)
        return names

    def read_numbers(self, attribute: str) -> tuple[int, ...]:
        """Return the numbers of an attribute such as `lhs_contracting_dims={1}`; () if absent."""
        match = re.search(rf"\b{attribute}=\{{([\d,]*)\}}", self.attributes)
        return tuple(int(one) for one in match[1].split(",") if one) if match else ()

    def read_word(self, pattern: str) -> str:
        """Return the group of a regular expression in the attributes; "" if absent."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""


@dataclass
class HloComputation:
    """A list of instructions.

    Attributes:
        instructions: name -> instruction, in the order of execution.
        root: the instruction that computes the result.
    """

    instructions: dict[str, HloInstruction] = field(default_factory=dict)
    root: HloInstruction | None = None

    @cached_property
    def users(self) -> dict[str, list[HloInstruction]]:
        """Name -> instructions that read it."""
        readers: dict[str, list[HloInstruction]] = {}
        for one in self.instructions.values():
            for operand in dict.fromkeys(one.operands):
                readers.setdefault(operand, []).append(one)
        return readers

    @cached_property
    def parameters(self) -> list[HloInstruction]:
        """The parameters by number."""
        named = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return sorted(named, key=lambda one: int(one.arguments))

    def read_shapes(self, name: str) -> tuple[HloShape, ...]:
        """Return the shapes of an instruction; () for an unknown name."""
        one = self.instructions.get(name)
        return () if one is None else one.shapes

    def follow_users(self, name: str) -> Iterator[tuple[HloInstruction, str]]:
        """Yield the instructions that read a value, also through views, and the name they read."""
        for user in self.users.get(name, ()):
            if user.opcode in _READ_VIEWS and user is not self.root:
                yield from self.follow_users(user.name)
            else:
                yield user, name

    def skip_views(self, name: str) -> HloInstruction | None:
        """Return the instruction that computes a value behind views."""
        one = self.instructions.get(name)
        while one is not None and one.opcode in _VIEWS and one.operands:
            one = self.instructions.get(one.operands[0])
        return one


@dataclass(frozen=True)
class HloProgram:
    """A program.

    Attributes:
        computations: name -> computation.
        entry: the computation that runs.
    """

    computations: dict[str, HloComputation]
    entry: HloComputation

    def get_called(self, instruction: HloInstruction) -> list[HloComputation]:
        """Return the computations that an instruction calls."""
        return [self.computations[name] for name in instruction.called if name in self.computations]

    def iterate_nested(self, computation: HloComputation) -> Iterator[HloInstruction]:
        """Yield the instructions of a fused computation and of the fusions in it."""
        for one in computation.instructions.values():
            yield one
            if one.opcode == "fusion":
                for part in self.get_called(one):
                    yield from self.iterate_nested(part)


def parse_hlo(text: str) -> HloProgram:
    """Read the text of `compiled.as_text()`.

    Raises:
        ValueError: the text has no entry computation.
    """
    computations: dict[str, HloComputation] = {}
    entry = current = None
    for line in _COMMENT.sub("", text).splitlines():
        if not line.startswith((" ", "}", "\t")):
            header = _COMPUTATION.match(line)
            if header is not None and not line.startswith("HloModule"):
                current = computations[header[2]] = HloComputation()
                entry = current if header[1] else entry
            continue
        start = _INSTRUCTION.match(line)
        if start is None or current is None:
            continue
        one = _parse_instruction(start[2], line[start.end() :])
        current.instructions[one.name] = one
        if start[1]:
            current.root = one
    if entry is None:
        raise ValueError("the text has no line that begins with ENTRY: it is no optimized HLO")
    return HloProgram(computations, entry)


def _parse_instruction(name: str, line: str) -> HloInstruction:
    edge = _find_end(line, 0) + 1 if line.startswith("(") else line.find(" ")
    result, remaining = line[:edge], line[edge:].lstrip()
    start = remaining.find("(")
    end = _find_end(remaining, start)
    arguments = remaining[start + 1 : end]
    opcode = remaining[:start]
    is_literal = opcode == "constant"
    return HloInstruction(
        name,
        opcode,
        tuple(
            HloShape(kind, tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size))
            for kind, sizes in _SHAPE.findall(result)
        ),
        () if is_literal else tuple(_NAME.findall(arguments)),
        arguments,
        remaining[end + 1 :],
    )


def _find_end(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)
