"""SFT on chats with recordings: losses of transformers, a metric, packing, resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge import eLargeModel
from ed_elarge.__main__ import run_file
from ed_esurge.testing import byte_tokenizer
from ed_infra.testing import require_torch
from ed_trainers.figures.metrics import CLOCKED
from safetensors.numpy import load_file

soundfile = pytest.importorskip("soundfile")

RATE, ROWS = 16000, 8
#: Family -> class of transformers.
FAMILIES = {
    "voxtral": "VoxtralForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration",
}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}"
    "{% if part.type == 'audio' %}[AUDIO]{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
#: A part has half a second, 50 frames, 25 positions of the encoder, and 5 features of Voxtral. A
#: recording of Qwen2-Audio has at most 12 features.
AUDIO = {
    "hidden_size": 24,
    "intermediate_size": 120,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_mel_bins": 16,
    "max_source_positions": 25,
    "initializer_range": 0.3,
}


def save_model(name: str, path: Path) -> None:
    """Save a tiny random model with its feature extractor and tokenizer."""
    from ed_models.auto import AutoEasyDeLAnyToAnyModel, AutoEasyDeLConfig
    from transformers import WhisperFeatureExtractor

    tokens = byte_tokenizer(TEMPLATE)
    tokens.add_special_tokens({"additional_special_tokens": ["[AUDIO]"]})
    config = AutoEasyDeLConfig.for_model(
        name,
        text_config={**TEXT, "vocab_size": len(tokens)},
        audio_config=AUDIO,
        audio_token_id=tokens.convert_tokens_to_ids("[AUDIO]"),
        sharding_axis_dims=(1, 1, 1, 1, 1),
    )
    model: Any = AutoEasyDeLAnyToAnyModel.from_config(config, "float32", "float32", seed=5)
    model.save_pretrained(path)
    tokens.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and chats with 0, 1 and 2 recordings of low and high tones, which are the answer."""
    path = tmp_path_factory.mktemp("recordings")
    for name in FAMILIES:
        save_model(name, path / name)
        rows = "".join(json.dumps(row) + "\n" for row in chats(path, name))
        (path / f"{name}.jsonl").write_text(rows)
    return path


def chats(path: Path, family: str) -> list[dict[str, Any]]:
    """Write recordings, and return the rows of the chats. Voxtral also reads more than a part."""
    lengths = (0.3, 0.7 if family == "voxtral" else 0.5)
    rows = []
    for number in range(ROWS):
        high, names = number % 2, []
        for place in range(number % 3):
            seconds = np.arange(int(lengths[place] * RATE)) / RATE
            samples = 0.4 * np.sin(2 * np.pi * (3000 if high else 300) * seconds)
            names.append(f"{family}-{number}-{place}.wav")
            soundfile.write(path / names[-1], samples, RATE)
        parts = [*[{"type": "audio"}] * len(names), {"type": "text", "text": f"what {number}"}]
        answer = "high" if high else "low"
        messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
        rows.append({"messages": messages, "audios": names})
    return rows


def document(
    folder: Path, name: str, family: str, *, packing: bool = False, **trainer: Any
) -> dict[str, Any]:
    """Return a run file whose batches contain all rows."""
    length: dict[str, Any] = {"tokenization": {"max_length": 96, "assistant_only_loss": True}}
    if packing:
        length = {"pack_seq_length": 192, "tokenization": {"assistant_only_loss": True}}
    inform = {"data_files": str(folder / f"{family}.jsonl"), "content_field": "messages"}
    return {
        "model": {"name_or_path": str(folder / family), "task": "any-to-any"},
        "loader": {"dtype": "fp32", "param_dtype": "fp32"},
        "sharding": {"axis_dims": [1, 1, 1, 1, 1]},
        "mixture": {
            "prefetch_workers": 0,
            "seed": 3,
            "informs": [inform],
            "pack_tokens": packing,
            **length,
        },
        "trainer": {
            "trainer_type": "sft",
            "total_batch_size": 4 if packing else ROWS,
            "max_training_steps": 16,
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "log_steps": 1,
            "use_tensorboard": False,
            "save_directory": str(folder / name),
            **trainer,
        },
        "actions": ["train"],
    }


