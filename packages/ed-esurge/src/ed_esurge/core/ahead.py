"""The step after one whose tokens the host has not read: the device puts them in by itself."""

from __future__ import annotations

from ed_esurge.core.plan import UNREAD, PlanRow, StepPlan
from ed_esurge.core.scheduler import Scheduler


def plan_ahead(plan: StepPlan, scheduler: Scheduler) -> StepPlan | None:
    """Plan one more token for every sequence of a step that is under way.

    A sequence whose token turns out to be its last one has a row for nothing: it is gone when the
    results come, and only later steps use its pages, which run after this one.

    Args:
        plan: the step; the scheduler has not heard of its results (`advance`).

    Returns:
        None where there is more to do than that: somebody waits, prompts or pages are not at their
        end, pages must be taken or shared, or what comes next depends on the tokens themselves.
    """
    if scheduler.waiting or scheduler.proposer is not None:
        return None
    if len(plan.rows) != len(scheduler.running):
        return None
    size, rows = scheduler.pages.page_size, []
    for row in plan.rows:
        request = scheduler.requests.get(row.request_id)
        if request is None or request.tracked or row.samples != 1:
            return None
        start = row.start + len(row.token_ids)
        inside = start % size
        if inside == 0 or inside == size - 1:
            return None
        if len(request.output) + 1 < request.max_tokens:  # else its last token is under way
            rows.append(PlanRow(row.request_id, row.slot, start, UNREAD, {}, 1))
    return StepPlan(plan.step, tuple(rows), ahead=True) if rows else None
