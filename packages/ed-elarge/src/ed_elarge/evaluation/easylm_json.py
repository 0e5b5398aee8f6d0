"""EasyLM's evaluation of a JSON file by a server: likelihoods, greedy and sampled continuations.

    python -m EasyLM.scripts.lm_eval_json --input=questions.json --output=answers.json \\
        --eval_type=loglikelihood --lm_client.url=http://127.0.0.1:5007

The input is an object with the lists `prefix`, `text` and `until`, as far as the type reads them.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.exits import guarded


class _Kind(NamedTuple):
    """A type of evaluation: the path of the server, its fields, and the lists of the answer."""

    path: str
    reads: tuple[str, ...]
    returns: dict[str, str]


_SCORES = {"loglikelihood": "log_likelihood", "is_greedy": "is_greedy"}
#: Type -> the endpoint, the lists that it reads, and the lists that it returns.
KINDS = {
    "loglikelihood": _Kind("/loglikelihood", ("prefix", "text"), _SCORES),
    "loglikelihood_rolling": _Kind("/loglikelihood-rolling", ("text",), _SCORES),
    "greedy_until": _Kind("/greedy-until", ("prefix", "until"), {"output_text": "output_text"}),
    "generate": _Kind("/generate", ("prefix",), {"output_text": "output_text"}),
}


def evaluate(
    data: Mapping[str, Any], eval_type: str, url: str, batch_size: int = 16
) -> dict[str, Any]:
    """Return the lists of the input and the answers of the server.

    Args:
        data: The lists `prefix`, `text` and `until`.
        eval_type: A key of `KINDS`.
        url: Address of a server of `EasyLM.serving`, `elarge serve` or `esurge serve`.
        batch_size: Number of entries of one request.

    Raises:
        ConfigError: The type is unknown, a list is missing, or the server refuses a request.
    """
    if eval_type not in KINDS:
        raise unknown_name("eval_type", eval_type, KINDS)
    kind = KINDS[eval_type]
    for name in kind.reads:
        if not isinstance(data.get(name), list):
            raise ConfigError(f"the input needs the list {name!r} for eval_type {eval_type}")
    given = {name: data[name] for name in kind.reads}
    lengths = {name: len(value) for name, value in given.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"the lists of the input have different lengths: {lengths}")
    out: dict[str, list[Any]] = {name: [] for name in kind.returns}
    for start in range(0, next(iter(lengths.values())), batch_size):
        part = {name: value[start : start + batch_size] for name, value in given.items()}
        if "prefix" in part:
            part["prefix_text"] = part.pop("prefix")
        answer = _asked(f"{url.rstrip('/')}{kind.path}", part)
        for name, field in kind.returns.items():
            out[name] += answer[field]
    return {**given, **out}


def _asked(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        raise ConfigError(f"{url} answered with status {error.code}: {text}") from error
    except OSError as error:
        raise ConfigError(f"{url} cannot be reached: {error}") from error


def _command(
    input: Annotated[Path, typer.Option(help="The JSON file.")],
    output: Annotated[Path, typer.Option(help="The file of the answers.")],
    eval_type: Annotated[str, typer.Option("--eval_type", help=", ".join(KINDS))] = "loglikelihood",
    url: Annotated[str, typer.Option("--lm_client.url", "--url")] = "http://127.0.0.1:5007",
    batch_size: Annotated[int, typer.Option("--lm_client.batch_size", min=1)] = 16,
) -> None:
    """Evaluate the lists of a JSON file by a server."""

    def work() -> None:
        try:
            data = json.loads(input.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{input} cannot be read: {error}") from error
        answers = evaluate(data, eval_type, url, batch_size)
        output.write_text(json.dumps(answers, indent=2, ensure_ascii=False) + "\n", "utf-8")
        print(f"wrote {output}")

    raise typer.Exit(guarded(work))


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate the file of the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_command)
    app(list(sys.argv[1:] if arguments is None else arguments), prog_name="lm_eval_json")
