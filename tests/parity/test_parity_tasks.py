"""Other tasks of every family have the names, shapes and values of transformers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_models.base.export import TORCH_CLASSES
from ed_models.checkpoints import hub
from ed_models.checkpoints.loading import weight_map
from ed_models.conformance import ONE, Subject, forward
from flax import nnx

from tests.conformance.cases import subjects
from tests.conformance.results import IMPOSSIBLE

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("tasks")]
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Families whose published tensor names transformers cannot save.
DIFFERENT = {model_type for model_type, _, check in IMPOSSIBLE if check == "saved"}
SHORT = ("llama", "qwen3", "gemma")
TASKS = (TaskType.BASE_MODULE, TaskType.SEQUENCE_CLASSIFICATION)


@functools.cache
def first_of_each() -> dict[str, Subject]:
    rows: dict[str, Subject] = {}
    for subject in subjects():
        if subject.task == TaskType.CAUSAL_LM and subject.is_in_transformers:
            rows.setdefault(subject.model_type, subject)
    return rows


def torch_class(task: TaskType, model_type: str) -> Any:
    auto = getattr(transformers, TORCH_CLASSES[task])
    return auto if transformers.CONFIG_MAPPING[model_type] in auto._model_mapping else None


def torch_model(task: TaskType, subject: Subject, device: str = "cpu") -> Any:
    auto = torch_class(task, subject.model_type)
    config = transformers.AutoConfig.for_model(subject.model_type, **subject.fields, num_labels=3)
    torch.manual_seed(0)
    with torch.device(device):
        return auto.from_config(config).eval()


@pytest.mark.nightly
@pytest.mark.parametrize("task", TASKS)
def test_names_and_shapes_match_hugging_face(task: TaskType) -> None:
    from transformers.core_model_loading import revert_weight_conversion

    compared, wrong = [], []
    for model_type, subject in first_of_each().items():
        if torch_class(task, model_type) is None or model_type in DIFFERENT:
            continue
        model = torch_model(task, subject, "meta")
        stored = revert_weight_conversion(model, model.state_dict())
        cls = registry.get_module(task, model_type)
        config = registry.get_config(model_type).from_dict({**subject.fields, "num_labels": 3})
        state = nnx.state(nnx.eval_shape(lambda c=cls, f=config: c(f, rngs=nnx.Rngs(0))))
        table = weight_map(cls, state, config)
        # Values that follow from the configuration are ignored by name.
        theirs = {n: tuple(v.shape) for n, v in stored.items() if not table.ignores(n)}
        compared.append(model_type)
        wrong += (
            [] if table.hf_shapes == theirs else [(model_type, table.hf_shapes.keys() ^ theirs)]
        )
    assert not wrong
    assert len(compared) > 30


def both(task: TaskType, model_type: str, directory: Any) -> tuple[Any, Any, Subject]:
    subject = first_of_each()[model_type]
    theirs = torch_model(task, subject)
    with torch.no_grad():
        for value in theirs.parameters():
            value.add_(0.2 * torch.randn_like(value))
    theirs.save_pretrained(directory)
    ours = hub.from_pretrained(directory, task=task, sharding_axis_dims=ONE)
    return ours, theirs, subject


def padded(subject: Subject) -> tuple[np.ndarray, np.ndarray]:
    """Return rows with padding on either side."""
    mask = np.stack(
        [np.roll(row, shift) for row, shift in zip(subject.mask, (0, 0, 0, 7), strict=True)]
    )
    mask[2, -4:] = 0
    return np.where(mask != 0, subject.ids, subject.fields["pad_token_id"]), mask


def nothing_but_buffers(report: dict[str, Any], model: Any) -> bool:
    """Return whether the files lack only values that follow from the configuration."""
    missing = {*report.pop("missing_keys")}
    return not any(report.values()) and missing <= {name for name, _ in model.named_buffers()}


CLASSIFIED = [
    pytest.param(t, marks=[] if t in SHORT else [pytest.mark.nightly])
    for t in registry.model_types()
    if t not in DIFFERENT
]


@pytest.mark.daily("llama")
@pytest.mark.parametrize("model_type", CLASSIFIED)
def test_sequence_classifier_matches_transformers(model_type: str, tmp_path) -> None:
    task = TaskType.SEQUENCE_CLASSIFICATION
    if model_type not in first_of_each() or torch_class(task, model_type) is None:
        pytest.skip("transformers has no such class")
    ours, theirs, subject = both(task, model_type, tmp_path / "theirs")
    ids, mask = padded(subject)
    places = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    with torch.no_grad():
        want = theirs(
            input_ids=torch.tensor(ids, dtype=torch.long),
            attention_mask=torch.tensor(mask),
            position_ids=torch.tensor(places),
            use_cache=False,
        ).logits.numpy()
    got = np.asarray(forward(ours, input_ids=ids, attention_mask=mask).logits)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)

    ours.save_pretrained(tmp_path / "ours")
    again, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()) or nothing_but_buffers(report, theirs), report
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


@pytest.mark.parametrize("model_type", CLASSIFIED)
def test_base_model_matches_transformers(model_type: str, tmp_path) -> None:
    if model_type not in first_of_each() or torch_class(TaskType.BASE_MODULE, model_type) is None:
        pytest.skip("transformers has no such class")
    ours, theirs, subject = both(TaskType.BASE_MODULE, model_type, tmp_path / "theirs")
    with torch.no_grad():
        want = theirs(torch.tensor(subject.ids, dtype=torch.long), use_cache=False)[0].numpy()
    got = np.asarray(forward(ours, input_ids=subject.ids).last_hidden_state)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=0)
    ours.save_pretrained(tmp_path / "ours")
    again, report = transformers.AutoModel.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert not any(report.values()) or nothing_but_buffers(report, theirs), report
    for name, value in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
