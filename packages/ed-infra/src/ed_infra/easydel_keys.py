"""Keys of EasyDeL's run files and argument classes that are no keys here under their names.

One table has all of them. `ed_infra.easydel_translation` applies it at the border: to run files,
and to the options of trainers. The page docs/migrate/easydel.md shows it. A key with the same name
and meaning is no entry: the option classes define these keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal, NamedTuple

#: `works`: the key has its effect. `unneeded`: it names a mechanism that this project does not
#: need. `refused`: it would change the result, so it is an error unless its value changes nothing.
KeyKind = Literal["works", "unneeded", "refused"]


class OtherKey(NamedTuple):
    """A key of EasyDeL.

    Attributes:
        section: The section of a run file.
        name: The key; dots separate the keys of inner mappings.
        kind: What happens to the key.
        text: Its place here, why it is not needed, or what to write instead.
        target: Path of the key here, from the sections; empty if a rule decides.
        methods: Methods to which the entry applies; empty: all methods.
        harmless: Values without any effect, in addition to null.
    """

    section: str
    name: str
    kind: KeyKind
    text: str
    target: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    harmless: tuple[object, ...] = ()


def _list_moved(section: str, pairs: dict[str, str], *methods: str) -> Iterator[OtherKey]:
    """Yield keys with another place: key -> its dotted path, or a text if a rule translates it."""
    for name, place in pairs.items():
        target = () if " " in place else tuple(place.split("."))
        yield OtherKey(section, name, "works", place, target, methods)


def _list_unneeded(section: str, reasons: dict[str, str]) -> Iterator[OtherKey]:
    """Yield keys that are not needed: reason -> keys."""
    for reason, names in reasons.items():
        for name in names.split():
            yield OtherKey(section, name, "unneeded", reason)


def _list_refused(
    section: str, instead: dict[str, str], *harmless: object, methods: tuple[str, ...] = ()
) -> Iterator[OtherKey]:
    """Yield keys that would change the result: what to write instead -> keys."""
    for text, names in instead.items():
        for name in names.split():
            yield OtherKey(section, name, "refused", text, (), methods, harmless)


_FUNCTION = "omit it: a run file contains no functions"
_ENGINE = (
    *("hbm_utilization", "max_num_seqs", "max_num_seq_buckets", "min_input_pad", "page_size"),
    *("silent_mode", "max_num_batched_tokens", "enable_prefix_caching", "data_parallelism_axis"),
)
_CHUNKS = "losses choose the number of tokens whose logits exist at the same time"
_SAMPLES = "omit it: completions are samples of the model's distribution"
_STE = "quantization: {model: {quantization_method: int4, simulate: true}}"
_LOADER = "the loader of the mixture reads the rows"
_PREVIEWS = "previews are printed, and written to the metrics, the report and the trackers"


def _trainer() -> Iterator[OtherKey]:
    yield from _list_moved(
        "trainer",
        {
            **{f"esurge_{name}": f"training_engine.{name}" for name in _ENGINE},
            "backend": "platform.backend",
            "dataset_num_proc": "mixture.tokenization.num_proc",
            "dataset_batch_size": "mixture.tokenization.batch_size",
            "dataloader_num_workers": "mixture.prefetch_workers, at least 1",
            "add_special_tokens": "mixture.tokenization.add_special_tokens",
            "assistant_only_loss": "mixture.tokenization.assistant_only_loss",
            "packing": "mixture.pack_tokens",
            "packing_strategy": "mixture.pack_strategy",
            "dataset_text_field": "content_field of each entry of mixture.informs without one",
            "loss_config.label_smoothing": "trainer.label_smoothing_factor",
            "loss_config.z_loss": "trainer.z_loss_coefficient",
            "model_name": "the last folder of trainer.save_directory",
            "shuffle_seed_train": "mixture.seed",
            "shuffle_train_dataset": "mixture.shuffle_buffer_size: 1 for false",
            "benchmarks.tasks": "trainer.benchmarks",
            "benchmarks.*": "trainer.benchmark_options, the keys of eval",
            "use_wandb": "trainer.report_to: wandb",
            "wandb_entity": "trainer.tracker_entity",
            "wandb_name": "trainer.run_name",
        },
    )
    yield from _list_moved(
        "trainer", {"max_len_mask": "trainer.mask_truncated_completions"}, "rlvr"
    )
    distilled = ("distillation", "on_policy_distillation", "sparse_distillation")
    yield from _list_moved(
        "trainer", {"completion_only_loss": "mixture.tokenization.assistant_only_loss"}, *distilled
    )
    yield from _list_moved(
        "trainer",
        {"temperature_sampling": "trainer.temperature, if both temperatures are equal"},
        *distilled[1:],
    )
    for name in ("max_prompt_length", "max_completion_length"):
        text = "max_length limits a prompt with its answer"
        pairs = ("dpo", "orpo", "cpo", "kto", "bco", "reward")
        yield OtherKey("trainer", name, "unneeded", text, (), pairs)
    yield from _list_unneeded(
        "trainer",
        {
            "states are always sharded over the mesh": "auto_shard_states low_mem_usage",
            "every step is one compiled program": "performance_mode generation_shard_inputs",
            _LOADER: "use_grain grain_shard_count grain_shard_index dataloader_pin_memory "
            "use_data_collator offload_dataset offload_device_type offload_device_index "
            "num_of_sequences",
            "methods read the columns that they need": "remove_unused_columns "
            "ids_to_pop_from_dataset",
            "batches are split over the axes dp, fsdp and sp": "step_partition_spec",
            "each process has its part of the run, and the first process writes the files": ""
            "process_zero_is_admin log_all_workers",
            "metrics are always written to save_directory": "report_metrics verbose track_memory "
            "metrics_to_show_in_rich_pbar",
            "checkpoints always contain the optimizer, and stay": "save_optimizer_state "
            "remove_ckpt_after_load",
            "SIGTERM always saves a checkpoint": "save_tpu_preemption_checkpoints "
            "merge_lora_before_tpu_preemption_save",
            "config.json of the model states it": "is_encoder_decoder model_parameters",
            "a run starts with a new optimizer, or continues": "init_tx is_fine_tuning",
            "the mixture of a run determines whether it evaluates": "do_eval",
            "mixture.pack_tokens also packs held-out texts": "eval_packing",
            "project and run_name name a run": "trainer_prefix",
            "padding never enters a loss": "label_pad_token_id padding_value",
            _CHUNKS: "completion_chunk_size logits_chunk_size logprob_vocab_chunk_size "
            "ref_logps_chunk_size",
            _PREVIEWS: "generate_during_eval log_training_generations_to_wandb "
            "use_esurge_generation",
            "tasks name their metrics": "benchmarks.name",
            "progress is one bar for each run": "esurge_use_tqdm esurge_runner_verbose",
            "pruning is off": "sparse_module_type",
            "EasyDeL reads no difficulty of a row either, so its loss has no weights": ""
            "difficulty_key difficulty_loss_weight",
            "bco has no classifier of prompts": "prompt_sample_size min_density_ratio "
            "max_density_ratio",
        },
    )
    yield from _list_refused(
        "trainer",
        {
            "trainer.scheduler and trainer.scheduler_kwargs": "custom_scheduler",
            _STE: "tensor_straight_through straight_through_emulator",
            "`elarge launch`, which starts the processes": "jax_distributed_config",
            "omit it: training does not prune weights": "pruning_module",
            "omit it: models are called without further arguments": ""
            "state_apply_fn_kwarguments_to_model",
            "the keys of the section mixture": "dataset_kwargs",
            "the sections model and loader": "model_init_kwargs ref_model_init_kwargs",
            "the field chat_template_kwargs of a row": "chat_template_kwargs",
            "trainer.temperature, top_p, top_k and min_p": "generation_kwargs",
            "omit it: dpo has no term of the chosen answers; use orpo or cpo": "rpo_alpha",
            "the options generation_* of the section trainer": "generation_extra_kwargs "
            "generation_config_overrides",
        },
    )
    yield from _list_refused(
        "trainer", {"the argument watchers of a trainer in Python, with LogWatcher": "watchers"}, []
    )
    text = "format_fields of an entry of mixture.informs: {FIELD: prompt}"
    yield from _list_refused("trainer", {text: "generation_dataset_prompt_field"}, "prompt")
    yield from _list_refused(
        "trainer",
        {
            "base_config: {values: {output_router_logits: true}}": "aux_loss_enabled",
            "omit it: training keeps all weights": "sparsify_module",
            "omit it: reference_free reads no reference": "force_use_ref_model",
            "omit it: attention weights have the sum 1": "attention_normalize",
            "trainer_type: seq_kd, in which the teacher answers": "generate_with_teacher",
            "omit it: prompts of messages always get the chat template": "skip_apply_chat_template",
        },
        False,
    )
    yield from _list_refused(
        "trainer",
        {
            "the list of actions without train": "do_train",
            "rows with a prompt and a completion: only the completion is learned": ""
            "train_on_inputs",
            "omit it: embeddings always have the length 1": "normalize_embeddings",
        },
        True,
    )
    yield from _list_refused("trainer", {_SAMPLES: "presence_penalty frequency_penalty"}, 0)
    yield from _list_refused("trainer", {_SAMPLES: "repetition_penalty"}, 1)
    yield from _list_refused(
        "trainer",
        {
            "trainer.max_completion_length": "max_loss_completion_tokens",
        },
        0,
    )
    ppo = ("ppo",)
    whole = "omit it: ppo trains on all completions, and missing_eos_penalty marks the others"
    yield from _list_refused("trainer", {whole: "mask_truncated_completions"}, False, methods=ppo)
    yield from _list_refused(
        "trainer",
        {"a function in trainer.reward_functions that runs the tests": "test_key"},
        "tests",
    )
    yield from _list_refused(
        "trainer", {"omit it: prompts keep their last tokens": "truncation_mode"}, "keep_end"
    )
    yield from _list_refused(
        "trainer", {"omit it: the distance is squared": "hidden_state_loss"}, "mse"
    )
    yield from _list_refused(
        "trainer",
        {"omit it: each prompt has one completion": "num_generations_per_prompt"},
        1,
    )
    yield from _list_refused(
        "trainer",
        {"omit it: the teacher answers with its most probable tokens": "temperature_sampling"},
        0,
        methods=("seq_kd",),
    )
    yield from _list_refused(
        "trainer",
        {"omit it: the loss of embeddings has no margin": "margin"},
        0.2,
    )
    for name in ("query", "positive", "negative"):
        text = f"format_fields of an entry of mixture.informs: {{FIELD: {name}}}"
        yield from _list_refused("trainer", {text: f"{name}_field"}, name)
    yield from _list_refused("trainer", {"the pooling of the model's folder": "pooling_strategy"})
    yield from _list_moved(
        "trainer",
        {"max_feedback_length": "trainer.max_reprompt_len, with max_prompt_length added"},
        "sdpo",
    )
    yield from _list_moved(
        "trainer",
        {"distillation_type": "trainer.distillation_mode and trainer.distillation_alpha"},
        "sdpo",
    )
    verified = "an entry of trainer.reward_functions with its trainer.reward_weights"
    yield from _list_moved(
        "trainer",
        {
            "answer_key": verified,
            "format_pattern": verified,
            "format_reward_weight": verified,
            "length_penalty_target": verified,
            "length_penalty_weight": verified,
        },
        "rlvr",
    )
    yield from _losses()


def _losses() -> Iterator[OtherKey]:
    """Yield the keys of `trainer.loss_config` that are no options of a trainer."""
    yield from _list_unneeded(
        "trainer",
        {
            _CHUNKS: "loss_config.chunk_vocab_size loss_config.chunk_token_size "
            "loss_config.chunk_block_size",
            "losses are computed in float32": "loss_config.compute_dtype",
        },
    )
    labels = "the number of labels in config.json, and trainer_type: sequence_classification"
    yield from _list_refused(
        "trainer",
        {
            labels: "loss_config.num_labels loss_config.problem_type "
            "loss_config.num_classification_labels loss_config.classification_problem_type"
        },
    )
    mean = "omit it: the loss is the mean over the learned tokens"
    yield from _list_refused("trainer", {mean: "loss_config.reduction"}, "mean")
    yield from _list_refused("trainer", {mean: "loss_config.divide_weight_sum"}, False)
    yield from _list_refused(
        "trainer",
        {mean: "loss_config.loss_normalizing_factor"},
        "NO_WEIGHT_NUM_REAL_TARGET_TOKENS",
    )
    yield from _list_refused(
        "trainer", {"omit it: the label -100 is ignored": "loss_config.ignore_index"}, -100
    )
    yield from _list_refused(
        "trainer",
        {"omit it: causal models predict the next token": "loss_config.shift_tokens"},
        True,
    )
    yield from _list_refused(
        "trainer", {"trainer.skip_bad_steps: true": "loss_config.break_on_nan"}, True
    )


def _sections() -> Iterator[OtherKey]:
    for role in ("reference_model", "reward_model", "teacher_model"):
        yield from _list_moved(
            role,
            {
                "extra_kwargs.revision": f"{role}.revision",
                "task": "omit it, if it is the task of the section",
                "tokenizer": "omit it, if it is the tokenizer of the folder",
            },
        )
        yield from _list_unneeded(
            role, {"tokenizers never run code": "extra_kwargs.trust_remote_code"}
        )
        yield from _list_refused(
            role, {"a model whose config.json has one label": "extra_kwargs.num_labels"}, 1
        )
    labels = "base_config.values.num_labels, or 1 for reward"
    yield from _list_moved("model", {"num_labels": labels, "extra_kwargs.num_labels": labels})
    yield from _list_moved("loader", {"device": "platform.backend, without a number of a device"})
    yield from _list_refused("sharding", {"sharding.partition_rules": "shard_fns"})
    yield from _list_moved(
        "quantization",
        {"model.bits": "quantization.model.quantization_method, with this number of bits"},
    )
    yield from _list_unneeded(
        "quantization",
        {
            "XLA computes the products of quantized weights": "use_qmm_best_config "
            "qmm_platform_override qmm_tpu_path_override model.jax_native model.runtime_dtype "
            "kv_cache.jax_native kv_cache.runtime_dtype"
        },
    )
    cache = "quantization.kv_cache.quantization_method: int8 or fp8, which has 8 bits"
    yield from _list_refused("quantization", {cache: "kv_cache.bits"}, 8)
    everywhere = "omit it: the cache of every layer is quantized"
    yield from _list_refused(
        "quantization", {everywhere: "kv_cache.pattern kv_cache.simulate"}, False
    )


def _mixture() -> Iterator[OtherKey]:
    yield from _list_moved(
        "mixture",
        {
            "num_workers": "mixture.prefetch_workers, at least 1",
            "prefetch_size": "mixture.prefetch_buffer_size",
            "tokenization.text_field": "content_field of each entry of mixture.informs without one",
        },
    )
    yield from _list_unneeded(
        "mixture",
        {
            _LOADER: "use_fast_loader use_sharded_source tokenization.batched "
            "tokenization.keep_in_memory tokenization.remove_columns",
            "tokens are cached in mixture.cache_dir": "enable_caching",
            "the field of tokens is mixture.tokenization.output_field": "tokens_field_name",
        },
    )
    yield from _list_refused(
        "mixture",
        {
            "the environment variables of the store": "dask_storage_options",
            "preprocessing_fn of an entry of mixture.informs": "tokenize_callback",
            "the environment variable HF_TOKEN": "save.hub_token",
        },
    )


def _esurge() -> Iterator[OtherKey]:
    for name, place in (("tool_parser", "tool_parser_name"), ("reasoning_parser",) * 2):
        text = f"{place} of the action serve"
        yield OtherKey("esurge", name, "works", text, ("serve", place))
    yield from _list_moved("esurge", {"verbose": "esurge.silent_mode: false, if it is true"})
    yield from _list_unneeded(
        "esurge",
        {
            "the engine runs on the mesh of the section sharding": "auto_shard_model "
            "sharding_axis_dims",
            "the engine chooses its programs": "bind_graphstate_for_aot min_token_pad "
            "enable_window_aware_runtime_cap",
            "the metrics of the server and its dashboard show it": "runner_verbose sampler_metrics",
            "the process of the engine has the tokenizer": "worker_startup_timeout "
            "detokenizer_max_states",
            "the answer to a truncated prompt contains a note": "decode_truncated_prompt",
            "an idle engine keeps its state": "idle_reset_seconds idle_reset_min_interval",
            "served_model_name of the action serve names a model": "esurge_name",
        },
    )
    options = "role service_name world_size rank control_port control_bind_host advertise_addr"
    options += " auth_token step_timeout_s connect_timeout_s verify_sampling_digest"
    yield from _list_unneeded(
        "esurge",
        {
            "`elarge launch` starts an engine on several hosts": " ".join(
                f"distributed_{name}" for name in options.split()
            )
        },
    )
    yield from _list_refused(
        "esurge",
        {
            "`elarge launch` with the same file on each host": "distributed_mode",
            "omit it: stop strings also end a reasoning": "ignore_stop_strings_in_reasoning",
        },
        False,
    )
    yield from _list_refused("esurge", {_FUNCTION: "sampling_params_callback"})


def _eval() -> Iterator[OtherKey]:
    yield from _list_moved(
        "eval", {"hard_max_new_tokens": "eval.gen_kwargs: {max_gen_toks: ...}, if it is true"}
    )
    yield from _list_unneeded(
        "eval",
        {
            "requests are batched by the engine": "max_batch_size",
            "the platform of the run evaluates": "device",
            "lm-evaluation-harness logs warnings and errors": "verbosity",
            "evaluations use no random numbers of torch": "torch_random_seed",
            "tasks of lm-evaluation-harness are always known": "include_defaults",
            "results are written to output_path": "evaluation_tracker",
            "code runs in one process": "code_eval_num_workers",
        },
    )
    thinking = "a chat template that sets the values"
    yield from _list_refused(
        "eval",
        {
            thinking: "chat_template_args enable_thinking",
            "omit it: a task defines its filters": "think_end_token think_start_token "
            "math_answer_task_hints",
            "eval.gen_kwargs": "sampling_params",
            "eval.cache_requests": "use_cache",
            "eval.include_path": "task_manager",
            "eval.limit": "samples",
            "omit it: tasks get no further values": "metadata",
            "omit it: the time of lm-evaluation-harness is used": "code_eval_timeout",
        },
    )
    yield from _list_refused(
        "eval",
        {
            "omit it: a task defines its filters": "normalize_math_answers",
            "omit it: a task defines the end of answers": "ignore_benchmark_eos_flags",
            "eval.cache_requests, after deleting the cache of lm-evaluation-harness": ""
            "rewrite_requests_cache delete_requests_cache",
        },
        False,
    )


#: (section, key) -> the key of which it is a second name. Both may occur with equal values.
SECOND_NAMES = {("trainer", "num_generations"): "num_return_sequences"}

#: (section, key) -> names of the key that it needs, values of that key with which EasyDeL does not
#: use it, and the reason. The key is dropped then, if the sections have other keys of EasyDeL.
IDLE_KEYS: dict[tuple[str, str], tuple[tuple[str, ...], tuple[object, ...], str]] = {
    ("trainer", "learning_rate_end"): (
        ("scheduler", "lr_scheduler_type", "lr_scheduler"),
        (None, "none"),
        "without a scheduler the learning rate is constant",
    )
}

#: (section, key) -> value that is an error -> what to write instead.
OTHER_VALUES = {
    ("trainer", "trainer_type"): {
        "agentic_moshpit": "grpo, with the class of an environment as trainer.environment",
        "ray_distributed": "`elarge launch`, which starts the processes",
    }
}

#: Other names of sections.
SECTION_NAMES = {"teacher": "teacher_model"}

#: Keys of the action serve: key -> the only value, which changes nothing.
SERVE_VALUES: dict[str, object] = {"workers": 1, "reload": False}

#: (section, key) -> other spelling of its value -> the value here.
VALUE_NAMES: dict[tuple[str, str], dict[str, str]] = {
    ("model", "task"): {"seq-cls": "sequence-classification"},
    ("esurge", "tool_parser"): {"glm-4.5": "glm45", "glm-4.7": "glm47", "step3.5": "step3p5"},
    ("esurge", "reasoning_parser"): {
        "qwen3_reasoning": "qwen3",
        "deepseek-r1": "deepseek_r1",
        "gptoss": "openai_gptoss",
        "holo2": "deepseek_v3",
        "step3.5": "step3p5",
        "identity": "none",
        "passthrough": "none",
    },
    ("loader", "precision"): {
        "fastest": "default",
        "bfloat16": "default",
        "tensorfloat32": "high",
        "bfloat16_3x": "high",
        "float32": "highest",
        **{name.upper(): name for name in ("default", "high", "highest")},
    },
}


@cache
def easydel_keys() -> dict[tuple[str, str], tuple[OtherKey, ...]]:
    """Return (section, key) -> its entries, which differ in their methods."""
    out: dict[tuple[str, str], tuple[OtherKey, ...]] = {}
    for entry in (*_trainer(), *_sections(), *_mixture(), *_esurge(), *_eval()):
        at = (entry.section, entry.name)
        out[at] = (*out.get(at, ()), entry)
    return out


def texts_of_section(section: str) -> dict[str, str]:
    """Return the outermost keys of a section with what to use instead, for messages."""
    out: dict[str, str] = {}
    for (of, name), entries in easydel_keys().items():
        if of == section and "." not in name:
            entry = entries[0]
            out[name] = f"omit it: {entry.text}" if entry.kind == "unneeded" else entry.text
    return out


def is_data_key(name: str) -> bool:
    """Whether a key of `trainer` describes rows or the engine of rollouts, not the training."""
    return any(
        entry.kind == "works"
        and ("mixture." in entry.text or entry.text.startswith("training_engine."))
        for entry in easydel_keys().get(("trainer", name), ())
    )
