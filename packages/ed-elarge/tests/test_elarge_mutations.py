"""Mutations of every key of a run file are rejected at the key, or are listed here as valid.

Each key of the example files and of `MAXIMAL` is changed in many ways, one at a time, and the
command line checks the file. It must exit with code 2 and one message whose `file:line:column` is
the location of the changed key, without a traceback. `VALID` lists valid mutations, `ELSEWHERE`
mutations that are reported at another key of the same contradiction, and `KNOWN` mutations that
another package reports in two messages.

The default run tests a fixed part of the mutations; `-m nightly` tests all of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from ed_elarge.__main__ import run_file
from ed_elarge.config import nodes
from ed_elarge.errors import InputError, ValuePath, dotted

EXAMPLES = Path(__file__).parents[3] / "examples"
PART = 32
"""The default run tests one mutation in this number."""

#: Every section and action with (nearly) every key, each at a value that means something.
MAXIMAL = """
model:
  config:
    model_type: llama
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 16
    max_position_embeddings: 512
    tie_word_embeddings: true
    initializer_range: 0.05
    rms_norm_eps: 1.0e-5
    attention_dropout: 0.1
    hidden_act: silu
    rope_theta: 10000.0
    attention_bias: false
  tokenizer: {train: {vocab_size: 300, min_frequency: 3}}
  task: causal-language-model
loader:
  dtype: bfloat16
  param_dtype: float32
  precision: highest
  verbose: true
sharding:
  axis_dims: [1, -1, 1, 1, 1]
  axis_names: [dp, fsdp, ep, tp, sp]
  dcn_axis_dims: [1, 1, 1, 1, 1]
  auto_shard_model: true
  fsdp_is_ep_bound: false
  sp_is_ep_bound: false
platform:
  backend: cpu
  platform: jax
base_config:
  values:
    attn_mechanism: flash
    decode_attn_mechanism: vanilla
    blocksize_q: 64
    attn_softmax_dtype: float32
    kvdtype: bfloat16
    sequence_axis_name: sp
    scan_layers: false
    gradient_checkpointing: nothing_saveable
    fcm_max_ratio: 0.1
  operation_configs:
    flash_attn2: {platform: jax, block_q: 64, block_k: 64}
mixture:
  informs:
    - type: python
      data_files: pydoc_data.topics:topics
      name: topics
      preprocessing_fn: textwrap:dedent
      format_callback: copy:copy
      format_fields: {content: body}
      content_field: body
      num_rows: 50
    - {data_files: texts.jsonl, split: train, content_field: text}
  eval_fraction: 0.1
  eval_informs:
    - {type: txt, data_files: texts.txt, sample_by: paragraph}
  cache_dir: cache
  cache_remote_files: false
  text_target_field: prose
  batch_size: 8
  seed: 3
  shuffle_buffer_size: 100
  pack_tokens: true
  pack_seq_length: 128
  pack_eos_token_id: 0
  pack_strategy: first_fit
  pack_shuffle: true
  pack_shuffle_buffer_factor: 8
  pack_on_the_fly: true
  block_mixture: true
  mixture_block_size: 512
  stop_strategy: first_exhausted
  mixture_weights: {topics: 0.5, texts: 0.5}
  prefetch_workers: 1
  prefetch_buffer_size: 2
  tokenization:
    max_length: 64
    truncation: true
    add_special_tokens: false
    output_field: tokens
    batch_size: 100
  save: {path: saved, format: parquet, num_shards: 2, compression: zstd, overwrite: true}
trainer:
  trainer_type: sft
  learning_rate: 1.0e-3
  optimizer: adamw
  optimizer_kwargs: {b1: 0.9, b2: 0.95, eps: 1.0e-8, nesterov: true}
  scheduler: cosine
  learning_rate_end: 1.0e-5
  warmup_steps: 5
  weight_decay: 0.1
  clip_grad: 1.0
  tx_mu_dtype: bfloat16
  master_dtype: float32
  max_training_steps: 20
  training_time_limit: 90min
  total_batch_size: 8
  gradient_accumulation_steps: 2
  eval_batch_size: 4
  seed: 7
  save_directory: runs/maximal
  save_steps: 10
  save_total_limit: 2
  do_last_save: true
  resume_if_possible: false
  log_steps: 2
  report_steps: 2
  evaluation_steps: 10
  progress_bar_type: json
  use_tensorboard: false
  lmhead_chunksize: 64
esurge:
  max_model_len: 256
  max_num_seqs: 4
  max_num_batched_tokens: 64
  long_prefill_token_threshold: 32
  page_size: 16
  hbm_utilization: 0.5
  cpu_cache_gib: 0.5
  enable_prefix_caching: false
  scheduling_policy: priority
  compile_runner: false
  use_aot_forward: false
  async_scheduling: false
  overlap_execution: true
  min_input_pad: 8
  max_num_seq_buckets: [2, 4]
  max_logprobs: 5
  seed: 11
  silent_mode: true
  auto_truncate_prompt: true
  truncate_mode: middle
  auto_cap_new_tokens: true
  prefer_preserve_prompt: false
  reserve_tokens: 8
  extra_eos_token_ids: [1]
  extra_stops: ["END"]
  destroy_pages_on_pause: false
