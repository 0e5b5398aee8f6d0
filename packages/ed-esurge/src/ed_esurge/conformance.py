"""Conformance check of a model family with the engine, in addition to `ed_models.conformance`.

@pytest.mark.parametrize("subject", subjects("my_model"), ids=str)
def test_engine(subject: Subject) -> None:
    engine(subject)
"""

from __future__ import annotations

from ed_models.conformance import PAD, Subject

from ed_esurge.engine import eSurge
from ed_esurge.model import get_windows
from ed_esurge.sampling import SamplingParams

NEW = 12


def compare_engine(subject: Subject) -> float:
    """Check that chunked, batched and preempted prompts produce the tokens of `generate`."""
    model = subject.model
    prompts = [row[pad:].tolist() for row, pad in zip(subject.ids, PAD, strict=True)]
    greedy = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    # The pages hold only two sequences of full length, so that others are preempted.
    serving = eSurge(
        model,
        max_num_seqs=4,
        max_num_seq_buckets=(4,),
        page_size=4,
        num_pages=20,
        max_num_batched_tokens=16,
        max_model_len=48,
        compile_runner=False,
        silent_mode=True,
    )
    for output, prompt in zip(serving.generate(prompts, greedy), prompts, strict=True):
        reference_ids = model.generate([prompt], max_new_tokens=NEW, eos_token_id=[]).sequences[0]
        got, expected = output.outputs[0].token_ids, reference_ids[len(prompt) :].tolist()
        assert got == expected, f"after {len(prompt)} tokens {got} is not {expected}"
    # Pages behind a window are freed, and states use none: then no sequence is preempted.
    waited = serving.stats()["num_preemptions"] > 0 or None not in get_windows(model).values()
    assert waited, "the pages held all sequences"
    return 0.0
