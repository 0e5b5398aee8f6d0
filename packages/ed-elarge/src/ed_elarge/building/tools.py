"""The tools of a run: Python functions as JSON schemas, read with the parser of the engine.

Trainers and engine do not import each other, so the trainer receives a `ToolSet` with the functions
and with the reader of the replies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from ed_infra.errors import ConfigError
from ed_trainers import user_code
from ed_trainers.environments import Environment, environment_class
from ed_trainers.environments.tools import ToolSet, list_tool_methods
from ed_trainers.options.online import OnlineArguments

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
            describes each parameter under `Args:`.

    Raises:
        ConfigError: an annotation or a description is missing.
    """
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
        load = functools.partial(user_code.load_function, folders=(run.folder,))
        functions = list(elm.tools or map(load, options.tools))
        methods = dict[str, ToolFunction]()
        if run.environment is not None:
            methods = _bind_tool_methods(environment_class(run.environment, (run.folder,)))
        if not functions and not methods:
            return None
        tools = build_tool_set([*functions, *methods.values()], elm.build_tokenizer(), options)
    return replace(
        tools, functions={name: f for name, f in tools.functions.items() if name not in methods}
    )


def _bind_tool_methods(environment: type[Environment]) -> dict[str, ToolFunction]:
    """Return the tools of an environment as methods of an object, which have no `self`, by name.

    Raises:
        ConfigError: the environment lacks a method.
    """
    names = list_tool_methods(environment)
    for name in names:
        if not callable(getattr(environment, name, None)):
            raise ConfigError(
                f"{environment.__name__}.tools has {name!r}, and the class has no such method"
            )
    one = environment() if names else None
    return {name: getattr(one, name) for name in names}
