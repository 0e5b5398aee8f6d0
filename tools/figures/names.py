"""Names that do not say what they do: functions that are no verbs, variables that are no nouns."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

#: Verbs that end like a participle.
VERBS = re.compile("embed|feed|need|seed|speed|read|shed|exceed|proceed|spread|unembed")
#: Participles, adjectives and relations.
STATES = re.compile(
    "[a-z]+ed|of_.*|.*_of|made|given|found|kept|taken|written|built|sent|known|held|chosen|shown|"
    "drawn|left|lent|cut|told|born|meant|spoilt|lost|met|whole|plain|wide|alone|alike|apart|other|"
    "others|own|near|far|again|present|enough"
)
#: Variables that name a state or a relation instead of the thing.
VAGUE = re.compile(
    "found|kept|taken|made|given|asked|own|written|sent|known|held|chosen|shown|left|here|alike|"
    "told|wanted|of_[a-z]+|[a-z]+_of|whole|plain|rest|spare|unset|other|others|several|both|some|"
    "each|early|late|then|once|what|where|why|how|beside|behind|beyond|apart|alone|near|again|"
    "further|after|before|until"
)


@dataclass
class Names:
    """The names that a source binds.

    Attributes:
        functions: Number of functions without properties and special methods.
        unclear_functions: The functions that are no verbs, with their number.
        variables: Number of bindings of variables and parameters.
        unclear_variables: The variables that are no nouns, with their number.
    """

    functions: int = 0
    unclear_functions: Counter[str] = field(default_factory=Counter)
    variables: int = 0
    unclear_variables: Counter[str] = field(default_factory=Counter)

    @property
    def function_rate(self) -> float:
        """Unclear functions per 1,000."""
        return 1000 * self.unclear_functions.total() / max(self.functions, 1)

    @property
    def variable_rate(self) -> float:
        """Unclear variables per 1,000."""
        return 1000 * self.unclear_variables.total() / max(self.variables, 1)


def count_names(texts: Iterable[str]) -> Names:
    """Count the functions and variables of Python sources."""
    names = Names()
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                if not node.name.startswith("__") and not _is_property(node):
                    names.functions += 1
                    names.unclear_functions[node.name] += is_unclear_function(node.name)
            elif isinstance(node, ast.arg):
                names.variables += 1
                names.unclear_variables[node.arg] += is_unclear_variable(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.variables += 1
                names.unclear_variables[node.id] += is_unclear_variable(node.id)
    names.unclear_functions = +names.unclear_functions
    names.unclear_variables = +names.unclear_variables
    return names


def is_unclear_function(name: str) -> bool:
    """Return whether a name is a participle, an adjective, `of_...` or `..._of`."""
    name = name.strip("_")
    return bool(STATES.fullmatch(name)) and not VERBS.fullmatch(name)


def is_unclear_variable(name: str) -> bool:
    """Return whether a name says in which state or relation a thing is, but not what it is."""
    return bool(VAGUE.fullmatch(name.removeprefix("_")))


def _is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    decorators = {getattr(d, "id", getattr(d, "attr", "")) for d in node.decorator_list}
    return bool(decorators & {"property", "cached_property", "setter"})