eval:
  tasks: [heldout_perplexity, heldout_cloze]
  num_fewshot: 0
  max_new_tokens: 32
  temperature: 0.5
  top_p: 0.9
  batch_size: 16
  use_tqdm: false
  limit: 10
  cache_requests: true
  check_integrity: true
  write_out: true
  log_samples: true
  bootstrap_iters: 10
  apply_chat_template: false
  system_instruction: Be brief.
  predict_only: false
  random_seed: 1
  numpy_random_seed: 2
  fewshot_random_seed: 3
  output_path: results.json
  print_results: false
actions:
  - validate
  - to_yaml: {path: saved.yaml}
  - train
  - eval: {tasks: [heldout_cloze], engine: esurge, limit: 5}
  - generate: {prompts: [The], max_new_tokens: 8, temperature: 0.7, top_k: 5, top_p: 0.9, seed: 1,
               repetition_penalty: 1.1}
  - serve: {host: 127.0.0.1, port: 0, log_level: error, served_model_name: m, api_key: k,
            require_api_key: true, cors_origins: ["*"], allowed_hosts: [a.example],
            enable_function_calling: true, tool_parser_name: hermes, reasoning_parser: none,
            oai_like_processor: true, drain_seconds: 5, lora_directory: loras,
            batch_directory: batches, otlp_traces_endpoint: "http://127.0.0.1:4318/v1/traces",
            enable_sleep_mode: true, unknown_fields: refuse,
            limits: {max_body_bytes: 2048, max_concurrent_requests: 2,
            max_connections: 3, max_generations: 4, max_stored_responses: 5,
            max_file_bytes: 2048, max_files: 7, max_batches: 8, max_batch_requests: 9,
            batch_concurrency: 10,
            body_timeout: 5.0, request_timeout: 6.0}}
