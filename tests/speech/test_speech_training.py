"""Training of models of speech by a run file: word error rates, saved files, adapters, transcripts.

Speech is synthesized by espeak-ng, or tones are made here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge.actions.execution import execute
from ed_elarge.config import nodes
from ed_elarge.config.normalize import normalize
from ed_models.speech import load_transcriber

soundfile = pytest.importorskip("soundfile")

EXAMPLES = Path(__file__).parents[2] / "examples"
FLOAT32 = {"dtype": "float32", "param_dtype": "float32"}
WORDS = ("yes", "no", "stop", "go")


def run(values: Mapping[str, Any]) -> dict[str, Any]:
    """Execute a run, and return the last evaluation."""
    text = yaml.safe_dump(dict(values), sort_keys=False)
    assert execute(normalize(nodes.parse_yaml(text, "run.yaml"), require_actions=True)).code == 0
    lines = Path(values["trainer"]["save_directory"], "metrics.jsonl").read_text().splitlines()
    return next(row for row in map(json.loads, reversed(lines)) if "eval_loss" in row)


def example(name: str, **trainer: Any) -> dict[str, Any]:
    values = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    values["trainer"] |= trainer
    values["actions"] = ["train"]
    return values


def spoken(folder: Path) -> None:
    """Write some spoken words, each in several voices and speeds, and the files of their rows."""
    rows: dict[str, list[dict[str, str]]] = {"train": [], "eval": []}
    for word in WORDS:
        for number, (pitch, speed) in enumerate((p, s) for p in (30, 45, 60) for s in (150, 175)):
            name = f"{word}{number}.wav"
            command = ["espeak-ng", "-w", str(folder / name), "-p", str(pitch), "-s", str(speed)]
            subprocess.run([*command, word], check=True)
            rows["eval" if number == 3 else "train"].append({"audio": name, "sentence": word})
    for split, own in rows.items():
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in own))


def with_data(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    limit = {"max_duration_in_seconds": 1}
    for key, split in (("informs", "train"), ("eval_informs", "eval")):
        values["mixture"][key] = [{"data_files": str(folder / f"{split}.jsonl"), **limit}]
    return values


def their_transcript(folder: Path, file: Path) -> tuple[str, list[int]]:
    """Return the text and the tokens of `transformers` on torch for a saved model."""
    import torch
    import transformers

    samples, rate = soundfile.read(file, dtype="float32")
    pipeline: Any = transformers.pipeline("automatic-speech-recognition", model=str(folder))
    # The pipeline searches with five beams by default.
    options = {"generate_kwargs": {"num_beams": 1, "max_new_tokens": 20}}
    more = options if hasattr(pipeline.model, "generate") else {}
    text = pipeline({"raw": samples, "sampling_rate": rate}, **more)["text"]
    processor, model = pipeline.feature_extractor, pipeline.model
    features = processor(samples, sampling_rate=rate, return_tensors="pt")
    with torch.no_grad():
        if hasattr(model, "generate"):
            return text, model.generate(features["input_features"])[0].tolist()
        return text, model(features["input_values"]).logits[0].argmax(-1).tolist()


def check_equal_transcripts(folder: Path, file: Path) -> str:
    """Check that a saved model has one transcript here and in `transformers`; return the text."""
    samples, rate = soundfile.read(file, dtype="float32")
    assert rate == 16000
    transcriber = load_transcriber(folder, **FLOAT32)
    found = transcriber.transcribe(samples)
    text, tokens = their_transcript(folder, file)
    assert found.text == text.strip()
    special = {*transcriber.processor.tokenizer.all_special_ids}
    (segment,) = found.segments
    if len(tokens) < 100 and "whisper" in (folder / "config.json").read_text():
        theirs = [token for token in tokens if token not in special]
        assert [token for token in segment.tokens if token not in special] == theirs
    return found.text


def at_16_khz(file: Path, folder: Path) -> Path:
    """Write a recording with the rate of the models, and return its path."""
    from ed_data.rows.example import RowAudio
    from ed_data.rows.recordings import read_samples

    path = folder / f"{file.stem}-16000.wav"
    soundfile.write(
        path, read_samples(RowAudio(str(file), "a file"), 16000), 16000, subtype="FLOAT"
    )
    return path


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("name", ["whisper", "ctc"])
def test_trained_model_recognizes_spoken_words_and_has_transcripts_of_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    pytest.importorskip("torch")
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    monkeypatch.chdir(tmp_path)
    spoken(tmp_path)
    values = with_data(example(name), tmp_path)
    if name == "ctc":
        values["trainer"]["max_training_steps"] = 500
        values["model"]["config"]["mask_time_prob"] = 0.0
    found = run(values)
    record_property("summary", f"{name} on spoken words: eval_wer {found['eval_wer']:.3f}")
    assert found["eval_wer"] <= 0.25
    model = Path(values["trainer"]["save_directory"]) / "model"
    texts = [
        check_equal_transcripts(model, at_16_khz(tmp_path / f"{word}3.wav", tmp_path))
        for word in WORDS
    ]
    assert sum(text == word for text, word in zip(texts, WORDS, strict=True)) >= 3


@pytest.mark.nightly
def test_adapters_of_whisper_train_from_a_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES / "data" / "notes", tmp_path / "examples" / "data" / "notes")
    base = example("whisper", max_training_steps=60)
    before = run(base)
    values = example("whisper", max_training_steps=40, save_directory="adapted")
    values["model"] = {"name_or_path": "runs/whisper/model", "task": base["model"]["task"]}
    values["lora"] = {"rank": 4, "targets": ["q_proj", "v_proj"]}
    after = run(values)
    assert after["eval_loss"] < before["eval_loss"]
    config = json.loads(Path("adapted/adapter/adapter_config.json").read_text())
    assert sorted(config["target_modules"]) == ["q_proj", "v_proj"]
    (file,) = list(tmp_path.glob("examples/data/notes/CEGC.flac")) or [
        next(iter((tmp_path / "examples/data/notes").glob("*.flac")))
    ]
    samples = np.asarray(soundfile.read(at_16_khz(file, tmp_path))[0], np.float32)
    assert load_transcriber("adapted/model", **FLOAT32).transcribe(samples).text


@pytest.mark.nightly
def test_summary_has_the_error_rates_of_an_evaluation_that_transcribes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(EXAMPLES / "data" / "notes", tmp_path / "examples" / "data" / "notes")
    rates = {}
    for name in ("asked", "default"):
        values = example("whisper", max_training_steps=30, save_directory=name)
        del values["trainer"]["generation_max_length"]
        if name == "default":
            del values["trainer"]["predict_with_generate"]
        assert ("eval_wer" in run(values)) is (name == "asked")
        metrics = json.loads(Path(name, "summary.json").read_text())["metrics"]
        rates[name] = metrics["eval_wer"], metrics["eval_cer"]
    assert rates["default"] == rates["asked"]
