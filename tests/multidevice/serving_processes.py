"""Run an engine over the devices of all processes, for `test_multidevice_serving`.

The first process writes the tokens to `<folder>/tokens.json`. Each process writes its sizes to
`<folder>/sizes_<i>.json`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_esurge.core.request import RequestError
from ed_esurge.engine import setup
from ed_esurge.runner.model_runner import ModelRunner
from ed_infra import distributed
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

PROMPTS = [np.random.default_rng(0).integers(3, 128, n).tolist() for n in (1, 19, 7, 30, 4)]


#: Options of the engine by the name of a test case.
CASES: dict[str, dict[str, Any]] = {
    "": {"overlap_execution": False},
    "overlap": {"overlap_execution": True},
    "draft": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    "offload": {"kv_offloading_size": 2.0**-10},
    "draft_offload": {
        "speculative_config": {"method": "draft_model", "num_speculative_tokens": 3},
        "kv_offloading_size": 2.0**-10,
    },
    "stored": {"kv_offloading_size": 2.0**-10, "num_pages": 40},
}


def engine(dims: tuple[int, ...], **options: Any) -> eSurge:
    """Return a tiny engine whose pages do not suffice for all requests at the same time."""
    fields = tiny_llama(vocab_size=128, num_hidden_layers=2, initializer_range=0.2)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=dims, scan_layers=False)
    if "speculative_config" in options:
        # A copy with other weights, so that some proposals are accepted and others are not.
        draft = LlamaConfig(**{**fields, "num_hidden_layers": 1}, sharding_axis_dims=dims)
        options["draft_model"] = LlamaForCausalLM.create(draft, seed=1)
    known = {
        "max_num_seqs": 4,
        "page_size": 8,
        "num_pages": 8,
        "max_num_seq_buckets": (4,),
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "compile_runner": False,
        "silent_mode": True,
    }
    return eSurge(LlamaForCausalLM.create(config, seed=1), **{**known, **options})


def break_requests(engine: eSurge) -> None:
    """Let the runner fail on sequences of the request `bad`."""
    for loop in getattr(engine.loop, "loops", (engine.loop,)):
        if type(loop.runner) is not ModelRunner:
            continue  # the sequence is in another process
        run = loop.runner.run

        def fail(plan: Any, run: Any = run) -> Any:
            for new in plan.started:
                if new.request_id.startswith("bad"):
                    raise RequestError(new.request_id) from RuntimeError("broken")
            return run(plan)

        loop.runner.run = fail


def served(engine: eSurge) -> list[Any]:
    """Return tokens of greedy and random requests; one is aborted, one rejected, some fail."""
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=9, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    for _ in range(2):  # the id is already in use
        try:
            engine.add_request("gone", PROMPTS[0], params[0])
        except ConfigError:
            continue
    for i in range(4):
        engine.add_request(f"bad{i}", PROMPTS[2], params[0])
    ended = engine.step()
    engine.abort_request("gone")
    outputs = engine.generate(PROMPTS, params)
    while engine.has_unfinished_requests:
        ended += engine.step()
    engine.pause()
    engine.resume()
    outputs += engine.generate(PROMPTS[:1], params[0])
    # Two prompts that fill the pages of two replicas, and evict all other pages.
    longest = [token for prompt in PROMPTS for token in prompt][:50]
    for together in ([PROMPTS[3]], [longest, longest[::-1]], [PROMPTS[3]]):
        outputs += engine.generate(together, params[0])
    failed = sorted([out.request_id, out.error] for out in ended if out.error)
    return [failed, *(output.outputs[0].token_ids for output in outputs)]


def stored(engine: eSurge) -> list[Any]:
    """Return the tokens of two prompts, and how many of their tokens had stored pages."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [[*range(10 * n + 3, 10 * n + 43)] for n in range(2)]
    outputs = [engine.generate(prompt, params)[0] for prompt in prompts]
    cached = [output.metrics.num_cached_tokens for output in outputs]
    return [cached, *(output.outputs[0].token_ids for output in outputs)]


def sizes(dims: tuple[int, ...]) -> dict[str, Any]:
    """Return the pages of engines whose second process has little or no memory."""
    made: dict[str, Any] = {}
    for name, pages in (("fewer", 12), ("none", 0)):
        room = 1000 if distributed.is_main() else pages

        def memory(model: Any, room: int = room) -> list[tuple[int, int]]:
            return [(2**30, int(2**30 * 0.85) - room * setup.page_bytes(model, 8))]

        setup.accelerator_memory = memory
        setup.Setup._workspace = lambda self, pages: 0
        try:
            made[name] = engine(dims, num_pages=None).loop.runner.num_pages["full"]
        except ConfigError as error:
            made[name] = str(error)
    return made


def run(folder: Path, engine: eSurge, requests: Callable[[eSurge], list[Any]]) -> None:
    """Execute requests in the first process, and write their tokens and the engine's metrics."""
    if not distributed.is_main():
        engine.follow()
        return
    tokens = requests(engine)
    engine.terminate()
    (folder / "tokens.json").write_text(json.dumps(tokens))
    (folder / "stats.json").write_text(json.dumps(engine.stats()))


def main(folder: Path, dims: tuple[int, ...], case: str) -> None:
    assert distributed.initialize()
    assert jax.process_count() == 2
    if case == "stored":
        pages = str(folder / "pages")
        run(folder, engine(dims, **CASES[case], prefix_cache_directory=pages), stored)
        return
    ours = engine(dims, **CASES[case])
    for loop in getattr(ours.loop, "loops", (ours.loop,)):
        if isinstance(loop.runner, ModelRunner):  # what a sleeping engine on an accelerator does
            loop.runner.weights.to_host()
            assert not loop.runner.weights.there
            loop.runner.weights.from_host()
    break_requests(ours)
    run(folder, ours, served)
    (folder / f"sizes_{jax.process_index()}.json").write_text(json.dumps(sizes(dims)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(int(n) for n in sys.argv[2:7]), "".join(sys.argv[7:]))
