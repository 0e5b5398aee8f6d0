"""Builders of serving engines, of texts or of speech by the checkpoint, and of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError

from ed_elarge.config.run_config import RunConfig
from ed_elarge.model import eLargeModel

if TYPE_CHECKING:
    from ed_esurge.engine import eSurge
    from ed_esurge.speech.engine import SpeechEngine
    from ed_models.tasks.causal_lm import CausalLM
    from transformers import FeatureExtractionMixin, ProcessorMixin

    from ed_elarge.asynchronous.rollout import AsynchronousRollout
    from ed_elarge.engine.rollout import EngineRollout


def served_task(directory: Path, default: TaskType) -> TaskType:
    """Return the task of a checkpoint that is not trained, from its config.json."""
    from ed_infra import registry
    from ed_models.checkpoints import hub
    from ed_models.checkpoints.checks import detect_task

    task = detect_task(directory)
    if task == TaskType.BASE_MODULE:  # a body without a head returns embeddings
        task = TaskType.EMBEDDING
    tasks = registry.list_tasks(hub.read_config(directory).model_type)
    return task if task in tasks else default


def list_mtp_fields(run: RunConfig) -> dict[str, str]:
    """Return the fields of the model's configuration that training or the kind of drafts needs."""
    fields = dict[str, str]()
    if run.esurge is not None and run.esurge.speculative_config is not None:
        from ed_esurge.runner.drafts import DRAFT_KINDS

        fields |= DRAFT_KINDS[run.esurge.speculative_config.method].config_fields
    if run.trainer is not None and run.trainer.trains_mtp:
        fields["mtp_head"] = "new"
    return fields


def build_engine(elm: eLargeModel) -> eSurge | SpeechEngine:
    """Create the engine of the section `esurge` for the model."""
    from ed_esurge.engine import eSurge
    from ed_esurge.speech.engine import SPEECH_TASKS

    model = elm.part("model")
    if type(model).model_task in SPEECH_TASKS:
        return _speech_engine(elm, model)
    processor = load_engine_processor(elm, model.input_names)
    return eSurge(model, elm.part("tokenizer"), elm.config.esurge, processor=processor)


def load_engine_processor(elm: eLargeModel, input_names: Sequence[str]) -> Any:
    """Return the processor of a model that reads images or audio; None for other models.

    Args:
        input_names: Names of the arrays that the model accepts.
    """
    if "pixel_values" in input_names:
        return elm.part("processor")
    if "input_features" in input_names and elm.config.model is not None:
        return elm.part("processor") if elm.config.has_recordings else _feature_extractor(elm)
    return None


def _feature_extractor(elm: eLargeModel) -> FeatureExtractionMixin | None:
    """Return the feature extractor of an audio-language model; None for a new model."""
    from ed_models.checkpoints.tokenizers import load_feature_extractor

    section = elm.config.model
    if section is None or section.name_or_path is None:
        return None
    with elm.config.blame("model", "name_or_path"):
        return load_feature_extractor(section.name_or_path, revision=section.extra_kwargs.revision)


def _speech_engine(elm: eLargeModel, model: CausalLM) -> SpeechEngine:
    from ed_esurge.speech.engine import SpeechEngine, unused_options
    from ed_models.speech import Transcriber

    options = elm.config.esurge
    for name in () if elm.shares_options else unused_options(options):
        with elm.config.blame("esurge", name):
            raise ConfigError(
                "the option has no effect on a model that transcribes audio: omit the option"
            )
    speech_engine = SpeechEngine(Transcriber(model, speech_processor(elm)))
    if options.compile_runner:
        speech_engine.warm_up()
    return speech_engine


def speech_processor(elm: eLargeModel) -> ProcessorMixin:
    """Return the processor of the run, or load that of a checkpoint whose task is not named."""
    if elm.config.has_audio:
        return elm.part("processor")
    from ed_models.checkpoints.tokenizers import load_processor

    section = elm.config.model
    assert section is not None, "only a loaded model transcribes audio"
    assert section.name_or_path is not None
    with elm.config.blame("model", "name_or_path"):
        return load_processor(
            section.name_or_path, part="feature_extractor", revision=section.extra_kwargs.revision
        )


def build_rollout(elm: eLargeModel) -> EngineRollout | AsynchronousRollout:
    """Create the rollout of an online method: with an engine of the section `esurge`, or with the
    processes of the section `asynchronous`."""
    if elm.config.asynchronous is not None:
        from ed_elarge.asynchronous.rollout import AsynchronousRollout

        return AsynchronousRollout(elm)
    from ed_elarge.engine.lending import engine_of_run
    from ed_elarge.engine.rollout import EngineRollout

    with elm.config.blame("trainer", "max_completion_length"):
        return EngineRollout(engine_of_run(elm, elm.part("model")))
