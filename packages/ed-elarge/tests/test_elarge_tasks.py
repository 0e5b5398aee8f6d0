"""A run file trains, saves and runs models of every task from tiny local checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.__main__ import run_file
from ed_elarge.errors import InputError
from ed_esurge.sampling import PoolingParams
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import require_torch

Image = pytest.importorskip("PIL.Image")

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def tokenizer(path: Path, **tokens: str) -> Any:
    """Train a byte-level tokenizer of 300 tokens and save it."""
    from ed_data import train_bpe

    made = train_bpe(["a cat sat on a mat", "the dog ran away"] * 20, 300)
    made.add_special_tokens(tokens)
    made.save_pretrained(path)
    return made


def save_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(folder: Path, sections: dict[str, Any], actions: list[Any]) -> int:
    """Run a file of two training steps and return the exit code."""
    mixture = {"batch_size": 8, "prefetch_workers": 0, **sections.pop("mixture")}
    trainer = {
        "max_training_steps": 2,
        "total_batch_size": 8,
        "learning_rate": 1e-2,
        "weight_decay": 0.0,
        "save_directory": str(folder / "run"),
        "log_steps": 1,
        "use_tensorboard": False,
        **sections.pop("trainer"),
    }
    document = {**sections, "mixture": mixture, "trainer": trainer, "actions": actions}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(document))
    return run_file(str(file))


def arrays(model: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(model.split_module()[1])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny LLaVA with its processor."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    path = tmp_path_factory.mktemp("llava")
    tokens = tokenizer(path, additional_special_tokens=["<image>"])
    size = {"height": 28, "width": 28}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=size),
        tokenizer=tokens,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(path)
    text = {"model_type": "llama", "vocab_size": len(tokens), **SIZES, "num_key_value_heads": 1}
    vision = {"model_type": "clip_vision_model", **SIZES, "image_size": 28, "patch_size": 14}
    config = registry.get_config("llava")(
        text_config={**text, "max_position_embeddings": 128},
        vision_config=vision,
        image_token_id=tokens.convert_tokens_to_ids("<image>"),
    )
    module = registry.get_module(TaskType.IMAGE_TEXT_TO_TEXT, "llava")
    module.create(config, seed=0).save_pretrained(path)
    return path


def torch_output(saved: Path, kind: str, **inputs: np.ndarray) -> Any:
    """Return the output of a saved model, loaded by a class of transformers on torch."""
    torch = require_torch()
    import transformers

    model = getattr(transformers, kind).from_pretrained(saved).eval()
    with torch.no_grad():
        return model(**{name: torch.from_numpy(array) for name, array in inputs.items()})


def output(saved: Path, task: str, **inputs: np.ndarray) -> Any:
    """Return the output of a saved model, loaded by this project."""
    model: Any = eLargeModel.from_pretrained(str(saved), task=task).build_model()
    return model(**inputs)


def image_chats(folder: Path) -> str:
    rows = []
    for number in range(16):
        file = folder / f"{number}.png"
        Image.new("RGB", (30, 40), (15 * number, 255 - 15 * number, 7)).save(file)
        question = [{"type": "image"}, {"type": "text", "text": "what is it"}]
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "a cat" if number % 2 else "the dog"},
        ]
        rows.append({"messages": messages, "images": [str(file)]})
    return save_rows(folder / "chats.jsonl", rows)


@pytest.mark.nightly
def test_vision_language_model_trains_on_chats_with_images(llava: Path, tmp_path: Path) -> None:
    sections = {
        "model": {"name_or_path": str(llava), "task": "image-text-to-text"},
        "mixture": {
            "informs": [{"data_files": image_chats(tmp_path), "content_field": "messages"}],
            "tokenization": {"max_length": 64},
        },
        "trainer": {"trainer_type": "sft"},
    }
    assert train(tmp_path, sections, ["train"]) == 0
    saved = tmp_path / "run" / "model"
    before, after = (
        arrays(eLargeModel.from_pretrained(str(path), task="image-text-to-text").build_model())
        for path in (llava, saved)
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert any("vision_tower" in name for name in changed), "the images had no effect"
    assert any("language_model" in name for name in changed)
    assert (saved / "processor_config.json").is_file()
    from transformers import AutoProcessor

    images = [Image.new("RGB", (30, 40), (200, 30, n)) for n in (9, 90)]
    read = AutoProcessor.from_pretrained(saved)(
        text="user:<image><image>what is it\n", images=images, return_tensors="np"
    )
    ids, pixels = np.asarray(read["input_ids"], np.int64), np.asarray(read["pixel_values"])
    theirs = torch_output(
        saved, "LlavaForConditionalGeneration", input_ids=ids, pixel_values=pixels
    )
    ours = output(saved, "image-text-to-text", input_ids=ids, pixel_values=pixels[None])
    np.testing.assert_allclose(ours.logits, theirs.logits.numpy(), atol=1e-4)


@pytest.mark.nightly
def test_vision_language_model_without_a_processor_is_rejected(llava: Path, tmp_path: Path) -> None:
    tokenizer(tmp_path / "plain")
    elm = eLargeModel.from_pretrained(
        str(llava), task="image-text-to-text", tokenizer=str(tmp_path / "plain")
    )
    with pytest.raises(Exception, match=r"no image processor|no processor"):
        elm.build_tokenizer()


@pytest.mark.nightly
def test_images_require_the_task_of_the_model(llava: Path, tmp_path: Path) -> None:
    inform = {"type": "visual", "data_files": image_chats(tmp_path), "image_field": "images"}
    sections = {
        "model": {"name_or_path": str(llava)},
        "mixture": {"informs": [inform], "tokenization": {"max_length": 64}},
        "trainer": {"trainer_type": "sft", "save_directory": str(tmp_path / "run")},
    }
    with pytest.raises(InputError, match=r"set model\.task: image-text-to-text"):
        eLargeModel(sections).validate()


def test_method_rejects_a_task_that_it_does_not_train() -> None:
    sections = {
        "model": {"name_or_path": "org/model", "task": "seq2seq-lm"},
        "trainer": {"trainer_type": "orpo"},
    }
    with pytest.raises(InputError, match="orpo trains no model for 'sequence-to-sequence'"):
        eLargeModel(sections).validate()


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny T5 with its tokenizer."""
    path = tmp_path_factory.mktemp("t5")
    tokens = tokenizer(path)
    config = registry.get_config("t5")(
        vocab_size=len(tokens),
        d_model=32,
        d_kv=16,
        d_ff=64,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=tokens.pad_token_id,
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
    )
    module = registry.get_module(TaskType.SEQUENCE_TO_SEQUENCE, "t5")
    module.create(config, seed=0).save_pretrained(path)
    return path


