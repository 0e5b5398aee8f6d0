"""Commands for checkpoints: `convert`, `merge`, `quantize` and `compare`."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from ed_esurge.command.program import Result, show_result

Dtype = Annotated[
    str, typer.Option(help="Dtype of the weights: auto, float32, bfloat16 or float16.")
]


def convert(
    source: Annotated[
        str, typer.Argument(help="Checkpoint, saved state, model, GGUF file or stream.")
    ],
    target: Annotated[str, typer.Argument(help="Directory, stream or .gguf file to write.")],
    config: Annotated[
        str | None,
        typer.Option(
            help="For a stream, or a folder of MaxText or tunix: the model's folder or name."
        ),
    ] = None,
    easylm: Annotated[bool, typer.Option("--easylm", help="The same as --to easylm.")] = False,
    to: Annotated[
        str | None,
        typer.Option(help="Layout to write: easydel or maxtext (a folder), or easylm (a stream)."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Matrices of a .gguf file: f32, f16, bf16, q8_0 or q4_0."),
    ] = None,
    scan_layers: Annotated[
        bool, typer.Option(help="Of a folder of MaxText: stack the layers (its scan_layers).")
    ] = True,
) -> Result:
    """Convert a checkpoint of a run to a model in Hugging Face layout, or the reverse.

    A GGUF file of llama.cpp is read, and written if the target ends with `.gguf`. A stream of
    EasyLM is read (with --config) and written (with --to easylm). A folder that EasyDeL saved is
    read, and written with --to easydel. A folder of MaxText or tunix is read, and MaxText's is
    written with --to maxtext.
    """
    from ed_trainers.convert import convert

    path = convert(
        source,
        target,
        config=config,
        easylm=easylm,
        to=to,
        dtype=dtype,
        scan_layers=scan_layers,
    )
    show_result(str(path))
    return Result({"path": str(path)})


def compare(
    first: Annotated[str, typer.Argument(help="A checkpoint, model directory or stream.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
) -> Result:
    """Print the arrays that differ between two checkpoints. The exit code is 1 if some differ."""
    from ed_trainers.compare import differences

    array_differences = []
    for difference in differences(first, second):
        show_result(str(difference))
        array_differences.append(asdict(difference))
    count = len(array_differences)
    show_result(f"{count} arrays differ" if count else "equal")
    return Result({"differences": array_differences}, int(count > 0))


def merge(
    model: Annotated[str, typer.Argument(help="The base model: a directory or a hub id.")],
    adapter: Annotated[str, typer.Argument(help="LoRA adapters in PEFT's layout.")],
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    dtype: Dtype = "auto",
) -> Result:
    """Merge LoRA adapters into a model, and save the model in Hugging Face layout."""
    from ed_models.adapters.peft import load_adapter
    from ed_models.checkpoints import hub

    loaded = _load(model, dtype)
    return _save(load_adapter(loaded, hub.resolve(adapter)).unwrap_lora_to_layers(), model, target)


def quantize(
    model: Annotated[str, typer.Argument(help="A directory or a hub id.")],
    target: Annotated[Path, typer.Argument(help="Directory to write.")],
    method: Annotated[
        str, typer.Option(help="Format of the weights: nf4, int8, int4, fp8 or another one.")
    ] = "nf4",
    group_size: Annotated[int | None, typer.Option(help="Weights that share a scale.")] = None,
    pattern: Annotated[
        str | None, typer.Option(help="Regular expression of the modules to quantize.")
    ] = None,
    dtype: Dtype = "auto",
) -> Result:
    """Quantize the weights of a model, and save the model with codes and scales."""
    keys = {"group_size": group_size, "pattern": pattern}
    options = {key: value for key, value in keys.items() if value is not None}
    rules = {"dtype": method, **options}
    quantized_model = _load(model, dtype, quantization_config=rules, apply_quantization=True)
    return _save(quantized_model, model, target)


def _load(model: str, dtype: str, **options: Any) -> Any:
    """Load a model in the dtype of its files, or in another one."""
    from ed_models.checkpoints import hub
    from ed_models.checkpoints.checks import detect_task

    settings = hub.resolve(model, weights=False)
    if dtype == "auto":
        stored = getattr(hub.read_config(settings), "dtype", None) or "float32"
        dtype = str(stored).removeprefix("torch.")
    return hub.from_pretrained(
        model, task=detect_task(settings), dtype=dtype, param_dtype=dtype, **options
    )


def _save(model: Any, source: str, target: Path) -> Result:
    """Save a model with the tokenizer of its source."""
    from ed_infra.errors import CheckpointError
    from ed_models.checkpoints.model_card import write_card
    from ed_models.checkpoints.tokenizers import load_tokenizer

    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty: choose a new directory")
    model.save_pretrained(target)
    write_card(target, model)
    with suppress(CheckpointError):  # a model without a tokenizer
        load_tokenizer(source).save_pretrained(target)
    show_result(str(target))
    return Result({"path": str(target)})
