"""Every planted defect is found by its check, and a sound model passes all checks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from certify_changes import (
    CHATML,
    edit,
    edit_tensors,
    generation,
    last_matrix,
    template,
    tensors,
    write_gguf,
)
from certify_defects import (
    ADAPTER_DEFECTS,
    GGUF_DEFECTS,
    MERGE_DEFECTS,
    MODEL_DEFECTS,
    OTHER_DEFECTS,
)
from ed_elarge.certify import number_checks
from ed_elarge.certify.llama_cpp_logits import interpreter
from ed_elarge.certify.outcome import Failed, Outcome
from ed_elarge.certify.receipt import MODEL_CHECKS, Finding, certificate, findings, write_receipt
from ed_elarge.certify.subject import CertifiedModel
from ed_elarge.command.main import app
from ed_infra.errors import CheckpointError
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a random model with a tokenizer, a chat template and generation settings."""
    from ed_data.tokens.bpe import train_bpe
    from ed_infra.testing import english_topics, tiny_llama
    from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("sound") / "model"
    special = ("<|im_start|>", "<|im_end|>")
    texts = english_topics().values()
    tokenizer = train_bpe(texts, vocab_size=420, chat_template=CHATML, special_tokens=special)
    fields = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2)
    del fields["model_type"]
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
    config = LlamaConfig(**{**fields, **ids}, sharding_axis_dims=(1, 1, 1, 1, 1))
    LlamaForCausalLM.create(config, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.eos_token_id]
    edit(folder / "generation_config.json", bos_token_id=tokenizer.bos_token_id, eos_token_id=ends)
    return folder


def planted(sound: Path, folder: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(sound, folder)
    change(folder)
    return folder


def by_name(subject: CertifiedModel, *, with_model: bool = False) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings(subject, with_model=with_model)}


