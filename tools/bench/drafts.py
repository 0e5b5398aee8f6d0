"""Tokens per step and speed of an engine that drafts with a trained MTP layer, against plain steps.

    elarge examples/draft_smollm2.yaml
    python -m tools.bench.drafts runs/draft_smollm2/model [--vocabulary 4096] [--rounds 5]

The prompts are the held-out chats of the quickstart. The engines take turns, and must return the
same tokens. The acceptance length counts the steps after that of the prompt, for single prompts.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from ed_esurge import SamplingParams, eSurge
from ed_models import AutoEasyDeLModelForCausalLM
from ed_models.protocol import LanguageModel
from ed_trainers.methods.draft import compute_length
from transformers import AutoTokenizer

from tools.bench.measure import command_line, machine, table

CHATS = Path("examples/data/appointments_heldout.jsonl")
#: Tokens of an answer.
ANSWER = 48


def start_engine(model: LanguageModel, sequences: int, **options: Any) -> eSurge:
    """Return an engine that compiles each shape on first use."""
    known: dict[str, Any] = {
        "max_num_seqs": sequences,
        "max_model_len": 256,
        "page_size": 32,
        "compile_runner": False,
        "silent_mode": True,
        "enable_prefix_caching": False,
    }
    return eSurge(model, **known, **options)


def read_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Return the token ids of the held-out chats without their answers."""
    lines = CHATS.read_text().splitlines()[:count]
    chats = [json.loads(line)["messages"][:-1] for line in lines]
    options: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    return [tokenizer.apply_chat_template(chat, **options) for chat in chats]


def measure_lengths(engine: eSurge, prompts: list[list[int]], params: SamplingParams) -> list[str]:
    """Return the acceptance length with its standard error over the prompts, and the share of the
    accepted drafts."""
    counts: list[tuple[int, int]] = []
    names = ("spec_decode_num_drafts", "spec_decode_num_accepted_tokens")
    proposed = 0.0
    for prompt in prompts:
        before = engine.stats()
        output = engine.generate([prompt], params)[0].outputs[0]
        after = engine.stats()
        accepted = after[names[1]] - before[names[1]]
        tokens = len(output.token_ids) - 1
        counts.append((tokens, int(tokens - accepted)))
        key = "spec_decode_num_draft_tokens"
        proposed += after[key] - before[key]
    length, error = compute_length(counts)
    accepted = sum(tokens - steps for tokens, steps in counts)
    return [f"{length:.2f} ± {error:.2f}", f"{accepted / max(proposed, 1):.2f}"]


def compare_speed(
    engines: list[eSurge], prompts: list[list[int]], params: SamplingParams, rounds: int
) -> tuple[list[float], float]:
    """Return the tokens per second of both engines, and the median ratio of the rounds."""
    rates: list[list[float]] = [[], []]
    for turn in range(rounds + 1):
        outputs: list[list[list[int]]] = []
        for place, engine in enumerate(engines):
            began = time.perf_counter()
            answers = engine.generate(prompts, params)
            seconds = time.perf_counter() - began
            outputs.append([list(answer.outputs[0].token_ids) for answer in answers])
            if turn:
                rates[place].append(sum(map(len, outputs[-1])) / seconds)
        if outputs[0] != outputs[1]:
            raise RuntimeError("the engines return different tokens")
    ratios = [drafted / plain for plain, drafted in zip(*rates, strict=True)]
    return [statistics.median(values) for values in rates], statistics.median(ratios)


def main() -> None:
    """Print both tables."""
    parser = command_line("drafts", __doc__)
    parser.add_argument("model", help="folder of a model with an MTP layer")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        options.model,
        dtype=jnp.float32,
        param_dtype=jnp.float32,
        sharding_axis_dims=(1, 1, 1, 1, 1),
        config_kwargs={"mtp_head": "stored", "scan_layers": False},
    )
    prompts = read_prompts(AutoTokenizer.from_pretrained(options.model), options.prompts)
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, detokenize=False)
    drafts = {
        "method": "mtp",
        "num_speculative_tokens": options.drafts,
        "draft_vocab_size": options.vocabulary,
    }
    lengths: list[list[str]] = []
    speeds: list[list[str]] = []
    for sequences in (1, 4):
        engines = [
            start_engine(model, sequences),
            start_engine(model, sequences, speculative_config=drafts),
        ]
        if not lengths:
            lengths.append([str(options.drafts), *measure_lengths(engines[1], prompts, params)])
        some = prompts[: 4 * sequences]
        rates, ratio = compare_speed(engines, some, params, options.rounds)
        speeds.append([str(sequences), *(f"{rate:.1f}" for rate in rates), f"{ratio:.2f}"])
        for engine in engines:
            engine.terminate()
    print(machine())
    print(table(["drafts", "tokens per step", "accepted drafts"], lengths))
    print(table(["sequences", "plain, tokens/s", "drafted, tokens/s", "ratio"], speeds))


if __name__ == "__main__":
    main()