"""

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
DEEP = {"deep-list": "[" * 1000 + "]" * 1000, "deep-mapping": "{a: " * 1000 + "1" + "}" * 1000}


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


def written(value: Any, depth: int = 0) -> str:
    """Format a document as YAML; a trailing space of a key is removed."""
    start = "\n" + "  " * depth
    if isinstance(value, dict) and value:
        return "".join(f"{start}{k.strip()}: {written(v, depth + 1)}" for k, v in value.items())
    if isinstance(value, list) and value:
        return "".join(f"{start}- {written(v, depth + 1)}" for v in value)
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}"
    return value if value in DEEP.values() else json.dumps(value)


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
        "eval.output_path eval.system_instruction eval.temperature eval.top_p loader "
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
        "base_config.values.scan_layers esurge.async_scheduling "
        "esurge.compile_runner esurge.destroy_pages_on_pause "
        "esurge.enable_prefix_caching esurge.prefer_preserve_prompt esurge.use_aot_forward "
        "eval.apply_chat_template eval.predict_only eval.print_results eval.use_tqdm "
        "mixture.cache_remote_files mixture.tokenization.add_special_tokens "
        "model.config.attention_bias sharding.fsdp_is_ep_bound sharding.sp_is_ep_bound "
        "trainer.resume_if_possible trainer.use_tensorboard"
    ),
    "upper": (
        "trainer.generation_prompts.content actions.generate.prompts.content "
        "actions.eval actions.generate actions.serve actions.to_yaml "
        "mixture.informs.format_fields.content"
    ),
    "zero": (
        "trainer.beta trainer.reward_weights trainer.mixture_coef trainer.lmbda "
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
    "text": "mixture.informs.name",
    "upper": "trainer.generation_prompts.role actions.generate.prompts.role",
    "zero": "mixture.informs.type mixture.tokenization.truncation",
}

#: Mutations that another package reports in two messages (a missing name and an extra name).
KNOWN: dict[str, str] = {
    "mapping": "model.tokenizer",
    "misspelled": "mixture.mixture_weights.texts mixture.mixture_weights.topics "
    "model.tokenizer.train",
    "upper": "mixture.mixture_weights.texts mixture.mixture_weights.topics model.tokenizer.train",
}

FILES = {path.name: path.read_text() for path in sorted(EXAMPLES.glob("*.yaml"))}
FILES["maximal"] = MAXIMAL
DOCUMENTS = {name: yaml.safe_load(text) for name, text in FILES.items()}
ALL = [case for name, document in DOCUMENTS.items() for case in cases(name, document)]


def dry_run(text: str) -> tuple[int, str]:
    Path("run.yaml").write_text(text)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = run_file("run.yaml", dry_run=True)
    return code, error.getvalue()


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
        spans = nodes.parse(case.text)
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"text": "some text"}\n')
    (tmp_path / "texts.txt").write_text("some text\n")
    shutil.copytree(EXAMPLES / "data", tmp_path / "examples" / "data")
    model = tmp_path / "runs" / "quickstart" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_the_files_themselves_are_valid(folder: Path, name: str) -> None:
    code, text = dry_run(FILES[name])
    assert code == 0, text
    assert not text or name == "maximal"  # it has keys without effect


def wrong(tried: list[Case]) -> list[str]:
    """Return every defect."""
    out = []
    for case in tried:
        name = re.sub(r"\[\d+\]", "", dotted(case.path))
        answer = complaint(case)
        lists = (VALID if answer == "accepted" else ELSEWHERE, KNOWN)
        if answer and not any(name in names.get(case.kind, "").split() for names in lists):
            out.append(f"{case.file}: {dotted(case.path)} [{case.kind}]: {answer}")
    return out


def changed(document: Any, path: ValuePath, value: Any) -> Any:
    """Return a copy of a document with one value set; missing mappings are created."""
    if not path:
        return value
    first, *rest = path
    if isinstance(document, list):
        return [changed(v, tuple(rest), value) if i == first else v for i, v in enumerate(document)]
    old = document if isinstance(document, dict) else {}
    return {**old, first: changed(old.get(first), tuple(rest), value)}


#: Broken values of `MAXIMAL`: path of the key, value, words of the error or warning.
BROKEN: list[tuple[str, Any, str]] = [
    ("model", {"name_or_path": "nope/"}, "no such directory"),
    ("loader.param_dtype", "float", "write float32 or float64"),
    ("sharding.axis_dims", [3, 7, 1, 1, 1], "needs 21 devices"),
    ("sharding.axis_dims", [3, -1, 1, 1, 1], "needs a multiple of 3 devices"),
    ("base_config.values.sharding_rules", [["(", ["tp"]]], "is not a regular expression"),
    ("sharding.partition_rules", [["(", ["tp"]]], "is not a regular expression"),
    ("base_config.values.sharding_axis_names", [{"a": 1}, "b", "c"], "should be a valid string"),
    ("mixture.pack_eos_token_id", 300, "is not in the vocabulary of 300 tokens"),
    ("mixture.cache_dir", "", "is an empty text"),
    ("mixture.informs.0.name", "", "is an empty text"),
    (
        "mixture.informs.1",
        {"type": "json", "data_files": "s3://", "name": "texts"},
        "names no bucket",
    ),
    ("mixture.save.path", "gs:///", "names no bucket"),
    ("trainer.save_directory", " ", "save_directory is empty"),
    ("trainer.run_name", "", "is an empty text"),
    ("esurge.page_size", 3, "use 2 or 4"),
    ("trainer.save_steps", None, "save_steps is not set: the run saves one checkpoint"),
    ("trainer.do_last_save", False, "the trained model is not saved: eval, generate, serve"),
    ("mixture.mixture_schedule", {"pionts": []}, "did you mean 'points'"),
    (
        "mixture.mixture_schedule",
        {"points": [{"stpe": 10, "weights": {"topics": 1, "texts": 0}}]},
        "unknown key 'stpe'; did you mean 'step'",
    ),
    (
        "mixture.mixture_schedule",
        {"points": [{"step": 10, "weights": {"topisc": 1, "texts": 0}}]},
        "there is no inform 'topisc'; did you mean 'topics'",
    ),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN)
def test_broken_value_is_refused_or_warned_about(
    folder: Path, path: str, value: Any, words: str
) -> None:
    keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    document = yaml.safe_load(MAXIMAL)
    if keys[:2] == ("base_config", "values") or keys[1:] == ("axis_dims",):
        document["sharding"].pop("axis_names", None)
        document["sharding"].pop("dcn_axis_dims", None)
    if keys[:2] == ("mixture", "mixture_schedule"):
        document["mixture"].pop("stop_strategy")
    text = written(changed(document, keys, value))
    _, answer = dry_run(text)
    places = re.findall(r"run\.yaml:(\d+):\d+: (.*)", answer)
    assert any(words in message for _, message in places), answer
    line = next(int(line) for line, message in places if words in message)
    span = nodes.parse(text).span(keys, on_key=True)
    owner = next((part for part in reversed(keys) if isinstance(part, str)), "")
    lines = text.splitlines()
    near = "\n".join(lines[max(0, line - 2) : line + 1])
    assert span is not None and (span.line <= line - 1 or owner in near), answer


@pytest.mark.nightly
@pytest.mark.parametrize("section", ["trainer", "mixture", "esurge", "eval", "loader"])
def test_typo_within_two_edits_suggests_the_key(folder: Path, section: str) -> None:
    document = yaml.safe_load(MAXIMAL)
    tried = 0
    for key in document[section]:
        if len(key) < 5:
            continue
        for typo in (key[:-1], key + "s", key[0] + key[2] + key[1] + key[3:], key[:2] + key[3:]):
            if typo == key or typo in document[section]:
                continue
            other = {typo if k == key else k: v for k, v in document[section].items()}
            code, answer = dry_run(written({**document, section: other}))
            tried += 1
            assert code == 2, (typo, answer)
            assert f"did you mean {key!r}" in answer, (typo, answer)
    assert tried > 10


@pytest.mark.nightly
def test_a_part_of_the_broken_files(folder: Path) -> None:
    assert not wrong(ALL[::PART])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(1, PART))
def test_remaining_mutated_files_raise_no_unexpected_error(folder: Path, part: int) -> None:
    assert not wrong(ALL[part::PART])
