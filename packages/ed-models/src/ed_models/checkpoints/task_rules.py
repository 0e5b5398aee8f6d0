"""Weight rules of bodies without a head and of classifiers, derived from those of a family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ed_infra.errors import ConfigError

from ed_models.checkpoints.weight_map import WeightMap
from ed_models.weights.blocks import ArchitectureFields, Relation, Shape, Shapes, TheirName
from ed_models.weights.rules import STANDARD, Rule, TensorLayout, ignore, transpose

#: Name of the body in a module with a head.
BODY = "model"
_HEAD: Mapping[str, Shape] = {"lm_head.kernel": (1, 1), "lm_head.bias": (1,)}
#: The head of a classifier; its layout is Hugging Face's for all families.
SCORE = Rule("score.kernel", "score.weight", transpose)


def body_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of a body, from the rules of the class with the body under `model`.

    `transformers` saves a body without the first part of the names (`transformer.h.0…` is `h.0…`).
    Tensors of heads are ignored.
    """
    return (*(_build_body_rule(rule) for rule in rules), ignore(SCORE.hf), *_heads(rules))


def classifier_rules(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules of a classifier; the tensors of a language-model head are ignored."""
    return (SCORE, *rules, *_heads(rules))


def get_weight_rules(cls: type) -> Sequence[Rule]:
    """Return the weight rules of a module class: its own, or those of the class with its head."""
    for base in cls.__mro__:
        if "WEIGHTS" in vars(base):
            return vars(base)["WEIGHTS"]
        if "head_class" in vars(base):
            return body_rules(vars(base)["head_class"].WEIGHTS)
    return STANDARD


def _heads(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules that ignore the language-model head, under the names of the family."""
    names: list[str] = []
    for name, shape in _HEAD.items():
        with suppress(ConfigError):  # rules of a tied model may have no rule for the head
            names += WeightMap(rules, {name: shape}).hf_shapes
    return tuple(map(ignore, names))


def _build_body_rule(rule: Rule) -> Rule:
    first = f"{BODY}."
    if not rule.ours:  # an ignored tensor
        return ignore(rule.hf.removeprefix(first))
    names = (rule.ours,) if isinstance(rule.ours, str) else rule.ours
    open_ended = names[0].startswith("{")
    hf = first + rule.hf if open_ended and rule.hf.startswith("{") else rule.hf
    return Rule(tuple(n.removeprefix(first) for n in names), hf, _shorten_layout(rule.layout))


def _shorten_layout(layout: TensorLayout) -> TensorLayout:
    def relate(ours: Shapes, hf: TheirName, config: ArchitectureFields) -> Relation:
        relation = layout(ours, hf, config)
        shapes = {_rest(name): shape for name, shape in relation.hf_shapes.items()}
        return Relation(shapes, [replace(p, hf=_rest(p.hf)) for p in relation.pieces])

    return relate


def _rest(name: str) -> str:
    return name.partition(".")[2] or name
