"""Greedy `generate` returns the same tokens as torch `transformers`."""

from __future__ import annotations

import numpy as np
import pytest
from ed_models import AutoEasyDeLModelForCausalLM

from tests.parity import llama_cases

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("parity")]
torch = pytest.importorskip("torch")

NEW = 64
TIE = 1e-4


def torch_greedy(reference, **options):
    with torch.no_grad():
        return reference.model.generate(
            torch.tensor(reference.ids),
            attention_mask=torch.tensor(reference.mask),
            max_new_tokens=NEW,
            do_sample=False,
            **options,
        ).numpy()


def ours(reference, *, scan_layers, dims=(1, 1, 1, 1, 1), **options):
    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        reference.directory,
        sharding_axis_dims=dims,
        config_kwargs={"scan_layers": scan_layers},
    )
    return model.generate(
        reference.ids, attention_mask=reference.mask, max_new_tokens=NEW, **options
    ).sequences


def assert_same(got, want, reference):
    """Check equality, except after a tie: torch's two best logits differ by less than TIE."""
    assert got.shape == want.shape
    for row, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        different = np.flatnonzero(mine != theirs)
        if not different.size:
            continue
        at = different[0]
        mask = np.concatenate([reference.mask[row], np.ones(at - reference.mask.shape[1], int)])
        positions = np.maximum(np.cumsum(mask) - 1, 0)
        logits = llama_cases.run(reference.model, theirs[None, :at], mask[None], positions[None])[
            0, -1
        ]
        second, first = np.sort(logits)[-2:]
        print(f"row {row} parts at {at}: {mine[at]} against {theirs[at]}, gap {first - second:.1e}")
        assert first - second < TIE


@pytest.mark.daily("tied")
@pytest.mark.parametrize(
    ("case", "scan_layers"), [("untied", True), ("tied", False)], ids=["untied", "tied"]
)
def test_greedy_tokens_match_torch(references, case, scan_layers):
    reference = references(case)
    want = torch_greedy(reference, eos_token_id=None)
    assert want.shape[1] == reference.ids.shape[1] + NEW
    got = ours(reference, scan_layers=scan_layers, eos_token_id=[])
    assert_same(got, want, reference)


@pytest.mark.nightly
def test_greedy_tokens_on_eight_devices_match_torch(references):
    reference = references("untied")
    want = torch_greedy(reference, eos_token_id=None)
    got = ours(reference, scan_layers=True, dims=(1, 2, 1, 4, 1), eos_token_id=[])
    assert_same(got, want, reference)


@pytest.mark.nightly
def test_rows_end_at_same_token_as_torch(references):
    reference = references("untied")
    free = torch_greedy(reference, eos_token_id=None)[:, reference.ids.shape[1] :]
    ends = [int(free[0, 5]), int(free[2, 20])]
    want = torch_greedy(reference, eos_token_id=ends, pad_token_id=0)
    got = ours(reference, scan_layers=True, eos_token_id=ends, pad_token_id=0)
    assert_same(got, want, reference)


@pytest.mark.nightly
def test_repetition_penalty_tokens_match_torch(references):
    # Torch also penalizes padding tokens, so only a batch without padding is comparable.
    reference = references("untied")
    rows = [0, 2]
    ids = reference.ids[rows]
    with torch.no_grad():
        want = reference.model.generate(
            torch.tensor(ids),
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            repetition_penalty=1.3,
        ).numpy()
    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        reference.directory, sharding_axis_dims=(1, 1, 1, 1, 1)
    )
    got = model.generate(ids, max_new_tokens=NEW, eos_token_id=[], repetition_penalty=1.3).sequences
    np.testing.assert_array_equal(got, want)