@pytest.mark.nightly
@pytest.mark.parametrize("packed", [False, True])
def test_encoder_decoder_trains_on_pairs_of_texts(t5: Path, tmp_path: Path, packed: bool) -> None:
    rows = [{"prompt": f"a cat {n}", "completion": f"the dog {n}"} for n in range(32)]
    lengths = {"pack_tokens": True, "pack_seq_length": 64} if packed else {}
    sections = {
        "model": {"name_or_path": str(t5), "task": "seq2seq-lm"},
        "mixture": {
            "informs": [{"data_files": save_rows(tmp_path / "pairs.jsonl", rows)}],
            "tokenization": {"max_length": 32},
            **lengths,
        },
        "trainer": {"trainer_type": "sft"},
    }
    assert train(tmp_path, sections, ["train"]) == 0
    saved = tmp_path / "run" / "model"
    before, after = (
        arrays(eLargeModel.from_pretrained(str(path), task="seq2seq-lm").build_model())
        for path in (t5, saved)
    )
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert any("encoder" in name for name in changed)
    assert any("decoder" in name for name in changed)
    ids = np.random.default_rng(0).integers(5, 200, (2, 12))
    given = {"input_ids": ids, "decoder_input_ids": ids[:, ::2].copy()}
    theirs = torch_output(saved, "T5ForConditionalGeneration", **given)
    ours = output(saved, "seq2seq-lm", **given)
    np.testing.assert_allclose(ours.logits, theirs.logits.numpy(), atol=1e-4)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with its tokenizer."""
    path = tmp_path_factory.mktemp("bert")
    tokens = tokenizer(path, mask_token="<mask>")
    config = registry.get_config("bert")(
        vocab_size=len(tokens), **SIZES, max_position_embeddings=64, pad_token_id=0
    )
    registry.get_module(TaskType.EMBEDDING, "bert").create(config, seed=0).save_pretrained(path)
    return path


@pytest.mark.nightly
def test_encoder_trains_embeddings_on_pairs_of_texts(bert: Path, tmp_path: Path) -> None:
    rows = [{"anchor": f"a cat {n}", "positive": f"the dog {n}"} for n in range(32)]
    sections = {
        "model": {"name_or_path": str(bert)},
        "mixture": {
            "informs": [{"data_files": save_rows(tmp_path / "pairs.jsonl", rows)}],
            "tokenization": {"max_length": 32},
        },
        "trainer": {"trainer_type": "embedding"},
    }
    assert train(tmp_path, sections, ["train"]) == 0
    saved = tmp_path / "run" / "model"
    before, after = (
        arrays(eLargeModel.from_pretrained(str(path), task="embedding").build_model())
        for path in (bert, saved)
    )
    assert any(not np.array_equal(before[name], after[name]) for name in before)
    ids = np.random.default_rng(0).integers(5, 200, (2, 12))
    theirs = torch_output(saved, "BertModel", input_ids=ids).last_hidden_state.mean(1)
    ours = output(saved, "embedding", input_ids=ids).embeddings
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


#: Task -> the class of transformers, rows, and options of the trainer.
ENCODERS: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "masked-language-model": (
        "BertForMaskedLM",
        [{"content": f"a cat {n} sat on the dog"} for n in range(32)],
        {"trainer_type": "mlm", "whole_word_mask": True},
    ),
    "token-classification": (
        "BertForTokenClassification",
        [{"tokens": ["a", "cat", str(n)], "ner_tags": ["O", "B-PET", "O"]} for n in range(32)],
        {"trainer_type": "token_classification", "label_names": ["O", "B-PET", "I-PET"]},
    ),
    "sequence-classification": (
        "BertForSequenceClassification",
        [{"text": "a cat", "text_pair": f"dog {n}", "label": f"c{n % 3}"} for n in range(32)],
        {
            "trainer_type": "sequence_classification",
            "label_names": ["c0", "c1", "c2"],
            "text_pairs": True,
        },
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("task", ENCODERS)
def test_encoder_trains_and_is_loaded_by_transformers(
    bert: Path, tmp_path: Path, task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, rows, trainer = ENCODERS[task]
    lengths: dict[str, Any] = {"pack_tokens": True, "pack_seq_length": 32}
    if task == "sequence-classification":
        lengths = {"pack_tokens": False, "tokenization": {"max_length": 32}}
    data = save_rows(tmp_path / "rows.jsonl", rows)
    sections = {
        "model": {"name_or_path": str(bert), "task": task},
        "mixture": {"informs": [{"data_files": data}], **lengths},
        "trainer": trainer,
    }
    assert train(tmp_path, sections, ["train"]) == 0
    saved = tmp_path / "run" / "model"
    assert ("serve the model" in capsys.readouterr().out) == (task == "sequence-classification")
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == [kind]
    if names := trainer.get("label_names"):
        assert config["id2label"] == {str(i): name for i, name in enumerate(names)}
        assert config["label2id"] == {name: i for i, name in enumerate(names)}
    ids = np.random.default_rng(0).integers(5, 200, (2, 12))
    theirs = torch_output(saved, kind, input_ids=ids).logits
    ours = output(saved, task, input_ids=ids, attention_mask=np.ones_like(ids)).logits
    np.testing.assert_allclose(ours, theirs.numpy(), atol=1e-4)


@pytest.mark.nightly
def test_head_of_classifier_is_trained_in_full_beside_adapters(bert: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{'cat' if n % 2 else 'dog'} {n}", "label": f"c{n % 2}"} for n in range(32)]
    data = save_rows(tmp_path / "rows.jsonl", rows)
    model = {"name_or_path": str(bert), "task": "sequence-classification"}
    sections = {
        "model": model,
        "lora": {"rank": 2, "modules_to_save": ["classifier", "pooler"]},
        "mixture": {
            "informs": [{"data_files": data}],
            "pack_tokens": False,
            "tokenization": {"max_length": 32},
        },
        "trainer": {"trainer_type": "sequence_classification", "label_names": ["c0", "c1"]},
    }
    assert train(tmp_path, sections, ["train"]) == 0
    adapter = tmp_path / "run" / "adapter"
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["classifier", "pooler"]
    ids = np.random.default_rng(0).integers(5, 200, (1, 12))
    merged = output(tmp_path / "run" / "model", model["task"], input_ids=ids).logits
    # The head of the base is random here, and the adapter contains the trained head.
    served = eLargeModel(
        {
            "model": model,
            "lora": {"name_or_path": str(adapter)},
            "esurge": {"max_model_len": 32, "max_num_seqs": 2, "compile_runner": False},
        }
    )
    params = PoolingParams(normalize=False)
    found = served.build_esurge().embed([ids[0].tolist()], params)[0].pooled
    np.testing.assert_allclose(found, np.asarray(merged)[0], atol=1e-5)


def test_unknown_module_to_save_is_an_error_at_its_key(
    bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {
        "model": {"name_or_path": str(bert), "task": "sequence-classification"},
        "lora": {"rank": 2, "modules_to_save": ["clasifier"]},
        "mixture": {
            "informs": [
                {"data_files": save_rows(tmp_path / "a.jsonl", [{"text": "a", "label": "x"}] * 16)}
            ],
            "pack_tokens": False,
            "tokenization": {"max_length": 32},
        },
        "trainer": {"trainer_type": "sequence_classification", "label_names": ["x", "y"]},
    }
    assert train(tmp_path, sections, ["train"]) == 2
    errors = capsys.readouterr().err
    assert "lora.modules_to_save" in errors
    assert "no module 'clasifier'; did you mean 'classifier'" in errors
