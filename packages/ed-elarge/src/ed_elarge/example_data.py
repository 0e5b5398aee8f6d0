"""Small data sets for `elarge init`, one for each kind of rows; a run file replaces them later."""

from __future__ import annotations

from random import Random

_RANDOM = Random(0)
_SUMS = [(_RANDOM.randint(0, 12), _RANDOM.randint(0, 12)) for _ in range(100)]
_FILMS = ("the film", "the song", "the soup", "the train", "the garden")
_GOOD, _BAD = ("It is wonderful.", "It works well."), ("It is terrible.", "I would return it.")
_PEOPLE, _PLACES = ("Rosa", "Paul", "Lise", "Linus"), ("Berlin", "Dublin", "Oslo", "Rome")
_WORDS = "zero one two three four five six seven eight nine ten eleven twelve"
_NUMBERS = _WORDS.split(" ")


def _right(a: int, b: int) -> str:
    return f" {a + b}. The sum is {'even' if (a + b) % 2 == 0 else 'odd'}."


#: Texts, in the field `content`.
texts = [{"content": f"The sum of {a} and {b} is{_right(a, b)}"} for a, b in _SUMS]
#: Prompts, in the field `prompt`.
prompts = [{"prompt": f"{a} + {b} ="} for a, b in _SUMS]
#: A prompt with a better answer (`chosen`) and a worse one (`rejected`).
preferences = [
    {"prompt": f"{a} + {b} =", "chosen": _right(a, b), "rejected": " I do not know."}
    for a, b in _SUMS
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
