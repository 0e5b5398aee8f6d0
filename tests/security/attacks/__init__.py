"""The attack suite: requests and connections of strangers, tenants and broken clients.

A module of this package contains one kind of attack. An attack is one of two things:

- an `Ask`, one POST request that the server answers or rejects (`attacks`);
- a `Scenario`, a function that attacks the server at a port of this machine with any number of
  connections, and raises `AssertionError` if the server does not withstand (`scenarios`).

`tests/security/test_attack_suite.py` runs every attack, and `python -m tests.security.attacks`
measures the latency of `/health` during each.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.security.attacks import answers, strangers, tenants
from tests.security.attacks.bodies import bodies
from tests.security.attacks.media import media
from tests.security.attacks.requests import ROUTES, Ask, long_text

__all__ = ["ROUTES", "Ask", "Scenario", "attacks", "long_text", "scenarios"]

Scenario = Callable[[int], None]


def attacks() -> dict[str, Ask]:
    """Return the attacks with one request by name."""
    return {**bodies(), **answers.large_answers(), **media()}


def scenarios() -> dict[str, Scenario]:
    """Return the attacks with several connections by name."""
    return {
        "methods as labels": strangers.send_method_labels,
        "long targets": strangers.send_long_targets,
        "silent connections": strangers.hold_silent_connections,
        "unread answers": strangers.leave_answers_unread,
        "documents": strangers.request_documents,
        "extreme fields": strangers.send_extreme_fields,
        "background responses at once": answers.race_background_responses,
        "cancelled responses": answers.cancel_large_responses,
        "growing conversation": answers.grow_conversation,
        "MCP tools": tenants.call_hostile_tools,
        "batch beyond its quota": tenants.exceed_batch_quota,
    }
