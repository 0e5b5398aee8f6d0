"""Calls of every target of the native library, valid ones and damaged ones, through `jax.ffi`.

`test_layers_native_boundary.py` runs this file as a program, with a seed and a count. The program
prints each call before the call runs, so the last line names the call that ended the process.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from ed_layers.native.library import TARGETS, level
from ed_layers.native.products import PANEL

BFLOAT16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT32, FLOAT16, INT32 = np.dtype("float32"), np.dtype("float16"), np.dtype("int32")
INT8, UINT8 = np.dtype("int8"), np.dtype("uint8")
DTYPES = (FLOAT32, BFLOAT16, FLOAT16, INT32, INT8, UINT8, FP8)
NUMBERS = frozenset({FLOAT32, BFLOAT16})


@dataclass(frozen=True)
class Buffer:
    """An argument or a result of a call.

    Attributes:
        values: of an argument whose numbers matter; None = random.
        free_axes: axes that have other valid sizes, such as another number of groups.
        free_dtypes: dtypes that are valid, too.
        free_shape: any shape is valid, since the call does not read the buffer.
        may_be_empty: size 0 is valid.
        may_have_layers: one more axis in front is valid.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype = FLOAT32
    values: tuple[int, ...] | None = None
    free_axes: frozenset[int] = frozenset()
    free_dtypes: frozenset[np.dtype] = frozenset()
    free_shape: bool = False
    may_be_empty: bool = False
    may_have_layers: bool = False

    def array(self, rng: np.random.Generator) -> jax.Array:
        if self.values is not None:
            flat = np.resize(np.asarray(self.values), math.prod(self.shape))
            return jnp.asarray(flat.reshape(self.shape), self.dtype)
        numbers = rng.integers(0, 3, self.shape)
        return jnp.asarray(numbers.astype(self.dtype))


