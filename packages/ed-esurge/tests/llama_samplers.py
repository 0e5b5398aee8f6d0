"""Apply the samplers of llama.cpp to logits: a program for an interpreter with `llama_cpp`.

Reads a JSON list of cases from the standard input, and prints the list of results. A case is
`{"sampler": …, "arguments": […], "logits": […], "accepted": […]}`; a result has the kept tokens, in
`kept`, and the logits of all tokens after the sampler, in `logits`.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Sequence
from typing import Any

import llama_cpp  # type: ignore[import-not-found]


def sampler_of(name: str, arguments: Sequence[float]) -> Any:
    """Create a sampler. DRY has no breakers, so the vocabulary is not read."""
    if name == "dry":
        multiplier, base, allowed, last = arguments
        return llama_cpp.llama_sampler_init_dry(
            None, multiplier, base, int(allowed), int(last), None, 0
        )
    return getattr(llama_cpp, f"llama_sampler_init_{name}")(*arguments)


def applied(case: dict[str, Any]) -> dict[str, Any]:
    """Return the result of one case."""
    sampler = sampler_of(case["sampler"], case["arguments"])
    for token in case.get("accepted", ()):
        llama_cpp.llama_sampler_accept(sampler, token)
    logits = case["logits"]
    data = (llama_cpp.llama_token_data * len(logits))(
        *(llama_cpp.llama_token_data(token, value, 0.0) for token, value in enumerate(logits))
    )
    array = llama_cpp.llama_token_data_array(data, len(logits), -1, False)
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
    entries = [array.data[place] for place in range(array.size)]
    llama_cpp.llama_sampler_free(sampler)
    return {"kept": [one.id for one in entries], "logits": {one.id: one.logit for one in entries}}


if __name__ == "__main__":
    print(json.dumps([applied(case) for case in json.load(sys.stdin)]))