def written(made: dict[str, Any]) -> Path:
    file = Path(made["trainer"]["save_directory"]).with_suffix(".yaml")
    file.write_text(yaml.safe_dump(made))
    return file


def figures_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    lines = (Path(made["trainer"]["save_directory"]) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def lengths_of(batch: dict[str, np.ndarray], row: int) -> list[int]:
    """Return the numbers of features of the parts of recordings in a row."""
    if "feature_attention_mask" not in batch:
        return [5] * len(batch["input_features"][row])
    frames = batch["feature_attention_mask"][row].sum(axis=1)
    return [int(count + 1) // 2 // 2 for count in frames]


def loss_of_torch(family: str, path: Path, batch: dict[str, np.ndarray]) -> float:
    """Return the mean loss of `transformers` for the documents of a batch, each one alone."""
    torch = require_torch()
    import transformers

    model = getattr(transformers, FAMILIES[family]).from_pretrained(path).eval()
    names = [name for name in ("input_features", "feature_attention_mask") if name in batch]
    token, total, count = model.config.audio_token_id, 0.0, 0
    for row, segments in enumerate(batch["segment_ids"]):
        lengths, used = lengths_of(batch, row), 0
        for segment in range(1, int(segments.max()) + 1):
            here, first = segments == segment, used
            ids, labels = batch["input_ids"][row][here], batch["labels"][row][here]
            features = int((ids == token).sum())
            while sum(lengths[first:used]) < features:
                used += 1
            assert sum(lengths[first:used]) == features, "placeholder tokens equal features"
            own = {name: torch.tensor(batch[name][row, first:used]) for name in names}
            learned = int((labels[1:] >= 0).sum())
            with torch.no_grad():
                given = {"input_ids": torch.tensor(ids).long()[None], **(own if features else {})}
                loss = model(**given, labels=torch.tensor(labels).long()[None]).loss
            total, count = total + float(loss) * learned, count + learned
    return total / count


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("packing", [False, True])
def test_sft_with_recordings_has_the_loss_of_transformers_and_learns(
    folder: Path, family: str, packing: bool
) -> None:
    name = f"{family}-{packing}"
    made = document(folder, name, family, packing=packing)
    file = written(made)
    batch = eLargeModel.from_yaml(str(file)).build_dataset().batch_at(0)
    assert not packing or batch["segment_ids"].max() > 1, "no row contains several documents"
    wanted = loss_of_torch(family, folder / family, batch)
    assert run_file(str(file)) == 0
    figures = figures_of(made)
    assert figures[0]["loss"] == pytest.approx(wanted, abs=1e-4)
    assert figures[-1]["loss"] < 0.5 * figures[0]["loss"]
    saved = folder / name / "model"
    before, after = (load_file(at / "model.safetensors") for at in (folder / family, saved))
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    for part in ("audio_tower", "multi_modal_projector", "language_model"):
        assert any(part in name for name in changed), f"{part} was not trained"
    after_training = eLargeModel.from_yaml(str(file)).build_dataset().batch_at(0)
    assert loss_of_torch(family, saved, after_training) < 0.5 * wanted
    assert (saved / "preprocessor_config.json").is_file()


def started(file: Path) -> subprocess.Popen[str]:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    program = Path(sys.executable).with_name("elarge")
    return subprocess.Popen(
        [program, str(file)],
        env={**os.environ, "XLA_FLAGS": flags},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def rows_of(made: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the metrics without clock times."""
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in figures_of(made)]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_killed_run_with_recordings_equals_uninterrupted_run(folder: Path) -> None:
    options: dict[str, Any] = {"max_training_steps": 24, "save_steps": 6, "packing": True}
    whole = document(folder, "whole", "voxtral", **options)
    process = started(written(whole))
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    killed = document(folder, "killed", "voxtral", **options)
    file, checkpoints = written(killed), folder / "killed" / "checkpoints"
    process = started(file)
    while not any(path.name.isdigit() for path in checkpoints.glob("*")):  # a complete checkpoint
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = started(file)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    assert "resumed from step" in printed
    assert rows_of(killed) == rows_of(whole)
    wanted, found = (
        load_file(folder / name / "model" / "model.safetensors") for name in ("whole", "killed")
    )
    assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
