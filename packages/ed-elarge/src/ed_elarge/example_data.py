"""Small data sets for `elarge init`, one for each kind of rows; a run file replaces them later."""

from __future__ import annotations

import struct
import zlib
from itertools import product
from random import Random

from ed_data.kinds import ROW_KINDS
from ed_data.schema import Row

_RANDOM = Random(0)
_SUMS = [(_RANDOM.randint(0, 12), _RANDOM.randint(0, 12)) for _ in range(100)]
_FILMS = ("the film", "the song", "the soup", "the train", "the garden")
_GOOD, _BAD = ("It is wonderful.", "It works well."), ("It is terrible.", "I would return it.")
_PEOPLE, _PLACES = ("Rosa", "Paul", "Lise", "Linus"), ("Berlin", "Dublin", "Oslo", "Rome")
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = _WORDS.split(" ")


def __getattr__(name: str) -> list[Row]:
    """Return the example row of a kind without a list of its own, many times."""
    if name not in ROW_KINDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return [ROW_KINDS[name].kind.example] * 100


def _right(a: int, b: int) -> str:
    return f" {a + b}. The sum is {'even' if (a + b) % 2 == 0 else 'odd'}."


#: Texts, in the field `content`.
texts = [{"content": f"The sum of {a} and {b} is{_right(a, b)}"} for a, b in _SUMS]
#: Prompts, in the field `prompt`.
prompts = [{"prompt": f"{a} + {b} ="} for a, b in _SUMS]
#: Prompts with a demonstration for the teacher of `sdft`.
demonstrations = [
    {"prompt": f"{a} + {b} =", "privileged_context": f"{b} + {a} ={_right(a, b)}"} for a, b in _SUMS
]
#: A prompt with a better answer (`chosen`) and a worse one (`rejected`).
preferences = [
    {"prompt": f"{a} + {b} =", "chosen": _right(a, b), "rejected": " I do not know."}
    for a, b in _SUMS
]
#: Preferences with a third answer that is right (`reference`).
triples = [
    {**row, "chosen": f" It is {a + b}.", "reference": _right(a, b)}
    for row, (a, b) in zip(preferences, _SUMS, strict=True)
]
#: Answers with a `label`: true for a good answer.
labelled = [
    {
        "prompt": f"{a} + {b} =",
        "completion": _right(a, b) if i % 2 else " I do not know.",
        "label": bool(i % 2),
    }
    for i, (a, b) in enumerate(_SUMS)
]
#: Answers in steps, with a label for each step.
steps = [
    {
        "prompt": f"What is {a} + {b} + 1?",
        "completions": [f"{a} + {b} = {a + b}.", f"{a + b} + 1 = {a + b + 1 + i % 2}."],
        "labels": [True, not i % 2],
    }
    for i, (a, b) in enumerate(_SUMS)
]
#: Pairs of texts with the same meaning.
meanings = [
    {"anchor": f"the sum {a} and {b}", "positive": f"{_NUMBERS[a]} plus {_NUMBERS[b]}"}
    for a, b in dict.fromkeys(_SUMS)
]
#: A question, an answer, and the class of the answer.
opinions = [
    {
        "text": f"How was {_FILMS[i % 5]}?",
        "text_pair": (_GOOD if i % 2 else _BAD)[i // 2 % 2],
        "label": "positive" if i % 2 else "negative",
    }
    for i in range(100)
]
#: Words, each with the name of its class.
entities = [
    {
        "tokens": [_PEOPLE[i % 4], "met", _PEOPLE[i // 4 % 4], "in", _PLACES[i // 16 % 4], "."],
        "labels": ["B-PER", "O", "B-PER", "O", "B-LOC", "O"],
    }
    for i in range(64)
]
#: Queries and documents, with a label: 1 for a relevant document.
relevance = [
    {
        "query": f"what is {a} and {b}?",
        "document": f"The sum is {a + b}." if i % 2 else "The weather is nice.",
        "label": i % 2,
    }
    for i, (a, b) in enumerate(_SUMS)
]
#: Questions whose answers are parts of a context.
questions = [
    {
        "question": "Where was it?",
        "context": f"{_PEOPLE[i % 4]} lived in {_PLACES[i // 4 % 4]}.",
        "answers": {
            "text": [_PLACES[i // 4 % 4]],
            "answer_start": [len(f"{_PEOPLE[i % 4]} lived in ")],
        },
    }
    for i in range(64)
]
#: Questions with four choices, and the number of the right one.
choices = [
    {
        "question": f"What is {a} plus {b}?",
        "choices": [str(a + b + (row - i) % 4) for row in range(4)],
        "label": i % 4,
    }
    for i, (a, b) in enumerate(_SUMS)
]


_COLORS = {
    "red": (220, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 230),
    "yellow": (230, 220, 50),
    "purple": (170, 60, 200),
    "white": (240, 240, 240),
}
_CORNERS = {"top left": (0, 0), "top right": (0, 8), "bottom left": (8, 0), "bottom right": (8, 8)}
#: Shape -> whether a pixel of a field of 8 x 8 belongs to the shape.
_SHAPES = {
    "square": lambda y, x: True,
    "cross": lambda y, x: y in (3, 4) or x in (3, 4),
    "frame": lambda y, x: y in (0, 7) or x in (0, 7),
    "triangle": lambda y, x: x <= y,
}


def _png(shape: str, color: str, corner: str) -> bytes:
    """Return an image of 16 x 16 pixels in the format PNG: a shape on a noisy background."""
    top, left = _CORNERS[corner]
    lines = bytearray()
    for y in range(16):
        lines.append(0)  # the pixels of a line follow without a filter
        for x in range(16):
            inside = 0 <= y - top < 8 and 0 <= x - left < 8 and _SHAPES[shape](y - top, x - left)
            lines += bytes(_COLORS[color] if inside else [_RANDOM.randrange(60)] * 3)

    def chunk(name: bytes, content: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + check

    head = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)  # 8 bits for each of three colors
    parts = chunk(b"IHDR", head), chunk(b"IDAT", zlib.compress(bytes(lines))), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


#: Images of shapes, each with the name of its shape and a caption.
drawings = [
    {
        "image": _png(shape, color, corner),
        "label": shape,
        "text": f"a {color} {shape} at the {corner}",
    }
    for shape, color, corner in [*product(_SHAPES, _COLORS, _CORNERS)] * 2
]
_RANDOM.shuffle(drawings)
