"""Task names of `model.task`, the task of `auto-bind`, and checkpoints of other tasks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from ed_elarge.building.dtypes import plan_param_dtype
from ed_elarge.config import checkpoint_tasks, run_config
from ed_elarge.config.nodes import parse_yaml
from ed_elarge.config.normalize import normalize
from ed_elarge.config.table import check_machine
from ed_elarge.errors import InputError
from ed_elarge.model import eLargeModel
from ed_elarge.plan.shapes import read_config_values
from ed_infra import registry
from ed_infra.enums import TaskType, canonical_task
from ed_models.checkpoints.checks import detect_task
from ed_models.checkpoints.hub import read_config, resolve
from gguf import GGUFWriter

CHECKPOINTS: dict[str, tuple[dict[str, Any], TaskType]] = {
    "T5ForConditionalGeneration": ({"model_type": "t5"}, TaskType.SEQUENCE_TO_SEQUENCE),
    "WhisperForConditionalGeneration": (
        {"model_type": "whisper"},
        TaskType.SPEECH_SEQUENCE_TO_SEQUENCE,
    ),
    "Wav2Vec2ForCTC": ({"model_type": "wav2vec2"}, TaskType.CTC),
    "ViTForImageClassification": ({"model_type": "vit"}, TaskType.IMAGE_CLASSIFICATION),
    "CLIPModel": ({"model_type": "clip"}, TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION),
    "LlavaForConditionalGeneration": (
        {
            "model_type": "llava",
            "text_config": {"model_type": "llama"},
            "vision_config": {"model_type": "clip_vision_model"},
        },
        TaskType.IMAGE_TEXT_TO_TEXT,
    ),
    "Qwen2AudioForConditionalGeneration": ({"model_type": "qwen2_audio"}, TaskType.ANY_TO_ANY),
    "LlamaForCausalLM": ({"model_type": "llama"}, TaskType.CAUSAL_LM),
    "LlamaForSequenceClassification": (
        {"model_type": "llama"},
        TaskType.SEQUENCE_CLASSIFICATION,
    ),
    "BertForMaskedLM": ({"model_type": "bert"}, TaskType.MASKED_LM),
}


def write(folder: Path, name: str) -> Path:
    config = {**CHECKPOINTS[name][0], "architectures": [name]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path, **sections: Any) -> Any:
    model = {"name_or_path": str(folder), **sections.pop("model", {})}
    text = yaml.safe_dump({"model": model, "actions": ["validate"], **sections})
    return normalize(parse_yaml(text, "run.yaml"))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_auto_bind_is_the_task_that_the_checkpoint_names(name: str, tmp_path: Path) -> None:
    folder, task = write(tmp_path, name), CHECKPOINTS[name][1]
    config = checkpoint_tasks.read_task_config(str(folder))
    assert config is not None
    assert checkpoint_tasks.find_task(str(folder), config) == task == detect_task(folder)
    run = config_of(folder, model={"task": "auto-bind"})
    assert run.task == task
    assert run.has_audio == (task in (TaskType.CTC, TaskType.SPEECH_SEQUENCE_TO_SEQUENCE))
    model_type = read_config(folder, task).model_type
    assert {*checkpoint_tasks.registered_tasks(model_type)} <= {*registry.list_tasks(model_type)}


def write_gguf(path: Path) -> Path:
    """Write the metadata and some tensors of a Llama."""
    writer = GGUFWriter(path, "llama")
    numbers = {"block_count": 3, "context_length": 64, "embedding_length": 32}
    numbers |= {"feed_forward_length": 48, "attention.head_count": 4}
    for key, value in numbers.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-6)
    shapes = {"token_embd": (99, 32), **{f"blk.{n}.attn_norm": (32,) for n in range(3)}}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("source", ["model.gguf", "."])
def test_settings_of_a_gguf_file_are_known_without_jax(source: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    run = config_of(tmp_path / source)
    config = run.known_model
    assert config is not None
    sizes = config["model_type"], config["num_hidden_layers"], config["hidden_size"]
    assert sizes == ("llama", 3, 32)
    assert (config["vocab_size"], run.known_positions) == (99, 64)
    assert plan_param_dtype(run) == "float32"
    assert read_config_values(run) == config
    assert read_config(resolve(tmp_path / source)).num_hidden_layers == 3


def test_settings_of_a_damaged_gguf_file_are_unknown(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:100])
    assert config_of(file).known_model is None


def test_settings_of_a_run_are_those_of_its_model(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", "LlamaForCausalLM")
    config = config_of(tmp_path).known_model
    assert config is not None and config["model_type"] == "llama"


@pytest.mark.nightly
def test_reading_a_gguf_file_imports_no_jax(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom ed_elarge.config.checkpoint_tasks import read_task_config\n"
        f"assert read_task_config({str(write_gguf(tmp_path / 'model.gguf'))!r})\n"
        "print({'jax', 'transformers', 'flax'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_run_reads_the_configuration_of_its_checkpoint_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, reads = write(tmp_path, "LlamaForCausalLM"), []
    read = run_config.read_task_config
    monkeypatch.setattr(run_config, "read_task_config", lambda *of: reads.append(of) or read(*of))
    run = config_of(folder, model={"task": "auto-bind"})
    check_machine(run)
    assert run.task == TaskType.CAUSAL_LM and run.known_model is run.stored_config
    assert reads == [(str(folder), None)]


@pytest.mark.parametrize("place", ["", "checkpoints", "checkpoints/7", "checkpoints/7/items"])
def test_a_checkpoint_of_maxtext_has_the_configuration_above_it(place: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "LlamaForCausalLM")
    item = folder / "checkpoints" / "7" / "items"
    item.mkdir(parents=True)
    (item / "_METADATA").write_text("{}")
    run = config_of(folder / place, model={"task": "auto-bind"})
    check_machine(run)
    assert run.task == TaskType.CAUSAL_LM
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"contains no config\.json"):
        check_machine(config_of(folder / place))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("LlamaForCausalLM", "speech-seq2seq"),
        ("LlamaForCausalLM", "ctc"),
        ("LlamaForCausalLM", "vision-language-model"),
        ("T5ForConditionalGeneration", "any-to-any"),
        ("WhisperForConditionalGeneration", "seq2seq"),
        ("ViTForImageClassification", "zero-shot-image-classification"),
    ],
)
def test_a_checkpoint_without_the_task_is_refused_with_its_tasks(
    name: str, task: str, tmp_path: Path
) -> None:
    own = CHECKPOINTS[name][1].value
    with pytest.raises(InputError, match=rf"model\.task: .*no model for.*it has: .*'{own}'"):
        check_machine(config_of(write(tmp_path, name), model={"task": task}))


def test_the_task_of_a_method_is_compared_with_the_checkpoint(tmp_path: Path) -> None:
    folder = write(tmp_path, "LlamaForCausalLM")
    trainer = {"trainer_type": "ctc", "save_directory": str(tmp_path / "run")}
    informs = [{"data_files": str(tmp_path / "config.json")}]
    with pytest.raises(InputError, match=r"model\.name_or_path: .*has no model for 'ctc'"):
        check_machine(config_of(folder, trainer=trainer, mixture={"informs": informs}))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("vision-language-model", TaskType.IMAGE_TEXT_TO_TEXT),
        ("vision_lm", TaskType.IMAGE_TEXT_TO_TEXT),
        (TaskType.VISION_LM, TaskType.IMAGE_TEXT_TO_TEXT),
        ("text-generation", TaskType.CAUSAL_LM),
        ("text-classification", TaskType.SEQUENCE_CLASSIFICATION),
        ("fill-mask", TaskType.MASKED_LM),
    ],
)
def test_other_names_of_tasks_are_read(name: str, task: TaskType) -> None:
    assert canonical_task(name) == task


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["t5", "whisper", "vit", "llava", "wav2vec2"])
def test_auto_bind_builds_the_model_of_the_task(family: str) -> None:
    from tests.conformance.cases import subjects

    subject = subjects(family)[0]
    elm = eLargeModel.from_pretrained(str(subject.directory), task="auto-bind")
    assert type(elm.build_model()).model_task == detect_task(subject.directory)
