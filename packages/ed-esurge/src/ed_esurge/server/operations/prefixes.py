"""`GET /v1/prefix/{id}`: why a prompt was computed, and not read from the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse

from ed_esurge.server.generation.answers import NearestPrompt, PrefixReport, PrefixUse
from ed_esurge.server.generation.models import RECENT_PROMPTS, RecentPrompt, ServedModel
from ed_esurge.server.generation.served_models import ServedModels
from ed_esurge.server.http.auth import get_owner
from ed_esurge.server.http.body import in_thread
from ed_esurge.server.http.errors import APIError
from ed_esurge.server.routing import READING, Endpoint

#: Number of tokens in each text of the answer.
SHOWN_TOKENS = 12


async def _explain(server: ServedModels, request: Request) -> JSONResponse:
    """Explain how the prompts of a request used the prefix cache.

    Raises:
        APIError: 404, no recent request of this key has the id, or its model was unloaded.
    """
    request_id, owner = request.path_params["id"], get_owner(request.scope)
    prompts = [one for one in server.state.recent_prompts if one.owner == owner]
    asked = [index for index, one in enumerate(prompts) if _belongs(one.label, request_id)]
    models = {model.names[0]: model for model in server.models}
    if not asked or prompts[asked[-1]].model not in models:
        raise APIError(
            f"no recent request of this key has the id {request_id!r}: send the `X-Request-Id` of "
            f"an answer; the server remembers the last {RECENT_PROMPTS} prompts of loaded models",
            status=404,
            code="not_found",
        )
    model = models[prompts[asked[-1]].model]
    data = [await explain_prompt(model, prompts[index], prompts[:index]) for index in asked]
    return JSONResponse(PrefixReport(object="list", data=data).model_dump())


def _belongs(label: str, request_id: str) -> bool:
    """Return whether a prompt belongs to a request: its label is the id, or id and index."""
    return label == request_id or (
        label.startswith(f"{request_id}-") and label[len(request_id) + 1 :].isdecimal()
    )


async def explain_prompt(
    model: ServedModel, prompt: RecentPrompt, earlier: Sequence[RecentPrompt]
) -> PrefixUse:
    """Return how a prompt used the prefix cache.

    Args:
        model: the model of the prompt.
        earlier: the earlier prompts of the same key.
    """
    earlier = [one for one in earlier if one.model == prompt.model]
    lengths = await in_thread(lambda: [_count_equal(prompt, one) for one in earlier])
    # The newest of several prompts with the longest equal beginning.
    candidates = [(length, place) for place, length in enumerate(lengths) if length]
    sharing = [one for one in candidates if earlier[one[1]].variant == prompt.variant]
    equal, place = max(sharing, default=(0, None))
    nearest = None if place is None else earlier[place]
    longest, place = max(candidates, default=(0, None))
    other = earlier[place] if place is not None and longest > equal else None
    nearest_tokens = nearest.tokens[equal : equal + SHOWN_TOKENS] if nearest else ()
    text_before, text, nearest_text = [
        await model.prompts.decode(list(tokens))
        for tokens in (
            prompt.tokens[max(equal - SHOWN_TOKENS, 0) : equal],
            prompt.tokens[equal : min(equal + SHOWN_TOKENS, prompt.size)],
            nearest_tokens,
        )
    ]
    return PrefixUse(
        id=prompt.label,
        prompt_tokens=prompt.size,
        cached_tokens=prompt.cached_tokens,
        page_size=model.engine.config.page_size,
        nearest=nearest
        and NearestPrompt(
            id=nearest.label,
            equal_tokens=equal,
            seconds_before=round(prompt.time - nearest.time, 3),
        ),
        text_before=text_before,
        text=text,
        nearest_text=nearest_text,
        reason=_get_reason(model, prompt, equal, other, longest),
    )


def _count_equal(prompt: RecentPrompt, earlier: RecentPrompt) -> int:
    """Return the number of equal tokens at the beginning. Tokens of items, such as images, are
    equal if the items are."""
    count = min(prompt.size, len(earlier.tokens))
    # Copies, because an array of a running request grows and cannot be viewed meanwhile.
    mine, theirs = (np.array(one.tokens[:count], np.int32) for one in (prompt, earlier))
    differs = np.flatnonzero(mine != theirs)
    count = int(differs[0]) if len(differs) else count
    items = set(prompt.items) ^ set(earlier.items)
    return min([count, *(start for start, _ in items)])


def _get_reason(
    model: ServedModel,
    prompt: RecentPrompt,
    equal: int,
    other: RecentPrompt | None,
    equal_of_other: int,
) -> str:
    """Return a sentence that says why no further token was read from the cache."""
    config = model.engine.config
    size, cached = config.page_size, prompt.cached_tokens
    # The last token is always computed, and a page is read only whole.
    readable = (prompt.size - 1) // size * size
    if not config.enable_prefix_caching:
        return "the engine has no prefix cache: start it with enable_prefix_caching"
    if prompt.scores_prompt:
        return "log-probabilities of the prompt were requested, so the whole prompt was computed"
    if cached is None:
        return "the prompt waits: ask again after its first token"
    if cached >= readable:
        return f"all whole pages of {size} tokens before the last token were read from the cache"
    if other is not None and equal < size:
        return (
            f"prompt {other.label} begins with the same {equal_of_other} tokens, but has another "
            "adapter or cache_salt, whose prompts share no pages"
        )
    if equal < size:
        return (
            f"no recent prompt begins with the same page of {size} tokens; the beginning of a "
            "prompt should not change between requests"
        )
    if equal // size * size > cached:
        elsewhere = ", or are in another replica" if len(model.engine.replica_stats()) > 1 else ""
        return (
            f"{equal} tokens equal those of an earlier prompt, but only {cached} were stored: its "
            "other pages, or for recurrent layers the state after them, were not yet written, or "
            f"were replaced by those of later prompts{elsewhere}; a larger num_pages keeps more"
        )
    return (
        f"token {equal} differs from the nearest prompt, and only whole pages of {size} tokens are "
        "read: move text that changes behind text that remains"
    )


ENDPOINTS = (
    Endpoint(
        "/v1/prefix/{id}",
        "Explain how the prompts of a recent request used the prefix cache.",
        _explain,
        PrefixReport,
        error_statuses=(*READING, 404),
    ),
)
