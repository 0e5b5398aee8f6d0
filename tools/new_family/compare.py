"""Draft families that exist, and compare the drafts with the files that were written by hand.

uv run python -m tools.new_family.compare llama qwen3 gemma2
"""

from __future__ import annotations

import difflib
import os
import sys
from dataclasses import dataclass

from tools.new_model import FAMILIES


@dataclass(frozen=True)
class Comparison:
    """A draft of an existing family beside its file.

    Attributes:
        model_type: the family.
        errors: tiny configuration of the family -> largest difference of the logits of the draft
            from those of `transformers`.
        unexplained: why there is no draft.
        lines, hand_lines: number of lines of the draft, and of the file.
        changed: number of lines of code that only one of both has.
        seconds: duration of the draft, with its comparisons.
    """

    model_type: str
    errors: dict[str, float]
    unexplained: str
    lines: int
    hand_lines: int
    changed: int
    seconds: float

    @property
    def is_equal(self) -> bool:
        """Whether the draft has the logits of `transformers` in each configuration."""
        from tools.new_family.build import BOUND

        return bool(self.errors) and max(self.errors.values()) <= BOUND

    def __str__(self) -> str:
        result = "equal" if self.is_equal else self.unexplained or f"differs: {self.errors}"
        sizes = f"{self.lines} lines, by hand {self.hand_lines}, {self.changed} changed"
        return f"{self.model_type}: {result} ({sizes}, {self.seconds:.1f} s)"


def compare_family(model_type: str) -> Comparison:
    """Draft a family that exists, and compare its logits in the configurations of the family."""
    from ed_infra import registry
    from ed_models.conformance import Cases

    from tests.conformance.cases import cases
    from tools.new_family.build import Sample, draft_family, load_draft

    result = draft_family(model_type, set(registry.model_types()))
    by_hand = (FAMILIES / f"{model_type}.py").read_text(encoding="utf-8")
    source = result.draft.source if result.draft else ""
    errors: dict[str, float] = {}
    if result.draft is not None:
        module_class, rows = load_draft(result.draft), cases(model_type)[model_type].rows
        for row in rows:
            errors[row] = Sample(model_type, row, Cases(rows)).compare(module_class)
    return Comparison(
        model_type=model_type,
        errors=errors,
        unexplained=result.unexplained,
        lines=len(source.splitlines()),
        hand_lines=len(by_hand.splitlines()),
        changed=count_changes(source, by_hand) if source else 0,
        seconds=result.seconds,
    )


def count_changes(source: str, by_hand: str) -> int:
    """Return the number of lines after the description that only one of two sources has."""
    ours, theirs = (text.split('"""', 2)[-1].splitlines() for text in (source, by_hand))
    return sum(line[0] in "+-" for line in difflib.ndiff(ours, theirs))


def main(model_types: list[str]) -> int:
    """Print a comparison for each type; 1 if a draft has other logits."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    status = 0
    for model_type in model_types:
        comparison = compare_family(model_type)
        print(comparison, flush=True)
        status |= int(not comparison.is_equal)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
