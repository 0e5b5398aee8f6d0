"""A certificate of a sound model reports no defect, for every family of causal language models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ed_data.tokens.bpe import train_bpe
from ed_elarge.certify.receipt import findings
from ed_elarge.certify.subject import CertifiedModel
from ed_infra.enums import TaskType
from ed_infra.testing import english_topics
from ed_models.conformance import Cases, Subject

from tests.conformance.cases import subjects

VOCAB = 320
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def first_subjects() -> dict[str, Subject]:
    """Return the first configuration of each family of causal language models."""
    found: dict[str, Subject] = {}
    for subject in subjects():
        if subject.task == TaskType.CAUSAL_LM and type(subject) is Subject:
            found.setdefault(subject.model_type, subject)
    return found


SUBJECTS = first_subjects()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    special = ("<|im_start|>", "<|im_end|>")
    texts = english_topics().values()
    train_bpe(
        texts, vocab_size=VOCAB, chat_template=CHATML, special_tokens=special
    ).save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", SUBJECTS)
def test_sound_model_of_a_family_fails_no_check(
    model_type: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    first = SUBJECTS[model_type]
    row = next(iter(first.cases.rows))
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    # Some tokenizers of transformers add a token, so the model has further embeddings.
    given = first.cases.rows[row]
    # A row omits a token with which transformers cannot load its model.
    ids = {name: number for name, number in ids.items() if given.get(name, number) is not None}
    sizes = {name: VOCAB + 8 for name in ("vocab_size", *given) if name.startswith("vocab_size")}
    fields = {**given, **sizes, **ids}
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) == "yarn":  # as many positions as YaRN has
        original = rope["original_max_position_embeddings"]
        fields["max_position_embeddings"] = int(rope["factor"] * original)
    cases = Cases({row: fields}, tiny=first.cases.tiny)
    subject = type(first)(model_type, row, first.module_class, cases)
    folder = tmp_path / "model"
    shutil.copytree(subject.directory, folder)
    for file in tokenizer_folder.iterdir():
        shutil.copy(file, folder)
    ends = {"bos_token_id": 0, "eos_token_id": [4, 1]}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    found = list(findings(CertifiedModel(folder)))
    wrong = [f for f in found if f.status == "failed" and f.name != "kernels"]
    assert not wrong, wrong
    assert sum(f.status == "passed" for f in found) >= 20
