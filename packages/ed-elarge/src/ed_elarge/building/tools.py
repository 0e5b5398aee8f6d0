"""The tools of a run: Python functions as JSON schemas, read with the parser of the engine.

Trainers and engine do not import each other, so the trainer receives a `ToolSet` with the functions
and with the reader of the replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ed_infra.errors import ConfigError
from ed_trainers import user_code
from ed_trainers.environments import Environment, close_environment, load_environment
from ed_trainers.environments.tools import RemoteTool, ToolSet, list_tool_methods
from ed_trainers.options.online import OnlineArguments, TrainingTool

if TYPE_CHECKING:
    from ed_esurge.tokenizer import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from ed_elarge.model import eLargeModel

ToolFunction = Callable[..., object]


def name_function(function: ToolFunction) -> str:
    """Return the name of a tool in a run file, for a function that the run receives itself."""
    return f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"


def describe_function(function: ToolFunction) -> dict[str, Any]:
    """Return the JSON schema of a function, as transformers builds it for chat templates.

    Args:
        function: a function with annotated parameters and a docstring of Google's style, which
            describes each parameter under `Args:`; or a tool of a server, which has a schema.

    Raises:
        ConfigError: an annotation or a description is missing.
    """
    if isinstance(function, RemoteTool):
        return function.schema
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        return get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError) as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"the tool {name} cannot be described to the model: {error}. Annotate each parameter, "
            "and describe the function and each parameter under `Args:` of its docstring"
        ) from error


def build_tool_set(
    functions: Iterable[ToolFunction], tokenizer: PreTrainedTokenizerBase, options: OnlineArguments
) -> ToolSet:
    """Return the tools of a trainer.

    Args:
        functions: the functions.
        tokenizer: the tokenizer of the model, with its chat template.
        options: the options of the method.

    Raises:
        ConfigError: two functions have one name, a function cannot be described, the tokenizer has
            no chat template, or the format of the model's calls is unknown.
    """
    from ed_esurge.replies.reading import ReplyReader

    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            "tools are part of the chat template, and the tokenizer has none: set "
            "model.tokenizer.chat_template, or omit trainer.tools"
        )
    schemas, functions_by_name = [], dict[str, ToolFunction]()
    for function in functions:
        schema = describe_function(function)
        name = schema["function"]["name"]
        if name in functions_by_name:
            raise ConfigError(f"two tools have the name {name!r}: rename one of the functions")
        functions_by_name[name] = function
        schemas.append(schema)
    reader = ReplyReader(cast("Tokenizer", tokenizer), schemas, tool_format=options.tool_format)
    return ToolSet(functions_by_name, schemas, reader, options.tool_timeout)


def build_tools(elm: eLargeModel) -> ToolSet | None:
    """Return the tools of a run; None without tools.

    Raises:
        InputError: as `build_tool_set`, or a function does not exist.
    """
    run, options = elm.config, elm.config.trainer
    if not isinstance(options, OnlineArguments):
        return None
    if elm.tools and run.asynchronous is not None:
        raise ConfigError(
            "other processes cannot receive functions of this process: write their names as "
            "trainer.tools, path/file.py:function, or omit the section asynchronous"
        )
    with run.blame("trainer", "tools"):
        functions = list(elm.tools or _load_tools(options.tools, run.folder))
        environment = None
        if run.environment is not None:
            environment = _create_with_tools(load_environment(run.environment, (run.folder,)))
        methods = _bind_tool_methods(environment)
        if not functions and not methods:
            return None
        tools = build_tool_set([*functions, *methods.values()], elm.build_tokenizer(), options)
        close_environment(environment)
    return replace(
        tools, functions={name: f for name, f in tools.functions.items() if name not in methods}
    )


def _load_tools(names: Iterable[TrainingTool], folder: Path) -> Iterator[ToolFunction]:
    """Yield the functions of `trainer.tools`."""
    for name in names:
        if isinstance(name, str):
            yield user_code.load_function(name, (folder,))
            continue
        from ed_elarge.building.mcp_tools import connect_tools

        yield from connect_tools(name["mcp"])


def _create_with_tools(create: Callable[[], Environment]) -> Environment | None:
    """Return an environment whose class has the attribute `tools`, otherwise None."""
    loaded_class = getattr(create, "func", create)
    return create() if hasattr(loaded_class, "tools") else None


def _bind_tool_methods(environment: Environment | None) -> dict[str, ToolFunction]:
    """Return the tools of an environment as methods of an object, which have no `self`, by name.

    Raises:
        ConfigError: the environment lacks a method.
    """
    names = list_tool_methods(environment)
    for name in names:
        if not callable(getattr(environment, name, None)):
            raise ConfigError(
                f"{type(environment).__name__}.tools has {name!r}, and the class has no such method"
            )
    return {name: getattr(environment, name) for name in names}
