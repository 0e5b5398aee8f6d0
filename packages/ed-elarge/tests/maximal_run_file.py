"""A run file with nearly every key, and helpers that write and check such files."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

from ed_elarge.__main__ import run_file

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
  num_scheduler_steps: 2
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
            max_background_responses: 3,
            max_file_bytes: 2048, max_files: 7, max_batches: 8, max_batch_requests: 9,
            batch_concurrency: 10,
            body_timeout: 5.0, request_timeout: 6.0}}
"""

#: Nested values, as text of YAML.
DEEP = {"deep-list": "[" * 1000 + "]" * 1000, "deep-mapping": "{a: " * 1000 + "1" + "}" * 1000}


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


def dry_run(text: str) -> tuple[int, str]:
    Path("run.yaml").write_text(text)
    error = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
        code = run_file("run.yaml", dry_run=True)
    return code, error.getvalue()
