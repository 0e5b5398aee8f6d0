"""Commands about run files: `init`, `schema` and `diff`. They do not import jax."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from ed_esurge.command.program import Result, is_quiet, show_result
from ed_infra.errors import ConfigError

from ed_elarge.command.runs import RunSettings
from ed_elarge.config.layers import flatten_values


def init(
    kind: Annotated[
        str | None,
        typer.Argument(
            help="Kind of the file: lora, qlora, pretrain, a method (sft, dpo, grpo, …) or an "
            "action (serve, eval)."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file; default: KIND.yaml.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    origin: Annotated[
        Path | None,
        typer.Option("--from", help="A file of Axolotl, TRL, LLaMA-Factory or Unsloth to convert."),
    ] = None,
    tool: Annotated[
        str | None,
        typer.Option(help="With --from: axolotl, trl, llamafactory or unsloth; default: by keys."),
    ] = None,
    devices: Annotated[
        int,
        typer.Option(min=1, max=2**20, help="With --from: devices that share a batch."),
    ] = 1,
) -> Result:
    """Write a commented run file, and the schema with which an editor checks it.

    With --from, the file has the values of a file of another program. The exit code is 1 if keys
    that change the result have no place in the new file.
    """
    from ed_elarge.config.json_schema import build_schema
    from ed_elarge.config.templates import SCHEMA_FILE, find_template, template

    if kind is None and origin is None:
        raise ConfigError("name a method or an action, or a file of another program with --from")
    if origin is None and (tool is not None or devices != 1):
        raise ConfigError("--tool and --devices belong to --from")
    name = "" if kind is None else find_template(kind)
    path = output or Path(f"{name or _get_stem(origin)}.yaml")
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: choose another --output, or pass --force")
    text, result, remark = template(name, str(path)) if origin is None else "", Result({}), ""
    if origin is not None:
        text, result, remark = _convert_file(origin, tool, name or None, devices, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    (path.parent / SCHEMA_FILE).write_text(json.dumps(build_schema()) + "\n", "utf-8")
    show_result(f"wrote {path}; {remark}check the file: elarge {path} --dry-run")
    return Result({"path": str(path), **result.values}, result.code)


def _get_stem(origin: Path | None) -> str:
    stem = "run" if origin is None else origin.stem
    return f"{stem}-elarge"


def _convert_file(
    origin: Path, tool: str | None, method: str | None, devices: int, path: Path
) -> tuple[str, Result, str]:
    """Return the text of the run file, the result of the command, and a remark."""
    from ed_elarge.command.foreign_files import convert_foreign_file, format_run_file

    conversion = convert_foreign_file(origin, tool=tool, method=method, devices=devices)
    changes, omitted = conversion.changes, conversion.omitted
    for key, reason in changes.items():
        print(f"{key} changes the result and is missing: {reason}", file=sys.stderr)
    values = {"program": conversion.program, "changes": changes, "omitted": omitted}
    remark = f"not needed: {len(omitted)} keys; missing keys that matter: {len(changes)}; "
    text = format_run_file(conversion, origin.name, str(path))
    return text, Result(values, int(bool(changes))), remark


def schema() -> Result:
    """Print the JSON schema of run files, for editors."""
    from ed_elarge.config.json_schema import build_schema

    values = build_schema()
    show_result(json.dumps(values))
    return Result(values)


def diff(
    first: Annotated[str, typer.Argument(help="A run file; with --run, a run's directory.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    run: Annotated[
        bool, typer.Option("--run", help="Compare two runs: values, versions and seeds.")
    ] = False,
    settings: RunSettings = None,
) -> Result:
    """Print the values that differ between two run files, defaults included.

    The exit code is 1 if values differ.
    """
    if run and settings:
        raise ConfigError("--set changes run files, and --run compares finished runs: keep one")
    sides = [
        (_read_run if run else _read_run_file)(path, settings or []) for path in (first, second)
    ]
    one, second_values = sides
    differing = [
        k for k in dict.fromkeys([*one, *second_values]) if one.get(k) != second_values.get(k)
    ]
    for key in differing:
        show_result(f"{key}: {_format_value(one, key)} -> {_format_value(second_values, key)}")
    if not is_quiet():
        print(f"{len(differing)} values differ" if differing else "equal", file=sys.stderr)
    differences = {key: [one.get(key), second_values.get(key)] for key in differing}
    return Result({"differences": differences}, int(bool(differing)))


def _format_value(values: Mapping[str, Any], key: str) -> str:
    return json.dumps(values[key], default=str) if key in values else "(absent)"


def _read_run_file(path: str, settings: list[str]) -> dict[str, Any]:
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize

    document = with_settings(nodes.read_yaml(path), settings, nodes.parse_yaml)
    return flatten_values(normalize(document).to_dict())


def _read_run(path: str, settings: list[str]) -> dict[str, Any]:
    from ed_elarge.actions.provenance import read_provenance

    return flatten_values(read_provenance(Path(path)))
