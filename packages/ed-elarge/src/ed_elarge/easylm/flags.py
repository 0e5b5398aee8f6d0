"""The flags of EasyLM's commands: one table, and the parser that reads it.

A value without a `Flag` is the default of a flag that the command reads; its type is that of the
default. `Flag` describes a flag that this project does not need, or cannot serve.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ed_infra.errors import ConfigError, did_you_mean


class FlagValues(dict[str, Any]):
    """The flags that a command reads, with their values.

    Attributes:
        given: The flags that the command line contains.
    """

    explicit_names: frozenset[str] = frozenset()


class Flag(NamedTuple):
    """A flag that the command does not read.

    Attributes:
        default: The default of EasyLM.
        reason: Why the flag has no effect, or what to do instead.
        refused: Whether another value than the default is an error; otherwise it is a message.
    """

    default: object
    reason: str
    refused: bool = True


def _note(default: object, reason: str) -> Flag:
    return Flag(default, reason, refused=False)


_DEVICES = {
    "seed": 42,
    "mesh_dim": "1,-1,1",
    "initialize_jax_distributed": False,
}
_CHECKPOINT = {"load_llama_config": "", "load_checkpoint": ""}
_TOKENIZER = {
    "tokenizer": "",
    "tokenizer.vocab_file": "",
    "tokenizer.add_bos_token": False,
    "tokenizer.add_eos_token": Flag(False, "use text_processor.add_eos_token"),
    "tokenizer.padding_side": _note("left", "batches are padded where the task needs it"),
    "tokenizer.truncation_side": _note("right", "the limits of lengths decide"),
}
#: Fields of EasyLM's configuration of LLaMA, with EasyLM's defaults.
LLAMA_FLAGS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 0,
    "max_sequence_length": 2048,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
    "tie_word_embeddings": False,
    "attn_pdrop": 0.0,
    "resid_pdrop": Flag(0.0, "this project's LLaMA drops only attention weights: use attn_pdrop"),
    "embd_pdrop": Flag(0.0, "this project's LLaMA drops only attention weights: use attn_pdrop"),
    "remat_block": "nothing_saveable",
    "remat_attention": _note("nothing_saveable", "remat_block decides about the whole layer"),
    "remat_mlp": _note("nothing_saveable", "remat_block decides about the whole layer"),
    "scan_attention": False,
    "scan_mlp": False,
    "scan_query_chunk_size": 1024,
    "scan_key_chunk_size": 1024,
    "scan_mlp_chunk_size": 1024,
    "fcm_min_ratio": 0.0,
    "fcm_max_ratio": 0.0,
}
_POSITION = "a run continues from its own checkpoint, at the same row"
_LENGTHS = {
    "seq_length": 1024,
    "batch_size": 8,
    "always_start_with_bos": Flag(False, "each document begins with its own token"),
}
_DATASET = {
    "type": "huggingface",
    "text_processor.fields": "",
    "text_processor.fields_from_example": "",
    "text_processor.subfield_separator": " ",
    "text_processor.add_bos_token": True,
    "text_processor.add_eos_token": Flag(True, "a document always ends with a token"),
    "text_processor.prepend_text": "",
    "text_processor.base64_token_dtype": "i4",
    "huggingface_dataset.path": "c4",
    "huggingface_dataset.name": "en",
    "huggingface_dataset.split": "train",
    "huggingface_dataset.streaming": False,
    **{f"huggingface_dataset.{name}": default for name, default in _LENGTHS.items()},
    "huggingface_dataset.batch_token_dtype": _note("i4", "tokens are stored in their own dtype"),
    "json_dataset.path": "",
    **{f"json_dataset.{name}": default for name, default in _LENGTHS.items()},
    "json_dataset.start_seek_loc": Flag(0, _POSITION),
    "json_dataset.example_index_at_start": Flag(0, _POSITION),
    "json_dataset.tokens_count_at_start": Flag(0, _POSITION),
    "json_dataset.tokenizer_processes": 1,
    "json_dataset.tokenizer_parallel_batch_size": 1024,
    "json_dataset.tokenizer_parallel_chunk_size": _note(32, "the batches of the tokenizer decide"),
    "json_dataset.throughput_average_window_size": _note(200, "metrics.jsonl has each speed"),
}
_ADAPTIVE = "optimizers scaled by parameters are in a run file: trainer.optimizer: adafactor"
_OPTIMIZER = {
    "optimizer.type": "adamw",
    "optimizer.accumulate_gradient_steps": 1,
    "optimizer.adamw_optimizer.init_lr": Flag(0.0, "the warm-up begins near zero"),
    "optimizer.adamw_optimizer.lr": 0.01,
    "optimizer.adamw_optimizer.end_lr": 0.001,
    "optimizer.adamw_optimizer.lr_warmup_steps": 2000,
    "optimizer.adamw_optimizer.lr_decay_steps": 500000,
    "optimizer.adamw_optimizer.b1": 0.9,
    "optimizer.adamw_optimizer.b2": 0.95,
    "optimizer.adamw_optimizer.clip_gradient": 1.0,
    "optimizer.adamw_optimizer.weight_decay": 1e-4,
    "optimizer.adamw_optimizer.bf16_momentum": False,
    "optimizer.adamw_optimizer.multiply_by_parameter_scale": Flag(False, _ADAPTIVE),
    **{
        f"optimizer.palm_optimizer.{name}": _note(default, "the type of the optimizer is adamw")
        for name, default in (
            ("lr", 0.01),
            ("lr_warmup_steps", 10000),
            ("b1", 0.9),
            ("b2", 0.99),
            ("clip_gradient", 1.0),
            ("weight_decay", 1e-4),
            ("bf16_momentum", False),
        )
    },
}
_LOGGER = {
    "logger.online": False,
    "logger.prefix": "",
    "logger.prefix_to_id": False,
    "logger.project": "mlxu",
    "logger.output_dir": str(Path(tempfile.gettempdir(), "mlxu")),
    "logger.experiment_id": "",
    **{
        f"logger.{name}": Flag(default, f"set the environment variable {variable} for wandb")
        for name, default, variable in (
            ("entity", "", "WANDB_ENTITY"),
            ("notes", "", "WANDB_NOTES"),
            ("anonymous", "", "WANDB_ANONYMOUS"),
        )
    },
    "logger.wandb_dir": _note("", "wandb reads the environment variable WANDB_DIR"),
    "logger.random_delay": _note(0.0, "only the first process reports"),
}
_SERVER_TEXTS = (
    "prepend_to_prefix append_to_prefix prepend_to_text append_to_text chat_prepend_text "
    "chat_user_prefix chat_user_suffix chat_lm_prefix chat_lm_suffix"
)
_SERVER = {
    "lm_server.host": "127.0.0.1",
    "lm_server.port": 5007,
    "lm_server.name": "lm_server",
    "lm_server.batch_size": 1,
    "lm_server.logging": False,
    "lm_server.default_temperature": Flag(1.0, "send temperature with each request"),
    "lm_server.pre_compile": _note("loglikelihood", "the engine compiles before it answers"),
    "lm_server.greedy_until_max_length": _note(5000, "send max_tokens with each request"),
    "lm_server.notes": _note("", "the page of the server shows the model"),
    **{
        f"lm_server.{name}": Flag("", "send the whole text, or use a chat template")
        for name in _SERVER_TEXTS.split()
    },
}
_CLIENT = {
    "lm_client.url": "http://127.0.0.1:5007",
    "lm_client.batch_size": 16,
    "lm_client.wait_for_ready": True,
    "lm_client.dummy": Flag(False, "start a server of a small model"),
}
_TRAIN = {
    **_DEVICES,
    **_CHECKPOINT,
    **_TOKENIZER,
    "dtype": "fp32",
    "total_steps": 10000,
    "update_llama_config": "",
    "load_dataset_state": Flag("", _POSITION),
    "log_freq": 50,
    "save_model_freq": 0,
    "save_milestone_freq": 0,
    "eval_steps": 0,
    "eval_freq": 0,
    "log_all_worker": _note(False, "the metrics of a run are those of all processes"),
    **{f"llama.{name}": default for name, default in LLAMA_FLAGS.items()},
    "llama.base_model": "",
    **{f"train_dataset.{name}": default for name, default in _DATASET.items()},
    **{f"eval_dataset.{name}": default for name, default in _DATASET.items()},
    **_OPTIMIZER,
    "checkpointer.float_dtype": "bf16",
    "checkpointer.save_optimizer_state": _note(False, "checkpoints always contain it"),
    **_LOGGER,
}
_DIFFERENCE = {"output_file": "", "streaming": True, "float_dtype": "bf16"}

#: Command -> its flags.
EASYLM_COMMANDS: dict[str, dict[str, Any]] = {
    "llama_train": _TRAIN,
    "llama_serve": {
        **_DEVICES,
        **_CHECKPOINT,
        **_TOKENIZER,
        **_SERVER,
        "dtype": "bf16",
        "input_length": _note(1024, "a prompt may fill the context"),
        "seq_length": 2048,
        "top_k": _note(0, "send top_k with a request to /v1/completions"),
        "top_p": _note(1.0, "send top_p with a request to /v1/completions"),
        "do_sample": Flag(True, "send temperature 0 for greedy answers"),
        "num_beams": Flag(1, "send use_beam_search to /v1/completions"),
        "add_bos_token": _note(True, "the tokenizer of the model decides"),
        "loglikelihood_add_bos_token": _note(True, "a text without a prefix begins with it"),
    },
    "convert_hf_to_easylm": {
        "checkpoint_dir": "",
        "hf_model": "",
        "output_file": "",
        "model_size": _note("7b", "the directory has the configuration"),
        "streaming": True,
        "float_dtype": "",
    },
    "convert_easylm_to_hf": {
        "load_checkpoint": "",
        "tokenizer_path": "",
        "tokenizer": "",
        "model_size": "13b",
        "output_dir": "",
        "dtype": "fp16",
        "load_llama_config": "",
    },
    "convert_checkpoint": {"load_checkpoint": "", **_DIFFERENCE, "streaming": False},
    "diff_checkpoint": {
        "recover_diff": False,
        "load_base_checkpoint": "",
        "load_target_checkpoint": "",
        **_DIFFERENCE,
    },
    "benchmark_attention": {
        "seed": 42,
        "dtype": "fp32",
        "embed_dim": 2048,
        "n_heads": 16,
        "ref_attn_seq_len": 2048,
        "eff_attn_seq_len": 16384,
        "batch_size": 1,
        "query_chunk_size": 2048,
        "key_chunk_size": 2048,
        "warmup_steps": 40,
        "steps": 200,
    },
    "lm_eval_harness": {
        "tasks": "wsc,piqa,winogrande,openbookqa,logiqa",
        "shots": 0,
        "limit": 0,
        "batch_size": _note(1, "lm_client.batch_size is the size of a request"),
        **_CLIENT,
        **{
            name: Flag(flag.default if isinstance(flag, Flag) else flag, "the results are printed")
            for name, flag in _LOGGER.items()
        },
    },
    "lm_eval_json": {
        "input": "",
        "output": "",
        "input_file": "",
        "output_file": "",
        "eval_type": "loglikelihood",
        **_CLIENT,
    },
}


def parse_flags(command: str, arguments: Sequence[str]) -> FlagValues:
    """Read the flags of a command: `--name=value`, `--name value`, `--switch`, `--noswitch`.

    Returns:
        Each flag that the command reads, with its value.

    Raises:
        ConfigError: A flag is unknown, its value has another type, or it cannot be served.
    """
    table = EASYLM_COMMANDS[command]
    parser = argparse.ArgumentParser(prog=command, allow_abbrev=False)
    for name, entry in table.items():
        default = entry.default if isinstance(entry, Flag) else entry
        text = f"{entry.reason}. " if isinstance(entry, Flag) else ""
        options: dict[str, Any] = {"dest": name, "default": None, "type": str, "metavar": "VALUE"}
        if isinstance(default, bool):
            options |= {"nargs": "?", "const": "true"}
            hidden: dict[str, Any] = {
                "action": "store_const",
                "const": "false",
                "help": argparse.SUPPRESS,
            }
            parser.add_argument(f"--no{name}", dest=name, **hidden)
        default_text = str(default).replace("%", "%%")
        parser.add_argument(f"--{name}", help=f"{text}Default: {default_text!r}", **options)
    namespace, extra_arguments = parser.parse_known_args(list(arguments))
    if extra_arguments:
        words = [word for word in extra_arguments if word.startswith("-")] or extra_arguments
        name = words[0].lstrip("-").partition("=")[0]
        raise ConfigError(
            f"unknown flag --{name}{did_you_mean(name, table)}: --help lists the flags"
        )
    values = FlagValues()
    values.explicit_names = frozenset(
        name for name, text in vars(namespace).items() if text is not None
    )
    for name, text in vars(namespace).items():
        entry = table[name]
        default = entry.default if isinstance(entry, Flag) else entry
        value = default if text is None else _convert(name, text, default)
        if not isinstance(entry, Flag):
            values[name] = value
        elif value != default and entry.refused:
            raise ConfigError(f"--{name}={text}: only {default!r} is possible here; {entry.reason}")
        elif text is not None and value != default:
            print(f"--{name} has no effect: {entry.reason}", file=sys.stderr)
    return values


def _convert(name: str, text: str, default: Any) -> Any:
    """Return the value of a text, in the type of the default."""
    if isinstance(default, bool):
        words = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
        if text.lower() in words:
            return words[text.lower()]
        raise ConfigError(f"--{name}={text} must be true or false")
    try:
        return type(default)(text)
    except ValueError:
        noun = "an integer" if isinstance(default, int) else "a number"
        raise ConfigError(f"--{name}={text} must be {noun}") from None


def need(flags: Mapping[str, Any], *names: str) -> None:
    """Check that flags have a value.

    Raises:
        ConfigError: One is empty.
    """
    for name in names:
        if not flags[name]:
            raise ConfigError(f"--{name} is missing: add --{name}=VALUE")
