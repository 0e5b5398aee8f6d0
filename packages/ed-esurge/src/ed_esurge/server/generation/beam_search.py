"""Sampling options of a request with beam search; see `ed_esurge.engine.beams`."""

from __future__ import annotations

from ed_esurge.sampling import SamplingParams
from ed_esurge.server.http.errors import APIError


def with_beams(params: SamplingParams, length_penalty: float, most_logprobs: int) -> SamplingParams:
    """Return the options for a search with `n` beams.

    Raises:
        APIError: 400, there are too many beams, or an option has no effect on beam search.
    """
    if 2 * params.n > most_logprobs:
        raise APIError(
            f"{params.n} beams need {2 * params.n} log-probabilities for each token, and the "
            f"engine returns at most {most_logprobs} (max_logprobs): request fewer beams",
            param="n",
        )
    for name in params.without_effect_on_beams():
        raise APIError(f"{name} has no effect on beam search: omit it", param=name)
    return params.replace(use_beam_search=True, length_penalty=length_penalty)
