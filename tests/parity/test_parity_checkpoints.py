"""The tensors of the files determine the model, as in `transformers`: tied heads, bodies alone."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from ed_models import AutoEasyDeLModelForCausalLM
from safetensors.numpy import load_file, save_file

from tests.parity import llama_cases

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("parity")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def another_head(content):
    rng = np.random.default_rng(1)
    content[HEAD] = rng.normal(0, 0.2, content[EMBEDDING].shape).astype(np.float32)


def the_same_head(content):
    content[HEAD] = content[EMBEDDING].copy()


def only_a_head(content):
    content[HEAD] = content.pop(EMBEDDING)


def another_head_by_rounding(content):
    content[HEAD] = content[EMBEDDING] * np.float32(1 + 1e-6)


def no_prefix(content):
    for name in list(content):
        content[name.removeprefix("model.")] = content.pop(name)


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (another_head, False),
        (the_same_head, True),
        (only_a_head, True),
        (another_head_by_rounding, False),
        (no_prefix, True),
    ],
)
@pytest.mark.daily("the_same_head-True")
def test_tied_config_follows_checkpoint_files(references, tmp_path, change, tied):
    reference = references("tied")
    directory = shutil.copytree(reference.directory, tmp_path / "model")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    content = load_file(directory / "model.safetensors")
    change(content)
    save_file(content, directory / "model.safetensors", metadata={"format": "pt"})

    theirs = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    want = llama_cases.run(theirs, reference.ids, reference.mask, reference.position_ids)

    model = AutoEasyDeLModelForCausalLM.from_pretrained(
        directory, sharding_axis_dims=(1, 1, 1, 1, 1)
    )
    assert model.is_tied == tied
    got = model(reference.ids, attention_mask=reference.mask).logits
    real = reference.mask != 0
    np.testing.assert_allclose(np.asarray(got)[real], want[real], atol=2e-5, rtol=0)

    # transformers loads the saved files without a message about tied weights.
    model.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.float32)
    assert again.config.tie_word_embeddings == tied
    for (name, a), (_, b) in zip(theirs.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(a, b), name
