"""`elarge serve` and `elarge chat`: a run file is executed here, and `esurge` serves other sources.

The source is a run file, or what `esurge serve` and `esurge chat` accept: a directory, a GGUF file,
a hub id or `package:NAME/FILE`. Both have the flags of `esurge`.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from ed_esurge.command.program import Result
from ed_infra.errors import ConfigError
from ed_infra.package_files import RUN_FOLDERS

from ed_elarge.command.runs import DryRun, RunSettings, execute_document, with_one_action

if TYPE_CHECKING:
    from ed_esurge.command.load import ModelArguments
    from ed_esurge.config import EngineConfig

    from ed_elarge.config.run_config import RunConfig
    from ed_elarge.errors import Document

#: Commands of this module, and the hidden commands for sources other than a run file.
TO_ENGINE = {"serve": "serve-model", "chat": "chat-model"}
#: Flags of a command for a run file; True: the flag has a value.
_FILE_FLAGS = {
    "--set": True,
    **dict.fromkeys(("--dry-run", "--verbose", "--quiet", "--json"), False),
}
_ENDINGS = (".yaml", ".yml", ".json")
#: Flag of `esurge` that says how a model is loaded -> the key of a run file.
_LOADING_KEYS = {
    "dtype": "loader.dtype",
    "quantization": "quantization.model.quantization_method",
    "tokenizer": "model.tokenizer",
    "revision": "model.extra_kwargs.revision",
    "chat_template": "model.tokenizer.chat_template",
    "sharding_axis_dims": "sharding.axis_dims",
    "tensor_parallel_size": "sharding.axis_dims",
    "kv_cache_dtype": "quantization.kv_cache",
    "config_kwargs": "base_config.values",
    "trust_remote_code": "loader.trust_remote_code",
}

_Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A run file; or a directory of a model, a LoRA adapter or a run, a GGUF file, a hub "
        "id, or package:NAME/FILE.",
    ),
]
_EsurgeFlags = Annotated[
    list[str] | None, typer.Argument(metavar="FLAGS", help="Flags of `esurge`.", hidden=True)
]


def serve(
    source: _Source,
    flags: _EsurgeFlags = None,
    dry_run: DryRun = False,
    settings: RunSettings = None,
    verbose: bool = False,
) -> Result:
    """Serve the model of SOURCE behind an OpenAI-compatible API, with the flags of `esurge serve`.

    A run file is served with the parameters of its action `serve`; flags replace them. A run file
    that has trained a model is served with this model.
    """
    document = _read_document(source, settings, "serve")
    values = _parse_serve_flags(flags or ())
    _refuse_loading_flags(values["loading"], source)
    parameters = values["server"].model_dump(mode="json", exclude_unset=True)
    document = _add_values(document, parameters, values["engine"])
    return execute_document(document, dry_run=dry_run, verbose=verbose)


def chat(
    source: _Source,
    flags: _EsurgeFlags = None,
    settings: RunSettings = None,
    verbose: bool = False,
) -> int:
    """Talk with the model of SOURCE in the terminal, with the flags of `esurge chat`.

    A run file that has trained a model answers with this model.
    """
    from ed_esurge.command.chat import talk

    from ed_elarge.config.normalize import normalize
    from ed_elarge.model import eLargeModel

    document = _read_document(source, settings, "serve")
    values = _parse_chat_flags(flags or ())
    _refuse_loading_flags(values["loading"], source)
    run = normalize(_add_values(document, {}, values["engine"]))
    defaults: dict[str, object] = {"compile_in_background": True, "max_num_seqs": 1}
    changes = {key: one for key, one in defaults.items() if key not in run.esurge.model_fields_set}
    model = eLargeModel.from_run(run).with_engine_options(changes)
    return talk(model.build_esurge(), values["options"])


def serve_model(ctx: typer.Context) -> None:
    """Serve a model without a run file."""
    _hand_over("serve", ctx.args)


def chat_model(ctx: typer.Context) -> None:
    """Talk with a model without a run file."""
    _hand_over("chat", ctx.args)


def _hand_over(command: str, words: Sequence[str]) -> None:
    from ed_esurge.command.main import main

    raise typer.Exit(main([command, *words]))


class _Words(NamedTuple):
    """The words of a command: its source, the flags for a run file, and those of `esurge`."""

    source: str | None
    own: list[str]
    others: list[str]


def route_words(words: Sequence[str]) -> list[str]:
    """Return the words of the command that executes `serve` or `chat` for their source.

    Args:
        words: the command and its words.
    """
    command, *others = words
    if not others or "--help" in others:
        return [*words]
    split = _split_words(command, others)
    if split.source is None or not is_run_file(split.source):
        return [TO_ENGINE[command], *others]
    return [command, *split.own, "--", split.source, *split.others]


def is_run_file(source: str) -> bool:
    """Return whether a source is a run file by its name, or because it is no GGUF file."""
    if source.lower().endswith(_ENDINGS):
        return True
    return not source.lower().endswith(".gguf") and Path(source).expanduser().is_file()


def _split_words(command: str, words: Sequence[str]) -> _Words:
    """Find the source among the flags of both programs, and separate their flags."""
    several = _find_flags_with_values(command)
    result = _Words(None, [], [])
    source, remaining = None, deque(words)
    while remaining:
        word = remaining.popleft()
        flag, equals, _ = word.partition("=")
        if flag in _FILE_FLAGS:
            result.own.append(word)
            if _FILE_FLAGS[flag] and not equals and remaining:
                result.own.append(remaining.popleft())
        elif word.startswith("-") and word != "--":
            result.others.append(word)
            flag = flag.replace("_", "-") if flag.startswith("--") else flag
            if flag in several and not equals and remaining:
                result.others.append(remaining.popleft())
                while several[flag] and remaining and not remaining[0].startswith("-"):
                    result.others.append(remaining.popleft())
        elif source is None and word != "--":
            source = word
        elif word != "--":
            result.others.append(word)
    return result._replace(source=source)


def _find_flags_with_values(command: str) -> dict[str, bool]:
    """Return the flags of a command of `esurge` with a value: whether they accept several words."""
    from ed_esurge.command.flags import SEVERAL
    from ed_esurge.command.foreign_flags import FOREIGN_FLAGS
    from ed_esurge.command.main import app

    group: Any = typer.main.get_command(app)
    program = group.commands[command]
    context = program.make_context(command, [], resilient_parsing=True)
    flags = {name: False for one in FOREIGN_FLAGS if not one.is_switch for name in one.names}
    for option in program.get_params(context):
        if option.param_type_name == "option" and not option.is_flag:
            is_several = str(option.metavar).endswith(SEVERAL)
            flags |= dict.fromkeys((*option.opts, *option.secondary_opts), is_several)
    return flags


def _read_document(source: str, settings: list[str] | None, action: str) -> Document:
    """Read a run file for one action; a model that the file has trained replaces its model."""
    from ed_elarge.config import nodes
    from ed_elarge.config.layers import with_settings
    from ed_elarge.config.normalize import normalize

    document = with_settings(nodes.read_yaml(source), settings or (), nodes.parse_yaml)
    run = normalize(document)
    document = with_one_action(document, action)
    trained_model = _find_trained_model(run)
    if trained_model is not None:
        print(f"{source} has trained {trained_model}, which answers here", file=sys.stderr)
        sections = _get_sections(document)
        section = {key: one for key, one in sections["model"].items() if key != "config"}
        if isinstance(section.get("tokenizer"), Mapping):  # trained with the model
            del section["tokenizer"]
        section["name_or_path"] = str(trained_model)  # with merged adapters
        others = {key: one for key, one in sections.items() if key != "lora"}
        _set_sections(document, {**others, "model": section})
    return document


def _find_trained_model(run: RunConfig) -> Path | None:
    if run.trainer is None:
        return None
    path = run.directory / RUN_FOLDERS[0]
    return path if (path / "config.json").is_file() else None


def _parse_serve_flags(words: Sequence[str]) -> dict[str, Any]:
    from ed_esurge.command.flags import Flags
    from ed_esurge.command.foreign_flags import translate_flags
    from ed_esurge.command.load import EngineFlags, ModelFlags
    from ed_esurge.command.serve import OMITTED
    from ed_esurge.server.options import ServerOptions

    translation = translate_flags(words)
    for note in translation.notes:
        print(f"warning: a flag without an effect here: {note}", file=sys.stderr)
    flags = Flags("server", short={"data_parallel_size": ("-dp",)}, omitted=OMITTED)
    server = Annotated[ServerOptions, flags]
    return _parse_flags(translation.words, loading=ModelFlags, engine=EngineFlags, server=server)


def _parse_chat_flags(words: Sequence[str]) -> dict[str, Any]:
    from ed_esurge.command.chat import ChatOptions
    from ed_esurge.command.flags import Flags
    from ed_esurge.command.load import EngineFlags, ModelFlags

    options = Annotated[ChatOptions, Flags("chat")]
    return _parse_flags(words, loading=ModelFlags, engine=EngineFlags, options=options)


def _parse_flags(words: Sequence[str], **records: object) -> dict[str, Any]:
    """Return the records of options with the values of flags."""
    from ed_esurge.command.program import parse_words

    def name_flags(**values: object) -> None:
        """Name the flags."""

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(name, keyword, annotation=annotation)
        for name, annotation in records.items()
    ]
    name_flags.__dict__["__signature__"] = inspect.Signature(parameters)
    return parse_words(name_flags, words)


def _refuse_loading_flags(loading: ModelArguments, source: str) -> None:
    """Raise `ConfigError` for a flag that a section of the run file states."""
    for name in sorted(loading.model_fields_set):
        flag = f"--{name.replace('_', '-')}"
        raise ConfigError(
            f"{flag} has no effect on the run file {source}, which states how its model is loaded: "
            f"use --set {_LOADING_KEYS[name]}=VALUE"
        )


def _get_sections(document: Document) -> Mapping[str, Any]:
    from ed_elarge.config.normalize import WRAPPERS

    top = document.value
    wrapper = next((w for w in WRAPPERS if isinstance(top.get(w), Mapping)), None)
    return top if wrapper is None else top[wrapper]


def _set_sections(document: Document, sections: Mapping[str, object]) -> None:
    old_sections = _get_sections(document)
    if old_sections is document.value:
        document.value = sections
    else:
        wrapper = next(key for key, one in document.value.items() if one is old_sections)
        document.value = {**document.value, wrapper: sections}


def _add_values(
    document: Document, parameters: Mapping[str, object], engine: EngineConfig
) -> Document:
    """Return a document of one action with the values of flags."""
    holder = document.value if "actions" in document.value else _get_sections(document)
    (item,) = holder["actions"]
    name, options = (item, None) if isinstance(item, str) else next(iter(item.items()))
    if parameters:
        holder = {**holder, "actions": [{name: {**(options or {}), **parameters}}]}
        if "actions" in document.value:
            document.value = holder
        else:
            _set_sections(document, holder)
    changes = engine.model_dump(mode="json", exclude_unset=True)
    if changes:
        sections = _get_sections(document)
        esurge = {**(sections.get("esurge") or {}), **changes}
        _set_sections(document, {**sections, "esurge": esurge})
    return document