@pytest.fixture(scope="session")
def base(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the files of the sound model and other weights."""

    def change(values: dict[str, np.ndarray]) -> None:
        values[last_matrix(values)] *= 1.5

    return planted(sound, tmp_path_factory.mktemp("base") / "model", tensors(change))


def test_sound_model_fails_no_check_of_files_and_tokens(sound: Path, base: Path) -> None:
    found = by_name(CertifiedModel(sound, base))
    assert not [f for f in found.values() if f.status == "failed"]
    assert sum(f.status == "passed" for f in found.values()) >= 20


def test_at_least_sixty_defects_have_a_public_issue() -> None:
    issues = [
        defect.issue
        for group in (MODEL_DEFECTS, ADAPTER_DEFECTS, MERGE_DEFECTS, GGUF_DEFECTS)
        for defect in group.values()
    ]
    assert len(set(issues)) == len(issues) >= 60
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", issue) for issue in issues)


@pytest.mark.daily(
    "two templates", "end of turn missing*", "tokens with exchanged ids", "NaN", "almost no tensors"
)
@pytest.mark.parametrize("defect", [*MODEL_DEFECTS, *OTHER_DEFECTS])
def test_planted_defect_is_found_by_its_check(
    sound: Path, base: Path, tmp_path: Path, defect: str
) -> None:
    if defect == "old weights in another format":
        pytest.importorskip("torch")
    check, change = OTHER_DEFECTS.get(defect) or MODEL_DEFECTS[defect][::2]
    folder = planted(sound, tmp_path / "model", change)
    other = sound if check == "changed" else base
    found = by_name(CertifiedModel(folder, other))[check]
    assert found.status == "failed", found
    assert len(found.evidence) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("defect", ADAPTER_DEFECTS)
def test_planted_defect_of_an_adapter_is_found_by_its_check(
    adapted: Path, base: Path, tmp_path: Path, defect: str
) -> None:
    check, _, change = ADAPTER_DEFECTS[defect]
    found = by_name(CertifiedModel(planted(adapted, tmp_path / "run", change), base))[check]
    assert found.status == "failed", found


@pytest.mark.nightly
@pytest.mark.parametrize("defect", GGUF_DEFECTS)
def test_planted_defect_of_a_gguf_file_is_found_by_its_check(
    sound: Path, tmp_path: Path, defect: str
) -> None:
    check, _, change = GGUF_DEFECTS[defect]
    found = by_name(CertifiedModel(planted(sound, tmp_path / "model", change)))[check]
    assert found.status == "failed", found


@pytest.mark.nightly
def test_gguf_file_of_a_model_passes_all_checks(sound: Path, tmp_path: Path) -> None:
    found = by_name(CertifiedModel(planted(sound, tmp_path / "model", write_gguf)), with_model=True)
    for name in ("gguf_tokens", "gguf_settings", "gguf"):
        assert found[name].status == "passed", found[name]
    assert found["llama_cpp"].status == ("passed" if interpreter() else "not applicable")


def test_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither config\.json nor adapter_config\.json"):
        CertifiedModel(tmp_path)


def test_command_writes_the_certificate_and_exits_with_1_after_a_failure(
    sound: Path, base: Path, tmp_path: Path
) -> None:
    good = ["certify", str(sound), "--against", str(base), "--quick", "--output", str(tmp_path)]
    run = CliRunner().invoke(app, good)
    assert run.exit_code == 0, run.output
    stored = json.loads((tmp_path / "certificate.json").read_text())
    assert stored["summary"]["failed"] == 0
    assert {check["name"] for check in stored["checks"]} == {
        check.name for check in MODEL_CHECKS if not check.needs_model
    }
    assert (tmp_path / "certificate.html").read_text().count("<td class=") == len(stored["checks"])
    folder = planted(sound, tmp_path / "model", generation(eos_token_id=1))
    run = CliRunner().invoke(app, ["certify", str(folder), "--quick"])
    assert run.exit_code == 1
    assert "add the id to eos_token_id in generation_config.json" in run.output


def test_page_of_certificates_lists_every_check() -> None:
    text = (Path(__file__).parents[3] / "docs" / "certify.md").read_text()
    assert [
        check for check in MODEL_CHECKS if f"| `{check.name}` | {check.claim} |" not in text
    ] == []


def test_evidence_is_escaped_in_the_page(sound: Path, tmp_path: Path) -> None:
    finding = Finding("a", "claim", "failed", "<script>alert(1)</script>", 0.0)
    write_receipt(certificate(CertifiedModel(sound), [finding]), tmp_path)
    assert "<script>" not in (tmp_path / "certificate.html").read_text()


def test_token_that_begins_each_turn_is_no_second_beginning(sound: Path, tmp_path: Path) -> None:
    """The template of SmolLM2 writes its beginning-of-text token before each message."""
    turns = (
        "{% for message in messages %}{{ bos_token + message['role'] + '\\n' + message['content'] "
        "+ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ bos_token + 'assistant\\n' }}"
        "{% endif %}"
    )
    folder = planted(sound, tmp_path / "model", template(turns))
    assert by_name(CertifiedModel(folder))["one_beginning"].status == "passed"


@pytest.mark.nightly
def test_engine_check_runs_on_an_adapter_without_a_merged_model(
    adapted: Path, tmp_path: Path
) -> None:
    """QLoRA writes only the adapter."""
    shutil.copytree(adapted / "adapter", tmp_path / "adapter")
    found = by_name(CertifiedModel(tmp_path), with_model=True)
    assert found["engine"].status == "passed", found["engine"]


@pytest.mark.nightly
def test_sound_model_fails_no_check_of_numbers(sound: Path, base: Path) -> None:
    found = by_name(CertifiedModel(sound, base), with_model=True)
    for name in ("transformers", "engine", "packing"):
        assert found[name].status == "passed", found[name]
    assert found["quantization"].status == "not applicable"
    assert not [f for f in found.values() if f.status == "failed" and f.name != "kernels"]


@pytest.fixture(scope="session")
def adapted(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save the output folder of a run: an adapter, and the model into which it is merged."""
    import jax
    from ed_models.adapters.peft import load_adapter, save_adapter
    from ed_models.checkpoints import hub

    folder = tmp_path_factory.mktemp("run")
    model: Any = hub.from_pretrained(base)
    adapted: Any = model.apply_lora_to_layers(4, "q_proj|v_proj")
    save_adapter(adapted, folder / "adapter", base=str(base))

    def change(values: dict[str, np.ndarray]) -> None:
        for name, key in zip(values, jax.random.split(jax.random.key(0), len(values)), strict=True):
            if "lora_B" in name:
                values[name] = np.asarray(jax.random.normal(key, values[name].shape))

    path = folder / "adapter" / "adapter_model.safetensors"
    values = {name: np.array(x) for name, x in load_file(path).items()}
    change(values)
    save_file(values, path, metadata={"format": "pt"})
    merged: Any = load_adapter(model, folder / "adapter")
    shutil.copytree(base, folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    merged.unwrap_lora_to_layers().save_pretrained(folder / "model")
    return folder


@pytest.mark.nightly
def test_merged_adapter_passes_and_a_missing_merge_is_found(
    adapted: Path, base: Path, tmp_path: Path
) -> None:
    found = by_name(CertifiedModel(adapted), with_model=True)
    assert [found[name].status for name in ("merge", "adapter_effect", "changed")] == ["passed"] * 3
    folder = tmp_path / "run"
    shutil.copytree(adapted, folder)
    shutil.copy(base / "model.safetensors", folder / "model" / "model.safetensors")
    found = by_name(CertifiedModel(folder, base), with_model=True)
    assert [found[name].status for name in ("merge", "changed")] == ["failed"] * 2
    path = folder / "adapter" / "adapter_model.safetensors"
    zero = {n: x * 0 if "lora_B" in n else x for n, x in load_file(path).items()}
    save_file(zero, path, metadata={"format": "pt"})
    assert by_name(CertifiedModel(folder, base))["adapter_effect"].status == "failed"


@pytest.mark.nightly
@pytest.mark.parametrize("defect", MERGE_DEFECTS)
def test_merge_with_other_settings_is_found(
    adapted: Path, base: Path, tmp_path: Path, defect: str
) -> None:
    check, _, change = MERGE_DEFECTS[defect]
    folder = planted(adapted, tmp_path / "run", change)
    found = by_name(CertifiedModel(folder, base), with_model=True)[check]
    assert found.status == "failed", found


def run_of(name: str) -> Callable[[CertifiedModel], Outcome]:
    return next(check.run for check in MODEL_CHECKS if check.name == name)


@pytest.mark.nightly
def test_log_probabilities_of_the_whole_distribution_are_found(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reproduce huggingface/trl#4159 and #6789: other options than those of the sampler."""
    monkeypatch.setattr(number_checks, "LOGPROBS_MODE", "raw_logprobs")
    with pytest.raises(Failed, match="log-probabilities of the engine differ"):
        run_of("engine")(CertifiedModel(sound))


@pytest.mark.nightly
def test_attention_between_packed_rows_is_found(sound: Path) -> None:
    """Reproduce huggingface/trl#1230: packed rows attend to each other."""
    subject = CertifiedModel(sound)
    model = subject.model
    subject.model = lambda *, segment_ids=None, **inputs: model(**inputs)
    with pytest.raises(Failed, match="the rows alone"):
        run_of("packing")(subject)


@pytest.mark.nightly
def test_kernels_without_the_best_instructions_are_found(
    sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reproduce oobabooga/textgen#5881: instructions of the processor are not used."""
    from ed_layers.native import library

    monkeypatch.setattr(library, "level", lambda: "v1")
    with pytest.raises(Failed, match="the kernels use v1"):
        run_of("kernels")(CertifiedModel(sound))


@pytest.mark.nightly
def test_quantized_model_passes_and_a_coarse_one_is_found(sound: Path, tmp_path: Path) -> None:
    from ed_models.checkpoints import hub

    def quantized(name: str, **rules: Any) -> Path:
        model: Any = hub.from_pretrained(sound, quantization_config=rules, apply_quantization=True)
        shutil.copytree(
            sound, tmp_path / name, ignore=shutil.ignore_patterns("*.safetensors", "config.json")
        )
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    good = by_name(CertifiedModel(quantized("good", dtype="int8"), sound), with_model=True)
    assert good["quantization"].status == "passed", good["quantization"]
    folder = quantized("coarse", dtype="int8")

    def coarse(values: dict[str, np.ndarray]) -> None:
        for name in values:
            if values[name].dtype == np.int8:
                values[name] = (values[name] // 64) * 64

    edit_tensors(folder, coarse)
    bad = by_name(CertifiedModel(folder, sound), with_model=True)
    assert bad["quantization"].status == "failed", bad["quantization"]
