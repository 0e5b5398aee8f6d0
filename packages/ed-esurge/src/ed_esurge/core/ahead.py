"""Planning of a step whose input tokens the host has not read: the device inserts them."""

from __future__ import annotations

from ed_esurge.core.plan import UNREAD, PlanRow, StepPlan
from ed_esurge.core.scheduler import Scheduler


def plan_ahead(plan: StepPlan, scheduler: Scheduler) -> StepPlan | None:
    """Plan one more token for every sequence of a running step.

    If the unread token ends a sequence, its row in the new step is wasted. The pages of such a
    sequence are safe: only later steps reuse them.

    Args:
        plan: the running step; `advance` has not processed its results.

    Returns:
        the plan, or None if the next step needs the scheduler: a request waits, a prompt is
        incomplete, a page must be allocated or shared, or the plan depends on the sampled tokens.
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
        if len(request.output) + 1 < request.max_tokens:  # else the running step ends the request
            rows.append(PlanRow(row.request_id, row.slot, start, UNREAD, {}, 1))
    return StepPlan(plan.step, tuple(rows), ahead=True) if rows else None
