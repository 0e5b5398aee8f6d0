"""`python -m EasyLM.models.llama.llama_train`: EasyLM's flags as a run file, and its execution."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.easylm import checkpoints, llama
from ed_elarge.easylm.flags import FlagValues, need
from ed_elarge.easylm.rows import TextFields, parse_fields

#: Folder in the directory of a run with the model of `load_checkpoint`.
LOADED = "loaded-model"


def parse_mesh(text: str) -> list[int]:
    """Return `sharding.axis_dims` of `dp,fsdp,mp`, or of `dp:1,fsdp:-1,mp:1`.

    Raises:
        ConfigError: The text has other axes.
    """
    dims = {"dp": 1, "fsdp": 1, "mp": 1}
    parts = text.lstrip("!").replace(" ", "").split(",")
    names = [part.partition(":")[0] for part in parts] if ":" in text else list(dims)
    try:
        numbers = [int(part.rpartition(":")[2]) for part in parts]
        if len(numbers) != 3 or sorted(names) != sorted(dims):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--mesh_dim={text} must be three numbers of devices: dp,fsdp,mp, such as 1,-1,1"
        ) from None
    dims.update(zip(names, numbers, strict=True))
    return [dims["dp"], dims["fsdp"], 1, dims["mp"], 1]


def get_tokenizer_name(flags: FlagValues) -> str | None:
    """Return the directory or the name of the tokenizer; a file means its folder."""
    name = flags["tokenizer"] or flags["tokenizer.vocab_file"]
    if not name:
        return None
    return str(Path(name).parent) if Path(name).is_file() else name


def build_inform(flags: FlagValues, prefix: str, tokenizer: str) -> dict[str, Any]:
    """Return the inform of `train_dataset` or `eval_dataset`.

    Raises:
        ConfigError: The type is unknown, or the fields are missing.
    """
    kinds = ("json", "huggingface")
    kind = flags[f"{prefix}.type"]
    if kind not in kinds:
        raise unknown_name(f"{prefix}.type", kind, kinds)
    source = f"{prefix}.{kind}_dataset"
    need(flags, f"{source}.path")
    out: dict[str, Any] = {"type": kind, "data_files": flags[f"{source}.path"], "name": prefix}
    if kind == "huggingface":
        out["split"] = flags[f"{source}.split"] or "train"
        if flags[f"{source}.name"] and not Path(out["data_files"]).exists():
            out["dataset_split_name"] = flags[f"{source}.name"]
    text = f"{prefix}.text_processor"
    fields, row_function = flags[f"{text}.fields"], flags[f"{text}.fields_from_example"]
    if bool(fields) == bool(row_function):
        raise ConfigError(
            f"--{text}.fields names the fields of a row, such as '[prompt],completion'; set it, or "
            f"--{text}.fields_from_example, but not both"
        )
    parts = parse_fields(fields) if fields else []
    if len(parts) == 1 and parts[0].text.isidentifier() and not flags[f"{text}.prepend_text"]:
        return {**out, "content_field": parts[0].text}
    if not flags[f"{text}.add_bos_token"] and all(part.has_loss for part in parts):
        raise ConfigError(
            f"--{text}.fields={fields or row_function} without a part in brackets needs "
            f"--{text}.add_bos_token=True: the first token has no loss"
        )
    to_row = TextFields(
        fields=fields,
        fields_from_example=row_function,
        separator=flags[f"{text}.subfield_separator"],
        prepend_text=flags[f"{text}.prepend_text"],
        token_dtype=flags[f"{text}.base64_token_dtype"],
        add_bos_token=flags[f"{text}.add_bos_token"],
        add_special_tokens=flags["tokenizer.add_bos_token"],
        tokenizer=tokenizer,
    )
    return {**out, "format_callback": to_row}


def build_mixture_section(flags: FlagValues, tokenizer: str) -> dict[str, Any]:
    """Return the section `mixture`: documents in the order of the file, cut at any token."""
    kind = flags["train_dataset.type"]
    source = f"train_dataset.{kind}_dataset"
    out: dict[str, Any] = {
        "informs": [build_inform(flags, "train_dataset", tokenizer)],
        "seed": flags["seed"],
        "shuffle_buffer_size": 0,
        "pack_tokens": True,
        "pack_strategy": "wrapped",
        "pack_shuffle": False,
        "pack_seq_length": flags[f"{source}.seq_length"],
        "tokenization": {"add_special_tokens": flags["train_dataset.text_processor.add_bos_token"]},
    }
    if kind == "json":
        out["tokenization"]["batch_size"] = flags[f"{source}.tokenizer_parallel_batch_size"]
        if flags[f"{source}.tokenizer_processes"] > 1:
            out["tokenization"]["num_proc"] = flags[f"{source}.tokenizer_processes"]
    elif flags[f"{source}.streaming"]:
        out["streaming"] = True
    if flags["eval_steps"]:
        inform = build_inform(flags, "eval_dataset", tokenizer)
        rows = flags[f"eval_dataset.{flags['eval_dataset.type']}_dataset.batch_size"]
        out["eval_informs"] = [{**inform, "num_rows": rows * flags["eval_steps"]}]
    return out


def build_trainer_section(flags: FlagValues) -> dict[str, Any]:
    """Return the section `trainer`: EasyLM's steps are microbatches, as those of optax.

    Raises:
        ConfigError: The optimizer is unknown.
    """
    if flags["optimizer.type"] != "adamw":
        raise ConfigError(
            f"--optimizer.type={flags['optimizer.type']}: EasyLM's adamw is available here; for "
            "other optimizers write a run file with trainer.optimizer"
        )
    kind = f"train_dataset.{flags['train_dataset.type']}_dataset"
    parts = flags["optimizer.accumulate_gradient_steps"]
    adamw = {
        name.rpartition(".")[2]: value
        for name, value in flags.items()
        if name.startswith("optimizer.adamw_optimizer.")
    }

    def updates(steps: int) -> int:
        return max(math.ceil(steps / parts), 1)

    out: dict[str, Any] = {
        "trainer_type": "sft",
        "seed": flags["seed"],
        "total_batch_size": flags[f"{kind}.batch_size"] * parts,
        "gradient_accumulation_steps": parts,
        "max_training_steps": updates(flags["total_steps"]),
        "learning_rate": adamw["lr"],
        "learning_rate_end": adamw["end_lr"],
        "scheduler": "cosine",
        "scheduler_kwargs": {"decay_steps": adamw["lr_decay_steps"]},
        "warmup_steps": adamw["lr_warmup_steps"],
        "optimizer": "adamw",
        "optimizer_kwargs": {"b1": adamw["b1"], "b2": adamw["b2"]},
        "clip_grad": adamw["clip_gradient"] or None,
        "weight_decay_rules": [[".*", adamw["weight_decay"]]],
        "log_steps": updates(flags["log_freq"]),
        "save_directory": get_directory(flags),
        "project": "--".join(filter(None, (flags["logger.prefix"], flags["logger.project"]))),
    }
    if adamw["bf16_momentum"]:
        out["tx_mu_dtype"] = "bfloat16"
    if flags["logger.online"]:
        out["report_to"] = "wandb"
    if flags["logger.experiment_id"]:
        out["run_name"] = flags["logger.experiment_id"]
    intervals = [flags["save_model_freq"], flags["save_milestone_freq"]]
    if any(intervals):
        out["save_steps"] = updates(math.gcd(*intervals))
    if not flags["save_milestone_freq"]:
        out["save_total_limit"] = 1  # EasyLM overwrites its checkpoint
    if flags["eval_steps"]:
        out["evaluation_steps"] = updates(flags["eval_freq"] or flags["log_freq"])
    return out


def get_directory(flags: FlagValues) -> str:
    """Return the directory of the run: `output_dir`, and the identifier of the experiment."""
    name = flags["logger.experiment_id"]
    if name and flags["logger.prefix_to_id"]:
        name = f"{flags['logger.prefix']}--{name}"
    return str(Path(flags["logger.output_dir"], name))


def _get_model(flags: FlagValues, directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the section `model`, and the values of `base_config`.

    A checkpoint is converted into `directory`, from its present contents.

    Raises:
        ConfigError: The flags describe no model, or no tokenizer.
    """
    fields, tokenizer = llama.read_fields(flags), get_tokenizer_name(flags)
    values = llama.execution(fields or {})
    if not flags["load_checkpoint"]:
        if tokenizer is None:
            raise ConfigError("--tokenizer.vocab_file is missing: name the tokenizer's folder")
        config = llama.get_llama_fields(fields or {})
        from ed_models.checkpoints.tokenizers import load_tokenizer

        loaded = load_tokenizer(tokenizer)
        config["vocab_size"] = max(config["vocab_size"], len(loaded))
        for name in ("bos_token_id", "eos_token_id"):
            config[name] = getattr(loaded, name)
        return {"config": config, "tokenizer": tokenizer}, values
    section, values = load_model(flags, directory), values
    if tokenizer is not None:
        section["tokenizer"] = tokenizer
    return section, values


