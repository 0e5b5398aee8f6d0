"""The names of Hugging Face's and TRL's trainers are options, aliases, or explained."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from ed_trainers.arguments import ARGUMENTS, SFTArguments
from ed_trainers.options.other_names import EQUIVALENT, SAME
from pydantic import ValidationError

#: Settings of torch, of its libraries and of callbacks, which have no counterpart in a JAX run.
WITHOUT_COUNTERPART = {
    *("average_tokens_across_devices", "batch_eval_metrics", "dataloader_in_order"),
    *("dataloader_multiprocessing_context", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "ddp_broadcast_buffers", "ddp_bucket_cap_mb", "ddp_static_graph"),
    *("ddp_timeout", "debug", "enable_jit_checkpoint", "eval_accumulation_steps", "eval_delay"),
    *("eval_do_concat_batches", "eval_on_start", "eval_use_gather_object", "full_determinism"),
    *("hub_always_push", "hub_revision", "include_for_metrics", "include_num_input_tokens_seen"),
    *("length_column_name", "log_level", "log_level_replica", "log_on_each_node"),
    *("logging_nan_inf_filter", "prediction_loss_only", "save_on_each_node"),
    *("restore_callback_states_from_checkpoint", "skip_memory_metrics", "torch_empty_cache_steps"),
    *("trackio_bucket_id", "trackio_space_id", "trackio_static_space_id", "use_cache"),
}


def test_every_alias_is_an_option() -> None:
    fields = set(SFTArguments.model_fields)
    assert set(SAME.values()) <= fields
    assert not fields & {*SAME, *EQUIVALENT}
    arguments = SFTArguments(output_dir="x", max_steps=3, lr_scheduler_type="linear")
    assert arguments == SFTArguments(save_directory="x", max_training_steps=3, scheduler="linear")
    assert SFTArguments(progress_bar_type="tqdm").progress_bar_type == "rich"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optim", "unknown key 'optim'; use optimizer, such as adamw"),
        ("torch_compile", "unknown key 'torch_compile'; omit it: every step is one compiled"),
        ("sample_packing", "use mixture: {pack_tokens: true, pack_seq_length: ...}"),
    ],
)
def test_names_of_other_trainers_are_explained(name: str, message: str) -> None:
    with pytest.raises(ValidationError) as error:
        SFTArguments(**{name: 1})
    assert message in str(error.value)


@pytest.mark.torch
def test_every_option_of_hugging_face_is_known() -> None:
    transformers: Any = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    known = {*EQUIVALENT, *WITHOUT_COUNTERPART}
    for cls in ARGUMENTS.values():
        known |= {*cls.model_fields, *cls.ALIASES}
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert theirs <= known, theirs - known
