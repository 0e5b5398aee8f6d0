"""Every planted defect is found by its check, and a sound model passes all checks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ed_elarge.certify.receipt import CHECKS, Finding, certificate, findings, write
from ed_elarge.certify.subject import CertifiedModel
from ed_elarge.command.main import app
from ed_infra.errors import CheckpointError
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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


def edit(path: Path, *removed: str, **changes: Any) -> None:
    """Change keys of a JSON file, which need not exist."""
    values = json.loads(path.read_text()) if path.is_file() else {}
    for name in removed:
        values.pop(name, None)
    path.write_text(json.dumps(values | changes))


def edit_tensors(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = {name: np.array(x) for name, x in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def template(text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "chat_template.jinja").write_text(text)

    return change


def generation(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "generation_config.json", **changes)


def settings(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def tensors(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def two_templates(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", chat_template=CHATML.replace("user", "User") + " ")


def no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    edit(folder / "tokenizer_config.json", "chat_template")


def last_matrix(values: dict[str, np.ndarray]) -> str:
    return max(name for name in values if name.endswith("down_proj.weight"))


def with_nan(values: dict[str, np.ndarray]) -> None:
    values[last_matrix(values)][0, 0] = np.nan


def with_infinity(values: dict[str, np.ndarray]) -> None:
    values[last_matrix(values)][1, 1] = np.inf


def with_zeros(values: dict[str, np.ndarray]) -> None:
    values[last_matrix(values)][:] = 0


def half_precision(values: dict[str, np.ndarray]) -> None:
    for name in values:
        values[name] = values[name].astype(np.float16)


def other_head(values: dict[str, np.ndarray]) -> None:
    values["lm_head.weight"] = values["model.embed_tokens.weight"] + 1


def tied_with_other_head(folder: Path) -> None:
    edit(folder / "config.json", tie_word_embeddings=True)
    edit_tensors(folder, other_head)


def tokenizer_with(text: str, other: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        before = path.read_text()
        assert text in before
        path.write_text(before.replace(text, other))

    return change


def lower_case(folder: Path) -> None:
    edit(folder / "tokenizer.json", normalizer={"type": "Lowercase"})


def without_spaces(folder: Path) -> None:
    strip = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    edit(folder / "tokenizer.json", normalizer=strip)


def more_tokens(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(8)])
    tokenizer.save_pretrained(folder)


def moved_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    values = json.loads(path.read_text())
    vocab = values["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(values))


def index_without_a_tensor(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    weight_map = dict.fromkeys(names[1:], "model.safetensors")
    edit(folder / "model.safetensors.index.json", metadata={}, weight_map=weight_map)


def index_with_another_tensor(folder: Path) -> None:
    names = [*load_file(folder / "model.safetensors"), "model.layers.9.mlp.up_proj.weight"]
    weight_map = dict.fromkeys(names, "model.safetensors")
    edit(folder / "model.safetensors.index.json", metadata={}, weight_map=weight_map)


def yarn(most: int) -> Callable[[Path], None]:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    scaling["rope_theta"] = 10000.0
    return settings(max_position_embeddings=most, rope_parameters=scaling)


NO_MESSAGES = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>{% endfor %}"
)
GENERATION = "<|im_start|>assistant\n{% endif %}"

#: A defect, the check that finds the defect, and the change that plants the defect.
DEFECTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "two templates": ("chat_template_files", two_templates),
    "template of another model": ("chat_template_of_base", template(CHATML.replace("im_", "x_"))),
    "template with a changed space": ("chat_template_of_base", template(CHATML + " ")),
    "template without line break": ("chat_template_of_base", template(CHATML.replace("\n", " "))),
    "template without answers": (
        "messages",
        template(
            CHATML.replace("{% for", "{% if true %}{% for").replace("m['content']", "''")
            + "{% endif %}"
        ),
    ),
    "template without messages": ("messages", template(NO_MESSAGES)),
    "template that trims differently": (
        "prompt_of_training",
        template(CHATML.replace(GENERATION, "<|im_start|>assistant:{% endif %}")),
    ),
    "prompt with a thought that training lacks": (
        "prompt_of_training",
        template(CHATML.replace(GENERATION, "<|im_start|>assistant\n<think>\n{% endif %}")),
    ),
    "prompt without the role": (
        "loss_on_answers",
        template("{% for m in messages %}{{ m['content'] }}{% endfor %}<|im_end|>"),
    ),
    "template with the number of messages": (
        "turns",
        template("{{ messages | length }} messages follow" + CHATML),
    ),
    "template that drops earlier answers": (
        "turns",
        template(
            CHATML.replace(
                "{{ m['content'] }}",
                "{% if loop.last or m['role'] == 'user' %}{{ m['content'] }}{% endif %}",
            )
        ),
    ),
    "two beginnings": ("one_beginning", template("{{ bos_token }}{{ bos_token }}" + CHATML)),
    "end of turn missing in eos_token_id": ("end_stops", generation(eos_token_id=1)),
    "end of turn only in the template": (
        "end_stops",
        template(CHATML.replace("<|im_end|>", "<|pad|>")),
    ),
    "eos_token_id of another model": ("special_ids", generation(eos_token_id=128009)),
    "pad_token_id of another model": ("special_ids", generation(pad_token_id=128004)),
    "bos_token_id of another token": ("special_ids", settings(bos_token_id=7)),
    "eos_token_id of another token": ("special_ids", settings(eos_token_id=9)),
    "negative eos_token_id": ("special_ids", generation(eos_token_id=-5)),
    "added tokens without embeddings": ("embeddings", more_tokens),
    "lower-case tokenizer": ("round_trip", lower_case),
    "tokenizer that merges spaces": ("round_trip", without_spaces),
    "tokens with exchanged ids": ("tokens_of_base", moved_tokens),
    "additional tokens change the text": ("tokens_of_base", lower_case),
    "NaN": ("finite", tensors(with_nan)),
    "infinity": ("finite", tensors(with_infinity)),
    "matrix of zeros": ("not_empty", tensors(with_zeros)),
    "another dtype than stated": ("dtype", tensors(half_precision)),
    "dtype of the configuration": ("dtype", settings(dtype="bfloat16")),
    "tied head with other values": ("tied_head", tied_with_other_head),
    "index without a tensor": ("index", index_without_a_tensor),
    "index with a missing tensor": ("index", index_with_another_tensor),
    "more positions than YaRN has": ("positions", yarn(1024)),
    "tokenizer with more positions": (
        "positions",
        lambda folder: edit(folder / "tokenizer_config.json", model_max_length=100_000),
    ),
    "temperature without sampling": (
        "generation_settings",
        generation(do_sample=False, temperature=0.6, top_p=0.9),
    ),
    "beams that are not a number": ("generation_settings", generation(num_beams=0, top_k=-3)),
    "training without effect": ("changed", lambda folder: None),
}


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


@pytest.mark.daily("two templates", "end of turn missing*", "tokens with exchanged ids", "NaN")
@pytest.mark.parametrize("defect", DEFECTS)
def test_planted_defect_is_found_by_its_check(
    sound: Path, base: Path, tmp_path: Path, defect: str
) -> None:
    check, change = DEFECTS[defect]
    folder = planted(sound, tmp_path / "model", change)
    other = sound if check == "changed" else base
    found = by_name(CertifiedModel(folder, other))[check]
    assert found.status == "failed", found
    assert len(found.evidence) > 20


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
        check.name for check in CHECKS if not check.needs_model
    }
    assert (tmp_path / "certificate.html").read_text().count("<td class=") == len(stored["checks"])
    folder = planted(sound, tmp_path / "model", generation(eos_token_id=1))
    run = CliRunner().invoke(app, ["certify", str(folder), "--quick"])
    assert run.exit_code == 1
    assert "add the id to eos_token_id in generation_config.json" in run.output


def test_page_of_certificates_lists_every_check() -> None:
    text = (Path(__file__).parents[3] / "docs" / "certify.md").read_text()
    assert [check for check in CHECKS if f"| `{check.name}` | {check.claim} |" not in text] == []


def test_evidence_is_escaped_in_the_page(sound: Path, tmp_path: Path) -> None:
    finding = Finding("a", "claim", "failed", "<script>alert(1)</script>", 0.0)
    write(certificate(CertifiedModel(sound), [finding]), tmp_path)
    assert "<script>" not in (tmp_path / "certificate.html").read_text()


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