def load_model(flags: FlagValues, directory: Path) -> dict[str, Any]:
    """Convert the model of `load_checkpoint` into `directory`, and return its section.

    Raises:
        ConfigError: A directory in Hugging Face layout comes with a configuration.
    """
    fields = llama.read_fields(flags)
    kind, path = checkpoints.parse_address(flags["load_checkpoint"])
    source = Path(path)
    if not source.is_file() and not (source / "arrays").is_dir():
        if flags["load_llama_config"]:
            raise ConfigError(
                f"{path} has its own config.json: omit --load_llama_config for a directory in "
                "Hugging Face layout"
            )
        return {"name_or_path": path}
    with tempfile.TemporaryDirectory(prefix="easylm-") as folder:
        config: str | Path | None = None
        if fields is not None and source.is_file():
            config = checkpoints.write_config(Path(folder), llama.get_llama_fields(fields))
        if directory.exists():
            shutil.rmtree(directory)
        tokenizer = checkpoints.convert_to_model(kind, source, directory, config)
    section = {"name_or_path": str(directory)}
    if tokenizer is not None and tokenizer.is_dir():
        section["tokenizer"] = str(tokenizer)
    return section


def build_run_file(flags: FlagValues, directory: Path) -> dict[str, Any]:
    """Return the run file of the flags."""
    model, values = _get_model(flags, directory / LOADED)
    return {
        "model": model,
        "loader": {"dtype": flags["dtype"], "param_dtype": "fp32"},
        "sharding": {"axis_dims": parse_mesh(flags["mesh_dim"])},
        "base_config": {"values": values},
        "mixture": build_mixture_section(flags, model.get("tokenizer") or model["name_or_path"]),
        "trainer": build_trainer_section(flags),
        "actions": ["train"],
    }


def train_llama(flags: FlagValues) -> int:
    """Train, and write the trained model as `streaming_params` next to the checkpoints."""
    import sys

    import jax
    from ed_infra import distributed
    from ed_trainers.easylm import to_easylm

    from ed_elarge.actions.execution import execute
    from ed_elarge.config.normalize import normalize
    from ed_elarge.errors import Document

    if flags["initialize_jax_distributed"]:
        distributed.initialize()
    directory = Path(get_directory(flags))
    run = normalize(Document("llama_train", value=build_run_file(flags, directory)))
    for warning in run.warning_texts():
        print(f"warning: {warning}", file=sys.stderr)
    code = execute(run).code
    if code == 0 and jax.process_index() == 0:
        stream = to_easylm(directory / "model", directory / "streaming_params")
        checkpoints.cast_file(stream, flags["checkpointer.float_dtype"])
        print(f"wrote {stream}")
    return code
