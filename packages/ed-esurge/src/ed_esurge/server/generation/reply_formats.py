"""The formats of a model's function calls and thoughts, and the parser of each reply."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from ed_infra.conversation import TOOL_FORMAT, renders_tools

from ed_esurge.replies.events import CallArguments, CallBegins, CallEnds, Event, ReplyText
from ed_esurge.replies.formats import ToolFormat
from ed_esurge.replies.parser import Calls, ReplyParser, new_call_id
from ed_esurge.replies.reading import choose_formats
from ed_esurge.replies.reasoning_formats import REASONING_FORMATS
from ed_esurge.replies.tool_formats import TOOL_FORMATS
from ed_esurge.server.generation.requests import ChatRequest
from ed_esurge.server.generation.structured import NamedTool
from ed_esurge.server.http.errors import APIError
from ed_esurge.thinking import ThinkingBudget, ThoughtTexts
from ed_esurge.tokenizer import Tokenizer

# A list of calls without other text: the output for `tool_choice: "required"`.
LISTED = ToolFormat(starts=("[",))


class NamedCall:
    """Parser of a reply that consists of the arguments of one function: `tool_choice` with a name.

    Args:
        name: name of the function.
        parser: parser of the reasoning before the arguments.
    """

    def __init__(self, name: str, parser: ReplyParser) -> None:
        self._name, self._parser = name, parser
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        """See `ReplyParser.feed`."""
        return self._convert_events(self._parser.feed(text))

    def close(self, *, cut: bool = False) -> list[Event]:
        """See `ReplyParser.close`."""
        events = self._convert_events(self._parser.close(cut=cut))
        if self._begun and not cut:
            events.append(CallEnds(0))
        return events

    def _convert_events(self, events: list[Event]) -> list[Event]:
        result: list[Event] = []
        for event in events:
            if not isinstance(event, ReplyText):
                result.append(event)
                continue
            if not self._begun:
                self._begun = True
                result.append(CallBegins(0, new_call_id(), self._name))
            result.append(CallArguments(0, event.text))
        return result


logger = logging.getLogger(__name__)

Parser = ReplyParser | NamedCall
# Names of templates for thoughts.
_THINKS = re.compile(r"reasoning_content|enable_thinking|thinking_budget|<\W*think")


class ReplyFormats:
    """The formats of one model.

    Args:
        tokenizer: tokenizer of the model. Its special tokens are removed from replies.
        template: the chat template, Jinja text.
        enable_function_calling: False rejects tools.
        tool_parser_name: a name of `TOOL_FORMATS`; "auto" = detect the format in the template and
            the vocabulary, or the format of `ed_infra.conversation` if the template renders no
            tools.
        reasoning_parser: a name of `REASONING_FORMATS`; "auto" as above, "none" = thoughts are
            text.

    Raises:
        ConfigError: a name is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        enable_function_calling: bool = True,
        tool_parser_name: str = "auto",
        reasoning_parser: str = "auto",
    ) -> None:
        self.enabled, self._tokenizer = enable_function_calling, tokenizer
        self._takes_tools = renders_tools(template)
        self.tools, self.reasoning = choose_formats(
            tokenizer, template, tool_parser_name, reasoning_parser
        )
        if self.tools is None and tool_parser_name == "auto" and enable_function_calling:
            logger.warning(
                "the chat template supports tools, and its format of calls is unknown: requests "
                "with tools are refused; pass tool_parser_name, one of %s",
                ", ".join(sorted(TOOL_FORMATS)),
            )
        if self.reasoning is None and reasoning_parser == "auto" and _THINKS.search(template):
            logger.warning(
                "the chat template has thoughts, and their format is unknown: thoughts are part of "
                "the answer; pass reasoning_parser, one of %s, or none",
                ", ".join(sorted(REASONING_FORMATS)),
            )
        # A named format of models that always think, and a template without thoughts.
        form = self.reasoning
        self._always = (
            form is not None
            and form.always
            and reasoning_parser != "auto"
            and not any(text in template for text in form.opens)
        )
        added = tokenizer.added_tokens_decoder.values()
        self._special = frozenset(token.content for token in added if token.special)

    def check(self, body: ChatRequest) -> None:
        """Check that the template can render the tools of a request, and that calls can be parsed.

        Raises:
            APIError: 400.
        """
        if not body.tools:
            return
        if not self.enabled:
            raise APIError(
                "this server does not support tools: start the server with "
                "enable_function_calling: true",
                param="tools",
            )
        if not self._takes_tools and self.tools is not TOOL_FORMATS[TOOL_FORMAT]:
            raise APIError(
                "this model's chat template does not support tools, and the server renders them "
                f"only in the format {TOOL_FORMAT!r}: start the server with a chat_template= that "
                "supports tools, or without tool_parser_name",
                param="tools",
            )
        if self.tools is None and body.tool_choice in (None, "auto"):
            raise APIError(
                "the chat template of this model does not show the format of function calls: start "
                f"the server with tool_parser_name, one of {', '.join(sorted(TOOL_FORMATS))}; or "
                'send tool_choice: "required"',
                param="tools",
            )

    def parsers(self, body: ChatRequest, ending: str) -> Callable[[], Parser] | None:
        """Return a function that creates the parser of each reply; None = replies are plain text.

        Args:
            ending: text of the last tokens of the prompt, see `Prompts.ending`.
        """
        choice = body.tool_choice if body.tools else "none"
        inside = self._begins_with_thoughts(body, ending)
        drops = self._special if self.shows_special(body) else ()
        if isinstance(choice, NamedTool):
            name = choice.function.name
            return lambda: NamedCall(
                name, ReplyParser(None, self.reasoning, inside=inside, drops=drops)
            )
        calls = None
        if choice != "none":
            form = LISTED if choice == "required" else self.tools
            tools = {tool.function.name: tool.function.schema_of_arguments for tool in body.tools}
            if form is not None:
                calls = Calls(form, tools, None if body.parallel_tool_calls else 1)
        if calls is None and self.reasoning is None:
            return None
        return lambda: ReplyParser(calls, self.reasoning, inside=inside, drops=drops)

    def call_starts(self, body: ChatRequest) -> tuple[str, ...]:
        """Return the texts that may begin a call in a reply, if the model may choose to call."""
        if not body.tools or body.tool_choice not in (None, "auto") or self.tools is None:
            return ()
        form = self.tools
        names = [tool.function.name for tool in body.tools]
        starts = [*form.opens, *form.begins]
        if "[" in form.starts and form.syntax == "python":
            starts += [f"[{name}(" for name in names]
        elif "{" in form.starts or "[" in form.starts:
            lists = "[" if "[" in form.starts else ""
            starts += [f'{lists}{{"{form.name_keys[0]}": "{name}"' for name in names]
        return tuple(starts)

    def thinks(self, ending: str) -> bool:
        """Return whether the reply to a prompt with this ending begins with thoughts."""
        return self.reasoning is not None and ending.rstrip().endswith(self.reasoning.opens)

    def _begins_with_thoughts(self, body: ChatRequest, ending: str) -> bool:
        """Return whether a reply begins with thoughts, as `thinks`, or as the model always does.

        A reply that follows a grammar without thoughts begins with the answer.
        """
        form = self.reasoning
        if form is None or self.thinks(ending):
            return form is not None
        if not self._always or ending.rstrip().endswith(form.closes):
            return False
        if body.is_guided and body.outputs():
            return False
        answer = body.response_format
        forced = bool(body.tools) and body.tool_choice not in (None, "none", "auto")
        return not forced and (answer is None or answer.schema_text is None)

    def thinking_budget(self, tokens: int, ending: str) -> ThinkingBudget:
        """Return the limit of the thoughts of a reply to a prompt with this ending.

        Raises:
            APIError: 400, the model has no thoughts.
        """
        form = self.reasoning
        if form is None:
            raise APIError(
                "the format of this model's thoughts is unknown: omit it, or start the server with "
                "reasoning_parser",
                param="thinking_token_budget",
                code="unsupported_value",
            )

        def ids(text: str) -> tuple[int, ...]:
            return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])

        start = () if self.thinks(ending) else ids(form.opens[0])
        return ThinkingBudget(
            tokens=tokens, end_token_ids=ids(form.closes[0]), start_token_ids=start
        )

    def thought_texts(self, body: ChatRequest, ending: str) -> ThoughtTexts | None:
        """Return the texts around the thoughts of a reply to a prompt with this ending."""
        if self.reasoning is None:
            return None
        form = self.reasoning
        inside = self._begins_with_thoughts(body, ending)
        return ThoughtTexts(opens=form.opens, closes=form.closes, inside=inside)

    def ends_of_thoughts(self, ending: str) -> tuple[str, ...]:
        """Return the texts that end the thoughts at the beginning of a reply.

        Empty if the reply to a prompt with this ending does not begin with thoughts.
        """
        if self.reasoning is None or not self.thinks(ending):
            return ()
        return self.reasoning.closes

    def shows_special(self, body: ChatRequest) -> bool:
        """Return whether the text must contain special tokens, because formats use them."""
        calls = self.tools if body.tools and body.tool_choice != "none" else None
        markers = "".join(
            text for form in (calls, self.reasoning) if form is not None for text in form.markers
        )
        skips_special = body.skip_special_tokens is not False
        return skips_special and any(special in markers for special in self._special)
