"""Documented flows of `instructor`, over the OpenAI and the Anthropic client."""

from __future__ import annotations

import sys
from typing import Any, Literal

import anthropic
import instructor
import openai
from flows import KEY, MODEL, flow, main
from pydantic import BaseModel, ConfigDict, field_validator

ASK: Any = {"role": "user", "content": "Report the weather."}
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 200}


class Report(BaseModel):
    """A structured answer. Without `extra` the schema would allow additional keys."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Basel"]
    sunny: bool


attempts: list[str] = []


class Once(BaseModel):
    """An answer whose first attempt is rejected."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Bern", "Basel"]

    @field_validator("city")
    @classmethod
    def _second(cls, city: str) -> str:
        attempts.append(city)
        if len(attempts) == 1:
            raise ValueError("try again")
        return city


def over_openai(url: str, mode: instructor.Mode) -> instructor.Instructor:
    ai = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)
    return instructor.from_openai(ai, mode=mode)


def over_anthropic(url: str, mode: instructor.Mode) -> instructor.Instructor:
    root = url.removesuffix("/v1")
    claude = anthropic.Anthropic(base_url=root, api_key=KEY, max_retries=0)
    return instructor.from_anthropic(claude, mode=mode)


def clients(url: str) -> list[instructor.Instructor]:
    modes = instructor.Mode
    return [
        over_openai(url, modes.TOOLS),
        over_openai(url, modes.TOOLS_STRICT),
        over_openai(url, modes.JSON_SCHEMA),
        over_anthropic(url, modes.ANTHROPIC_TOOLS),
    ]


@flow("tiny")
def create(url: str) -> None:
    for client in clients(url):
        report = client.chat.completions.create(
            messages=[ASK], response_model=Report, max_retries=0, **OPTIONS
        )
        assert isinstance(report, Report), client.mode


@flow("tiny")
def create_with_completion(url: str) -> None:
    for client in clients(url):
        report, raw = client.chat.completions.create_with_completion(
            messages=[ASK], response_model=Report, max_retries=0, **OPTIONS
        )
        assert isinstance(report, Report) and raw.usage is not None


@flow("tiny")
def reask_after_a_refused_answer(url: str) -> None:
    """The rejected answer and its error are appended to the conversation."""
    for client in clients(url):
        attempts.clear()
        answer = client.chat.completions.create(
            messages=[ASK], response_model=Once, max_retries=3, **OPTIONS
        )
        assert isinstance(answer, Once) and len(attempts) >= 2, client.mode


@flow("tiny")
def partial_stream(url: str) -> None:
    for client in (clients(url)[0], clients(url)[2]):
        *_, last = client.chat.completions.create_partial(
            messages=[ASK], response_model=Report, **OPTIONS
        )
        assert last.city in ("Bern", "Basel")


@flow("tiny")
def responses_tools(url: str) -> None:
    client = over_openai(url, instructor.Mode.RESPONSES_TOOLS)
    report = client.responses.create(
        model=MODEL, input="Report the weather.", response_model=Report, max_retries=0
    )
    assert isinstance(report, Report)


if __name__ == "__main__":
    sys.exit(main())