@dataclass(frozen=True)
class Call:
    """A call of a target: the arguments, the results and the attributes."""

    target: str
    arguments: tuple[Buffer, ...]
    results: tuple[Buffer, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def run(self, rng: np.random.Generator) -> list[np.ndarray]:
        shapes = [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in self.results]
        call = jax.ffi.ffi_call(TARGETS[self.target], shapes)
        results = call(*(a.array(rng) for a in self.arguments), **self.attributes)
        return [np.asarray(r) for r in results]

    def __str__(self) -> str:
        buffers = [f"{b.name}: {b.dtype}{list(b.shape)}" for b in (*self.arguments, *self.results)]
        return f"{self.target} {', '.join(buffers)} {self.attributes}"


def epilogue(
    rng: np.random.Generator, o: int, dtype: np.dtype, matrices: int, *, gated: bool
) -> tuple[list[Buffer], dict[str, Any]]:
    """Return the biases of a call of products, and its attributes."""
    biased = bool(rng.integers(2))
    biases = [Buffer(f"b{j}", (o,), dtype) for j in range(matrices if biased else 0)]
    return biases, {"biased": biased, "gated": gated, "act": np.int64(rng.integers(6))}


def product(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, i, o, gated = size(5), size(24), size(33), bool(rng.integers(2))
    turned, dtype = bool(rng.integers(2)), FLOAT32 if rng.integers(2) else BFLOAT16
    if rng.integers(4) == 0:
        n += 64  # the form for many rows
    shape, count = (o, i) if turned else (i, o), 2 if gated else 1
    w = [Buffer(f"w{j}", shape, FLOAT32, free_dtypes=NUMBERS) for j in range(count)]
    if rng.integers(3) == 0:
        panels, turned = size(2), False
        i, o = 2 * i, panels * PANEL
        w = [Buffer(f"w{j}", (panels, i, PANEL), FLOAT32) for j in range(count)]
        if rng.integers(2):
            w = [Buffer(f"w{j}", (panels, i // 2, PANEL, 2), BFLOAT16) for j in range(count)]
    biases, attributes = epilogue(rng, o, dtype, count, gated=gated)
    # Results of bfloat16 rows may be float32.
    of_x = frozenset({BFLOAT16}) if dtype == FLOAT32 else frozenset()
    return Call(
        "ed_product",
        (Buffer("x", (n, i), dtype, free_dtypes=of_x), *w, *biases),
        (Buffer("y", (n, o), dtype, free_dtypes=frozenset({FLOAT32})),),
        {"transposed": turned, "fixed": bool(rng.integers(2)), **attributes},
    )


def gradients(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, i, dtype = size(70), size(90), FLOAT32 if rng.integers(2) else BFLOAT16
    widths = [size(70) for _ in range(rng.integers(1, 4))]
    d_ys = [Buffer(f"d_y{j}", (n, o), dtype) for j, o in enumerate(widths)]
    results = [Buffer(f"d_w{j}", (i, o), FLOAT32) for j, o in enumerate(widths)]
    if dtype == BFLOAT16:
        results.append(Buffer("buffer", (n, i), FLOAT32))
    return Call("ed_gradients", (Buffer("x", (n, i), dtype), *d_ys), tuple(results))


def product_of_codes(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, groups, o, half = size(5), size(3), size(33), bool(rng.integers(2))
    whole, turned, offset = (bool(rng.integers(2)) for _ in range(3))
    i = 8 * groups
    shapes = [(i // 2 if half else i, o), (groups, o), (groups, o) if offset else (0, 0)]
    codes, scale, zero = (shape[::-1] if turned else shape for shape in shapes)
    small = frozenset({FLOAT32, FLOAT16, UINT8})
    kinds = frozenset({INT8, FP8}) if not (half or whole) else frozenset()
    matrix = (
        Buffer("codes", codes, UINT8 if half else INT8, free_dtypes=kinds),
        # Any number of groups that divides the inputs is valid where no zero repeats the number.
        Buffer(
            "scale",
            scale,
            free_dtypes=small,
            free_axes=frozenset() if offset else frozenset({1 if turned else 0}),
        ),
        Buffer("zero", zero, free_dtypes=small, may_be_empty=True),
        Buffer("table", (16 if half else 0,)),
    )
    biases, attributes = epilogue(rng, o, FLOAT32, 1, gated=False)
    attributes |= {"transposed": turned, "whole": whole}
    results, arguments = (Buffer("y", (n, o)),), (Buffer("x", (n, i)), *matrix, *biases)
    return Call("ed_product_of_codes", arguments, results, attributes)


def code_panels(rng: np.random.Generator, panels: int, groups: int) -> tuple[Buffer, dict, int]:
    """Return random panels of codes, the attributes of their format, and the inputs of a group."""
    bits, scale, zero = (int(rng.choice(sizes)) for sizes in ((4, 8), (2, 4), (0, 1, 4)))
    size = PANEL * (scale + zero + bits)
    attributes = {"bits": bits, "scale_bytes": scale, "zero_bytes": zero}
    numbers = {name: np.int64(number) for name, number in attributes.items()}
    return Buffer("panels", (panels, groups, size), UINT8, free_axes=frozenset({0})), numbers, 8


def product_of_code_panels(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, panels, groups = size(5), size(2), size(3)
    w, form, group = code_panels(rng, panels, groups)
    w = replace(w, free_axes=frozenset())
    biases, attributes = epilogue(rng, panels * PANEL, FLOAT32, 1, gated=False)
    arguments, results = (Buffer("x", (n, groups * group)), w, *biases), (n, panels * PANEL)
    attributes |= form
    return Call("ed_product_of_code_panels", arguments, (Buffer("y", results),), attributes)


def take(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, panels, groups = size(5), size(2), size(3)
    w, form, group = code_panels(rng, panels, groups)
    at = Buffer("at", (n,), INT32, values=(3, -1, 60, 1000, -1000))
    return Call("ed_take", (w, at), (Buffer("rows", (n, groups * group)),), form)


def first_largest(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    n, v = size(5), size(90)
    x = Buffer("x", (n, v), free_axes=frozenset({1}))
    return Call("ed_first_largest", (x,), (Buffer("at", (n,), INT32),))


SCORING = {
    "scale": np.float32(0.5),
    "soft_cap": np.float32(0),
    "alibi_factor": np.float32(0.5),
    "alibi_rounded": True,
}
FORWARD = {**SCORING, "fixed": False}


def mask(b: int, s: int, t: int) -> tuple[Buffer, ...]:
    shapes = {"q_segments": (b, s), "q_index": (b, s), "k_segments": (b, t), "k_index": (b, t)}
    return tuple(Buffer(name, shape, INT32) for name, shape in shapes.items())


DROPOUT = {"dropout": np.float32(0.25), "drop_below": np.int64(1 << 30)}


def biases(rng: np.random.Generator, h: int) -> tuple[Buffer, Buffer]:
    shape = (h, 2 * int(rng.integers(1, 9)) + 1) if rng.integers(2) else (0, 0)
    slopes = (h,) if rng.integers(2) else (0,)
    return (
        Buffer("distances", shape, free_axes=frozenset({1}), may_be_empty=True),
        Buffer("slopes", slopes, may_be_empty=True),
    )


def seed(rng: np.random.Generator) -> Buffer:
    return Buffer("seed", (2 * int(rng.integers(2)),), INT32, may_be_empty=True)


LIMITS = Buffer("limits", (2,), INT32, values=(0, 0))


def attention(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    b, s, t, g, k, d = size(2), size(5), size(7), size(3), size(8), size(9)
    h = 2 * g
    arguments = (
        Buffer("q", (b, s, h, k)),
        Buffer("k", (b, t, g, k), free_dtypes=NUMBERS),
        Buffer("v", (b, t, g, d), free_dtypes=NUMBERS),
        *mask(b, s, t),
        LIMITS,
        *biases(rng, h),
        seed(rng),
    )
    results = (Buffer("out", (b, s, h, d)), Buffer("lse", (b, s, h)))
    attributes = {**FORWARD, **DROPOUT, "causal": bool(rng.integers(2))}
    return Call("ed_attention", arguments, results, attributes)


def attention_back(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    b, s, t, g, k, d = size(2), size(5), size(7), size(3), size(8), size(9)
    h = 2 * g
    shapes = {"q": (b, s, h, k), "k": (b, t, g, k), "v": (b, t, g, d)}
    table, slopes = biases(rng, h)
    # The gradient repeats the shape.
    table = replace(table, free_axes=frozenset(), may_be_empty=False)
    arguments = (
        *(Buffer(name, shape) for name, shape in shapes.items()),
        *mask(b, s, t),
        LIMITS,
        table,
        slopes,
        seed(rng),
        Buffer("lse", (b, s, h)),
        Buffer("shared", (b, s, h)),
        Buffer("d_out", (b, s, h, d)),
    )
    results = tuple(Buffer(f"d_{name}", shape) for name, shape in shapes.items())
    results += (Buffer("d_distances", table.shape),)
    attributes = {**SCORING, **DROPOUT, "causal": bool(rng.integers(2))}
    return Call("ed_attention_back", arguments, results, attributes)


def sinks_of(rng: np.random.Generator, h: int) -> Buffer:
    return Buffer("sinks", (h,) if rng.integers(2) else (0,), may_be_empty=True)


def attention_cached(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    b, s, t, g, k, d = size(2), size(5), size(7), size(3), size(8), size(10)
    h, lead = 2 * g, (3,) if rng.integers(2) else ()
    codes = bool(rng.integers(2))
    kinds = frozenset({FLOAT32, BFLOAT16, INT8, FP8}) if codes else NUMBERS
    dtype = INT8 if codes else FLOAT32
    arguments = (
        Buffer("q", (b, s, h, k)),
        Buffer("k", (*lead, b, g, t, k), dtype, free_dtypes=kinds),
        Buffer("v", (*lead, b, g, t, d), dtype, free_dtypes=kinds),
        *(
            Buffer(
                n,
                (*lead, b, g, 2, t) if codes else (0,),
                free_shape=not codes,
                free_axes=frozenset({len(lead) + 2}),
            )
            for n in ("k_scale", "v_scale")
        ),
        Buffer("layer", (1,), INT32, values=(2 if lead else 0,)),
        *mask(b, s, t),
        LIMITS,
        sinks_of(rng, h),
        *biases(rng, h),
    )
    attributes = {**FORWARD, "causal": bool(rng.integers(2))}
    return Call("ed_attention_cached", arguments, (Buffer("out", (b, s, h, d)),), attributes)


def attention_paged(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    pages, page_size, g, k = size(6), size(4), size(3), size(8)
    h, tokens, n, lead = 2 * g, size(9), size(2), (3,) if rng.integers(2) else ()
    codes = bool(rng.integers(2))
    first = len(lead)
    pool_axes = frozenset() if codes else frozenset(range(first + 5))
    arguments = (
        Buffer("q", (tokens, h, k), free_axes=frozenset() if codes else frozenset({2})),
        Buffer(
            "pool",
            (*lead, pages, page_size, g, 2, k),
            INT8 if codes else FLOAT32,
            free_axes=pool_axes,
            may_have_layers=not (codes or lead),
            free_dtypes=frozenset({FLOAT32, BFLOAT16, INT8, FP8}) if codes else NUMBERS,
        ),
        Buffer(
            "scales",
            (*lead, pages, g, 2, 2, page_size) if codes else (0,),
            free_shape=not codes,
            free_axes=frozenset({first + 3}),
        ),
        Buffer("layer", (1,), INT32, values=(2 if lead else 0,)),
        Buffer("first_query", (n + 1,), INT32, values=(0, 3, 7)),
        Buffer("lengths", (n,), INT32, values=(5, 4)),
        Buffer("used", (1,), INT32, values=(2,)),
        Buffer("pages", (n, 2), INT32, values=(0, 5, 2, 3), free_axes=frozenset({1})),
        LIMITS,
        sinks_of(rng, h),
        *biases(rng, h),
    )
    out = Buffer("out", (tokens, h, k), free_axes=frozenset() if codes else frozenset({2}))
    return Call("ed_attention_paged", arguments, (out,), FORWARD)


def put(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    shape, width, n = (size(2), size(5)), size(3), size(4)
    dtype = DTYPES[rng.integers(len(DTYPES))]
    arguments = (
        Buffer("array", (*shape, width), dtype),
        Buffer("index", (n,), INT32, values=(3, -1, 9, 100)),
        Buffer("rows", (n, width), dtype),
    )
    return Call("ed_put", arguments, (Buffer("result", (*shape, width), dtype),), {"axes": 2})


def rotary(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    b, s, h, pairs = size(2), size(5), size(3), size(4)
    dtype = FLOAT32 if rng.integers(2) else BFLOAT16
    angles = [Buffer(name, (b, s, pairs)) for name in ("cos", "sin")]
    x = Buffer("x", (b, s, h, 2 * pairs + 1), dtype)
    attributes = {"neighbours": bool(rng.integers(2)), "back": bool(rng.integers(2))}
    return Call("ed_rotary", (x, *angles), (replace(x, name="y"),), attributes)


def recurrence(rng: np.random.Generator, size: Callable[[int], int]) -> Call:
    m, r, c, g, k, v = size(3), size(2), size(4), size(2), size(5), size(18)
    h, keys_last = 2 * g, bool(rng.integers(2))
    rates, beta = (bool(rng.integers(2)) for _ in range(2))
    rates, beta = rates and keys_last, beta and not keys_last
    states = (m, h, v, k) if keys_last else (m, h, k, v)
    arguments = (
        Buffer("states", states),
        Buffer("owner", (r,), INT32, values=(2, 0)),
        Buffer("marks", (r, c), INT32),
        Buffer("query", (r, c, g, k)),
        Buffer("key", (r, c, g, k)),
        Buffer("value", (r, c, h, v)),
        Buffer("decay", (r, c, h, v if rates else 1)),
        Buffer("rates", (h, v, k) if rates else (0, 0, 0), may_be_empty=True),
        Buffer("beta", (r, c, h) if beta else (0, 0, 0), may_be_empty=True),
    )
    results = (Buffer("after", states), Buffer("out", (r, c, h, v)))
    return Call("ed_recurrence", arguments, results, {"keys_last": keys_last})


MAKERS = {
    "ed_product": product,
    "ed_product_of_codes": product_of_codes,
    "ed_product_of_code_panels": product_of_code_panels,
    "ed_take": take,
    "ed_first_largest": first_largest,
    "ed_gradients": gradients,
    "ed_attention": attention,
    "ed_attention_back": attention_back,
    "ed_attention_cached": attention_cached,
    "ed_attention_paged": attention_paged,
    "ed_put": put,
    "ed_rotary": rotary,
    "ed_recurrence": recurrence,
}
#: Arguments that number parts of other arguments.
NUMBERED = frozenset({"layer", "pages", "first_query", "owner"})
#: Attributes that no call accepts.
BAD_ATTRIBUTES = {
    "act": (np.int64(-1), np.int64(6), np.int64(2**40)),
    "axes": (-1, 0, 99),
    "bits": (np.int64(0), np.int64(5), np.int64(16)),
    "scale_bytes": (np.int64(0), np.int64(1), np.int64(8)),
    "zero_bytes": (np.int64(-1), np.int64(2), np.int64(8)),
    "drop_below": (np.int64(-1), np.int64(2**32), np.int64(2**40)),
}


def damaged_buffer(rng: np.random.Generator, buffer: Buffer) -> tuple[Buffer, bool]:
    """The buffer with another dtype or shape, and whether the call has to be refused."""
    kind, rank = rng.choice(["dtype", "size", "size", "rank"]), len(buffer.shape)
    if kind == "dtype":
        dtype = DTYPES[rng.integers(len(DTYPES))]
        unread = buffer.free_shape or (buffer.may_be_empty and 0 in buffer.shape)
        valid = dtype == buffer.dtype or dtype in buffer.free_dtypes or unread
        return replace(buffer, dtype=dtype), not valid
    if rank == 0:  # of an earlier damage
        return replace(buffer, shape=(2,)), True
    axis = int(rng.integers(rank))
    if kind == "rank":
        longer = bool(rng.integers(2))
        shape = (2, *buffer.shape) if longer else buffer.shape[:axis] + buffer.shape[axis + 1 :]
        empty = buffer.may_be_empty and 0 in shape
        valid = buffer.free_shape or empty or (longer and buffer.may_have_layers)
        return replace(buffer, shape=shape), not valid
    old = buffer.shape[axis]
    new = int(rng.choice([0, 1, max(0, old - 1), old + 1, 2 * old, 40 * old]))
    shape = (*buffer.shape[:axis], new, *buffer.shape[axis + 1 :])
    valid = new == old or axis in buffer.free_axes or buffer.free_shape
    valid = valid or (buffer.may_be_empty and 0 in shape)
    return replace(buffer, shape=shape), not valid


def damaged(rng: np.random.Generator, call: Call) -> tuple[Call, bool]:
    """The call with one damage, and whether the call has to be refused."""
    bad = [name for name in call.attributes if name in BAD_ATTRIBUTES]
    if bad and rng.random() < 0.1:
        value = BAD_ATTRIBUTES[bad[0]][rng.integers(3)]
        return replace(call, attributes={**call.attributes, bad[0]: value}), True
    numbered = [i for i, a in enumerate(call.arguments) if a.name in NUMBERED]
    if numbered and rng.random() < 0.2:
        at = numbered[rng.integers(len(numbered))]
        buffer = call.arguments[at]
        wrong = replace(
            buffer, values=tuple(int(rng.choice([-1, 1000, 2**31 - 1])) for _ in range(4))
        )
        arguments = (*call.arguments[:at], wrong, *call.arguments[at + 1 :])
        return replace(call, arguments=arguments), True
    buffers = [*call.arguments, *call.results]
    at = int(rng.integers(len(buffers)))
    buffers[at], refused = damaged_buffer(rng, buffers[at])
    count = len(call.arguments)
    return replace(call, arguments=(*buffers[:count],), results=(*buffers[count:],)), refused


def calls(seed: int, count: int) -> Iterator[tuple[Call, str]]:
    """Calls of every target in turns, and what has to come: "valid", "refused" or "either"."""
    rng = np.random.default_rng(seed)
    for turn in range(count):
        for maker in MAKERS.values():
            if turn % 8 == 0:
                yield maker(rng, lambda n: n), "valid"
            elif turn % 8 == 1:  # sizes of zero
                yield maker(rng, lambda n: 0 if rng.random() < 0.3 else n), "either"
            elif turn % 8 == 2:
                call = maker(rng, lambda n: n)
                for _ in range(3):
                    call = damaged(rng, call)[0]
                yield call, "either"
            else:
                call, refused = damaged(rng, maker(rng, lambda n: n))
                # XLA removes a call whose results are all empty.
                empty = all(0 in result.shape for result in call.results)
                yield call, "refused" if refused and not empty else "either"


def main(seed: int, count: int) -> None:
    assert level() is not None
    assert set(MAKERS) == set(TARGETS), "every target has a maker of calls"
    rng, surprises, refusals = np.random.default_rng(seed), [], []
    for number, (call, expected) in enumerate(calls(seed, count)):
        print(f"{number} {expected}: {call}", file=sys.stderr, flush=True)
        try:
            call.run(rng)
        except Exception as error:
            if expected == "valid":
                surprises.append(f"{number}: {call} was refused: {error}")
            refusals.append(str(error))
        else:
            if expected == "refused":
                surprises.append(f"{number}: {call} was accepted")
    print(json.dumps({"surprises": surprises, "refusals": refusals}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
