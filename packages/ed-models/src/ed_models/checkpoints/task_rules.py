"""Tables of weights for what is saved without the rest: a body alone, a body under another head."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ed_infra.errors import ConfigError

from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.blocks import Relation, Shape
from ed_models.weights.rules import Layout, Rule, ignore, transpose

#: Our name of the body in a module with a head.
BODY = "model"
_HEAD: Mapping[str, Shape] = {"lm_head.kernel": (1, 1), "lm_head.bias": (1,)}
#: The head of a classifier, in Hugging Face's layout whatever the family's other matrices have.
SCORE = Rule("score.kernel", "score.weight", transpose)


def without_first_part(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The table of a body alone, of the table of the class that has it under `model`.

    `transformers` saves a body without the first part of its names (`transformer.h.0…` is `h.0…`).
    Heads in the files are ignored: of such a file only the body is read.
    """
    return (*(_alone(rule) for rule in rules), ignore(SCORE.hf), *_heads(rules))


def under_a_classifier(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """The table of a body with a head that classifies; a language-model head is ignored."""
    return (SCORE, *rules, *_heads(rules))


def _heads(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Rules that ignore the language-model head, under the name that the family has for it."""
    names: list[str] = []
    for name, shape in _HEAD.items():
        with suppress(ConfigError):  # a table of a tied model need not have a rule for it
            names += WeightMap(rules, {name: shape}).hf_shapes
    return tuple(map(ignore, names))


def _alone(rule: Rule) -> Rule:
    first = f"{BODY}."
    if not rule.ours:  # tensors that nobody needs
        return ignore(rule.hf.removeprefix(first))
    names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    open_ended = names[0].startswith("{")
    hf = first + rule.hf if open_ended and rule.hf.startswith("{") else rule.hf
    return Rule(tuple(n.removeprefix(first) for n in names), hf, _shortened(rule.layout))


def _shortened(layout: Layout) -> Layout:
    def relate(ours: Mapping[str, Shape], hf: Callable[..., str], config: object) -> Relation:
        relation = layout(ours, hf, config)
        shapes = {_rest(name): shape for name, shape in relation.hf_shapes.items()}
        return Relation(shapes, [replace(p, hf=_rest(p.hf)) for p in relation.pieces])

    return relate


def _rest(name: str) -> str:
    return name.partition(".")[2] or name
