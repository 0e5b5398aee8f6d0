"""The outcome of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

CheckStatus = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Outcome:
    """What a check found.

    Attributes:
        status: "not applicable" if the directory lacks a part that the check needs.
        evidence: the compared values, in one sentence.
    """

    status: CheckStatus
    evidence: str


@dataclass(frozen=True)
class ModelCheck:
    """One check.

    Attributes:
        name: identifier in the certificate.
        claim: the statement that holds if the check passes.
        run: the check, a function of a `CertifiedModel`.
        needs_model: whether the check computes with the model.
    """

    name: str
    claim: str
    run: Callable[[Any], Outcome]
    needs_model: bool = False


class NotApplicable(Exception):
    """The directory lacks a part that a check needs; the message names the part."""


class Failed(Exception):
    """The claim of a check does not hold; the message states the evidence."""


def pass_check(evidence: str) -> Outcome:
    return Outcome("passed", evidence)


def require_claim(holds: bool, evidence: str) -> None:
    """Raise `Failed` with the evidence unless a condition holds."""
    if not holds:
        raise Failed(evidence)
