"""What each process of `test_multidevice_serving` runs: an engine over the devices of all.

The first one's tokens go to `<folder>/tokens.json`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax
import numpy as np
from ed_esurge import SamplingParams, eSurge
from ed_infra import distributed
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

PROMPTS = [np.random.default_rng(0).integers(3, 128, n).tolist() for n in (1, 19, 7, 30, 4)]


def engine(dims: tuple[int, ...]) -> eSurge:
    """A tiny one whose pages do not hold all requests at once."""
    fields = tiny_llama(vocab_size=128, num_hidden_layers=2, initializer_range=0.2)
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=dims, scan_layers=False)
    return eSurge(
        LlamaForCausalLM.create(config, seed=1),
        max_num_seqs=4,
        page_size=8,
        num_pages=8,
        max_num_seq_buckets=(4,),
        max_num_batched_tokens=16,
        max_model_len=64,
        compile_runner=False,
        silent_mode=True,
    )


def served(engine: eSurge) -> list[list[int]]:
    """Tokens of greedy and of random requests; one was aborted, one was refused."""
    params = [
        SamplingParams(temperature=i % 2, seed=i, max_tokens=9, ignore_eos=True)
        for i in range(len(PROMPTS))
    ]
    for _ in range(2):  # the id is in use the second time
        try:
            engine.add_request("gone", PROMPTS[0], params[0])
        except ConfigError:
            continue
    engine.step()
    engine.abort_request("gone")
    outputs = engine.generate(PROMPTS, params)
    engine.pause()
    engine.resume()
    outputs += engine.generate(PROMPTS[:1], params[0])
    return [output.outputs[0].token_ids for output in outputs]


def main(folder: Path) -> None:
    assert distributed.initialize()
    assert jax.process_count() == 2
    ours = engine((1, 2, 1, 2, 1))
    if not distributed.is_main():
        ours.follow()
        return
    tokens = served(ours)
    ours.terminate()
    (folder / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
