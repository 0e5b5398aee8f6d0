"""Mutations of every key of a run file are rejected at the key, or are listed here as valid.

Each key of the example files and of `MAXIMAL` is changed in many ways, one at a time, and the
command line checks the file. It must exit with code 2 and one message whose `file:line:column` is
the location of the changed key, without a traceback. `VALID` lists valid mutations, `ELSEWHERE`
mutations that are reported at another key of the same contradiction, and `KNOWN` mutations that
another package reports in two messages.

The default run tests the files themselves; `-m nightly` tests all mutations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from ed_elarge.config import nodes
from ed_elarge.errors import InputError, ValuePath, format_path
from maximal_run_file import DEEP, MAXIMAL, dry_run, written

EXAMPLES = Path(__file__).parents[3] / "examples"
PART = 32
"""Number of parts of the mutations."""

VALUES: dict[str, Any] = {
    "true": True,
    "list": [],
    "mapping": {"some": 1},
    "text": "nonsense",
    "null": None,
    "inf": math.inf,
    "nan": math.nan,
    "minus-one": -1,
    "zero": 0,
    "huge": 10**12,
    "half": 0.5,
}
KEYS = ("misspelled", "upper", "twice")


class Case(NamedTuple):
    """One mutation of one key of one file."""

    file: str
    path: ValuePath
    kind: str

    @property
    def key(self) -> ValuePath:
        """Path of the key in the changed file."""
        name = self.path[-1]
        if self.kind == "misspelled":
            name = name[:-2] + name[-1] + name[-2] + "x"
        if self.kind == "upper":
            name = name.upper()
        return (*self.path[:-1], name)

    @property
    def text(self) -> str:
        """Text of the changed file."""
        return written(copied(DOCUMENTS[self.file], self.path, self))


def copied(value: Any, path: ValuePath, case: Case) -> Any:
    """Return a copy of a document with one changed key."""
    first, *rest = path
    if rest:
        if isinstance(value, list):
            return [copied(v, tuple(rest), case) if i == first else v for i, v in enumerate(value)]
        return {k: copied(v, tuple(rest), case) if k == first else v for k, v in value.items()}
    new = VALUES.get(case.kind, DEEP.get(case.kind))
    if isinstance(value, list):
        return [new if i == first else v for i, v in enumerate(value)]
    if case.kind == "twice":
        return {**value, f"{first} ": value[first]}
    if case.kind in KEYS:
        return {case.key[-1] if k == first else k: v for k, v in value.items()}
    return {k: new if k == first else v for k, v in value.items()}


def cases(file: str, value: Any, path: ValuePath = ()) -> Iterator[Case]:
    """Yield every mutation of every key and list item."""
    for part, item in value.items() if isinstance(value, dict) else enumerate(value):
        here = (*path, part)
        for kind, new in VALUES.items():
            if type(new) is not type(item) or (new != item and kind not in ("list", "mapping")):
                yield Case(file, here, kind)
        if isinstance(part, str):
            yield from (Case(file, here, kind) for kind in KEYS)
        if len(here) == 2:
            yield from (Case(file, here, kind) for kind in DEEP)
        if isinstance(item, (dict, list)):
            yield from cases(file, item, here)


#: Valid mutations: kind -> keys (0 is false, and 1e12 is valid for unbounded numbers).
VALID: dict[str, str] = {
    "half": (
        "trainer.reward_weights trainer.mixture_coef "
        "trainer.beta trainer.lambda_orpo trainer.cpo_alpha trainer.simpo_gamma "
        "trainer.desirable_weight trainer.undesirable_weight trainer.center_rewards_coefficient "
        "trainer.temperature trainer.alpha lora.alpha "
        "trainer.mlm_probability trainer.noise_density "
        "model.config.layerdrop mixture.informs.max_duration_in_seconds "
        "mixture.eval_informs.max_duration_in_seconds "
        "actions.serve.limits.body_timeout actions.serve.limits.request_timeout "
        "actions.eval.limit actions.generate.repetition_penalty actions.generate.temperature "
        "actions.generate.top_p base_config.values.fcm_max_ratio eval.limit eval.top_p "
        "mixture.eval_fraction model.config.attention_dropout model.config.initializer_range "
        "model.config.rms_norm_eps model.config.rope_theta trainer.clip_grad "
        "trainer.learning_rate trainer.learning_rate_end trainer.optimizer_kwargs.b1 "
        "trainer.optimizer_kwargs.b2 trainer.optimizer_kwargs.eps trainer.training_time_limit "
        "trainer.weight_decay"
    ),
    "huge": (
        "trainer.reward_weights trainer.alpha "
        "trainer.beta trainer.lambda_orpo trainer.cpo_alpha trainer.simpo_gamma "
        "trainer.desirable_weight trainer.undesirable_weight trainer.center_rewards_coefficient "
        "trainer.temperature "
        "base_config.operation_configs.flash_attn2.block_k "
        "base_config.operation_configs.flash_attn2.block_q mixture.informs.num_rows "
        "mixture.mixture_block_size mixture.mixture_weights.texts "
        "mixture.mixture_weights.topics mixture.seed mixture.shuffle_buffer_size "
        "model.config.rope_theta trainer.clip_grad trainer.learning_rate "
        "trainer.learning_rate_end trainer.optimizer_kwargs.eps trainer.training_time_limit "
        "trainer.weight_decay"
    ),
    "minus-one": "trainer.reward_weights actions.generate.top_k sharding.dcn_axis_dims",
    "list": "trainer.generation_prompts.content actions.generate.prompts.content",
    "misspelled": "trainer.generation_prompts.content actions.generate.prompts.content "
    "mixture.informs.format_fields.content",
    "null": (
        "mixture.informs.max_duration_in_seconds mixture.eval_informs.max_duration_in_seconds "
        "mixture.tokenization.task trainer.max_length actions.transcribe.language "
        "mixture.tokenization.language trainer.generation_max_length "
        "model.config.text_config model.config.vision_config "
        "trainer.num_remains_in_group "
        "model.task trainer.reward_weights trainer.generation_prompts.content "
        "trainer.generation_interval model.tokenizer model.tokenizer.chat_template lora.alpha "
        "base_config.values.blocksize_q actions.generate.prompts.content "
        "trainer.center_rewards_coefficient "
        "actions.serve.allowed_hosts actions.serve.lora_directory "
        "actions.serve.batch_directory actions.serve.otlp_traces_endpoint "
        "actions.eval actions.eval.limit actions.generate actions.generate.prompts "
        "actions.serve actions.serve.cors_origins actions.serve.served_model_name base_config "
        "base_config.operation_configs.flash_attn2.block_k "
        "base_config.operation_configs.flash_attn2.block_q "
        "base_config.operation_configs.flash_attn2.platform "
        "base_config.values.decode_attn_mechanism base_config.values.kvdtype esurge "
        "esurge.long_prefill_token_threshold esurge.max_num_batched_tokens "
        "esurge.max_num_seq_buckets esurge.reserve_tokens eval eval.limit eval.num_fewshot "
        "eval.local_tasks.name eval.output_path eval.system_instruction eval.temperature "
        "eval.top_p loader "
        "loader.precision mixture.batch_size mixture.cache_dir mixture.eval_fraction "
        "mixture.eval_informs.type mixture.informs.format_callback "
        "mixture.informs.format_fields mixture.informs.name mixture.informs.num_rows "
        "mixture.informs.preprocessing_fn mixture.mixture_weights mixture.pack_eos_token_id "
        "mixture.pack_seq_length mixture.save mixture.save.compression mixture.seed "
        "mixture.shuffle_buffer_size mixture.tokenization.max_length "
        "mixture.tokenization.truncation model.config.attention_dropout model.config.head_dim "
        "model.config.num_key_value_heads platform platform.backend platform.platform sharding "
        "sharding.dcn_axis_dims sharding.fsdp_is_ep_bound sharding.sp_is_ep_bound "
        "trainer.clip_grad trainer.eval_batch_size trainer.evaluation_steps "
        "trainer.learning_rate_end trainer.lmhead_chunksize trainer.master_dtype "
        "trainer.max_training_steps trainer.save_steps trainer.save_total_limit "
        "trainer.training_time_limit trainer.tx_mu_dtype"
    ),
    "text": (
        "eval.local_tasks.name "
        "trainer.label_names "
        "trainer.reward_functions.regex.pattern trainer.reward_functions.number.field "
        "mixture.informs.additional_fields trainer.generation_prompts "
        "trainer.generation_prompts.role trainer.generation_prompts.content "
        "actions.generate.prompts.role actions.generate.prompts.content "
        "actions.serve.allowed_hosts actions.serve.lora_directory "
        "actions.serve.batch_directory actions.serve.otlp_traces_endpoint "
        "actions.eval.tasks actions.generate actions.generate.prompts actions.serve.api_key "
        "actions.serve.cors_origins actions.serve.served_model_name actions.to_yaml "
        "actions.to_yaml.path esurge.extra_stops eval.apply_chat_template eval.output_path "
        "eval.system_instruction eval.tasks mixture.cache_dir mixture.informs.content_field "
        "mixture.informs.format_fields.content mixture.save.path mixture.text_target_field "
        "mixture.tokenization.output_field trainer.save_directory"
    ),
    "true": (
        "trainer.filter_by_efficiency trainer.whole_word_mask base_config.values.scan_layers "
        "esurge.async_scheduling "
        "esurge.compile_runner esurge.destroy_pages_on_pause "
        "esurge.enable_prefix_caching esurge.prefer_preserve_prompt esurge.use_aot_forward "
        "eval.apply_chat_template eval.predict_only eval.print_results eval.use_tqdm "
        "mixture.cache_remote_files mixture.tokenization.add_special_tokens "
        "model.config.attention_bias sharding.fsdp_is_ep_bound sharding.sp_is_ep_bound "
        "trainer.resume_if_possible trainer.use_tensorboard"
    ),
    "upper": (
        "trainer.generation_prompts.content actions.generate.prompts.content "
        "actions.eval actions.generate actions.serve actions.to_yaml actions.transcribe "
        "mixture.informs.format_fields.content"
    ),
    "zero": (
        "trainer.beta trainer.reward_weights trainer.mixture_coef trainer.lmbda "
        "trainer.doc_stride trainer.distillation_weight "
        "mixture.tokenization.assistant_only_loss actions.serve.limits.max_stored_responses "
        "trainer.lambda_orpo trainer.cpo_alpha trainer.simpo_gamma trainer.desirable_weight "
        "trainer.undesirable_weight trainer.center_rewards_coefficient trainer.alpha "
        "actions.serve.drain_seconds actions.serve.enable_function_calling "
        "actions.serve.oai_like_processor actions.serve.enable_sleep_mode "
        "actions.generate.seed actions.generate.temperature actions.generate.top_k "
        "actions.serve.port actions.serve.require_api_key base_config.values.fcm_max_ratio "
        "base_config.values.scan_layers esurge.async_scheduling "
        "esurge.auto_cap_new_tokens esurge.auto_truncate_prompt "
        "esurge.compile_runner esurge.destroy_pages_on_pause esurge.enable_prefix_caching "
        "esurge.extra_eos_token_ids esurge.max_logprobs esurge.overlap_execution "
        "esurge.prefer_preserve_prompt esurge.reserve_tokens esurge.seed esurge.silent_mode "
        "esurge.use_aot_forward eval.bootstrap_iters eval.cache_requests eval.check_integrity "
        "eval.fewshot_random_seed eval.log_samples eval.numpy_random_seed eval.predict_only "
        "eval.print_results eval.random_seed eval.temperature eval.use_tqdm eval.write_out "
        "loader.verbose mixture.block_mixture mixture.cache_remote_files "
        "mixture.pack_on_the_fly mixture.pack_shuffle mixture.pack_tokens "
        "mixture.prefetch_buffer_size mixture.prefetch_workers mixture.save.overwrite "
        "mixture.seed mixture.shuffle_buffer_size mixture.tokenization.add_special_tokens "
        "model.config.attention_dropout model.config.initializer_range "
        "sharding.auto_shard_model sharding.fsdp_is_ep_bound sharding.sp_is_ep_bound "
        "trainer.do_last_save trainer.learning_rate_end trainer.optimizer_kwargs.b1 "
        "trainer.optimizer_kwargs.b2 trainer.resume_if_possible trainer.seed "
        "trainer.use_tensorboard trainer.warmup_steps trainer.weight_decay"
    ),
}

#: Mutations that contradict another key and are reported there.
ELSEWHERE: dict[str, str] = {
    "huge": "mixture.batch_size",
    "misspelled": "trainer.generation_prompts.role actions.generate.prompts.role",
    "null": "eval mixture.eval_fraction mixture.informs.type",
    # A row of the data has a label that the list of names does not contain any more.
    "text": "mixture.informs.name trainer.label_names",
    "upper": "trainer.generation_prompts.role actions.generate.prompts.role",
    "zero": "mixture.informs.type mixture.tokenization.truncation",
}

#: Mutations that another package reports in two messages (a missing name and an extra name).
KNOWN: dict[str, str] = {
    "mapping": "model.tokenizer",
    "null": "model.task",  # the default task contradicts every key of recordings
    "misspelled": "mixture.mixture_weights.texts mixture.mixture_weights.topics "
    "model.tokenizer.train",
    "upper": "mixture.mixture_weights.texts mixture.mixture_weights.topics model.tokenizer.train",
}

FILES = {path.name: path.read_text() for path in sorted(EXAMPLES.glob("*.yaml"))}
FILES["maximal"] = MAXIMAL
# The base is a file of a package, which a machine without `uv sync` lacks.
FILES["quickstart.yaml"] = re.sub(
    '"package:[^"]*"', "runs/quickstart/model", FILES["quickstart.yaml"]
)
DOCUMENTS = {name: yaml.safe_load(text) for name, text in FILES.items()}
ALL = [case for name, document in DOCUMENTS.items() for case in cases(name, document)]


def complaint(case: Case) -> str:
    """Return the defect of the response to a changed file, or an empty string."""
    try:
        code, text = dry_run(case.text)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    errors = text[text.find("error: ") :] if "error: " in text else ""
    if code == 0:
        return "accepted"
    places = re.findall(r"^(?:error: )?run\.yaml:(\d+):(\d+): (.*)$", errors, re.MULTILINE)
    if code != 2 or not places:
        return f"code {code}: {text}"
    if len(places) > 1:
        return f"several messages: {errors}"
    try:
        spans = nodes.parse_yaml(case.text)
    except InputError as error:
        spans = error.document
    key = case.key
    while isinstance(key[-1], int):  # an item of a list: its location, or that of the list's key
        key = key[:-1]
    places_of_key = {spans.keys.get(key)} | {
        span for path, span in spans.values.items() if path[: len(key)] == key
    }
    line, column, _ = places[0]
    own = {(span.line, span.column) for span in places_of_key if span}
    if case.kind not in DEEP and (int(line) - 1, int(column) - 1) not in own:
        return f"elsewhere: {errors}"
    return ""


@pytest.mark.parametrize("name", FILES)
def test_the_files_themselves_are_valid(example_folder: Path, name: str) -> None:
    code, text = dry_run(FILES[name])
    assert code == 0, text
    assert not text or name == "maximal"  # it has keys without effect


def wrong(tried: list[Case]) -> list[str]:
    """Return every defect."""
    out = []
    for case in tried:
        name = re.sub(r"\[\d+\]", "", format_path(case.path))
        answer = complaint(case)
        lists = (VALID if answer == "accepted" else ELSEWHERE, KNOWN)
        if answer and not any(name in names.get(case.kind, "").split() for names in lists):
            out.append(f"{case.file}: {format_path(case.path)} [{case.kind}]: {answer}")
    return out


@pytest.mark.nightly
def test_a_part_of_the_broken_files(example_folder: Path) -> None:
    assert not wrong(ALL[::PART])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(1, PART))
def test_remaining_mutated_files_raise_no_unexpected_error(example_folder: Path, part: int) -> None:
    assert not wrong(ALL[part::PART])
