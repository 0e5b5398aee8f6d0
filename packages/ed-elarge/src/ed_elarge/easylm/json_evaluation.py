"""EasyLM's evaluation of a JSON file by a server: likelihoods, greedy and sampled continuations.

    python -m EasyLM.scripts.lm_eval_json --input=questions.json --output=answers.json \\
        --eval_type=loglikelihood --lm_client.url=http://127.0.0.1:5007

The input is an object with the lists `prefix`, `text` and `until`, as far as the type reads them.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ed_infra.errors import ConfigError, unknown_name

from ed_elarge.easylm.flags import FlagValues, need


class _Kind(NamedTuple):
    """A type of evaluation: the path of the server, its fields, and the lists of the answer."""

    path: str
    reads: tuple[str, ...]
    returns: dict[str, str]


_SCORES = {"loglikelihood": "log_likelihood", "is_greedy": "is_greedy"}
#: Type -> the endpoint, the lists that it reads, and the lists that it returns.
REQUEST_KINDS = {
    "loglikelihood": _Kind("/loglikelihood", ("prefix", "text"), _SCORES),
    "loglikelihood_rolling": _Kind("/loglikelihood-rolling", ("text",), _SCORES),
    "greedy_until": _Kind("/greedy-until", ("prefix", "until"), {"output_text": "output_text"}),
    "generate": _Kind("/generate", ("prefix",), {"output_text": "output_text"}),
}


def evaluate_files(
    data: Mapping[str, Any], eval_type: str, url: str, batch_size: int = 16
) -> dict[str, Any]:
    """Return the lists of the input and the answers of the server.

    Args:
        data: The lists `prefix`, `text` and `until`.
        eval_type: A key of `REQUEST_KINDS`.
        url: Address of a server of `EasyLM.serving`, `elarge serve` or `esurge serve`.
        batch_size: Number of entries of one request.

    Raises:
        ConfigError: The type is unknown, a list is missing, or the server refuses a request.
    """
    if eval_type not in REQUEST_KINDS:
        raise unknown_name("eval_type", eval_type, REQUEST_KINDS)
    kind = REQUEST_KINDS[eval_type]
    for name in kind.reads:
        if not isinstance(data.get(name), list):
            raise ConfigError(f"the input needs the list {name!r} for eval_type {eval_type}")
    inputs = {name: data[name] for name in kind.reads}
    lengths = {name: len(value) for name, value in inputs.items()}
    if len(set(lengths.values())) > 1:
        raise ConfigError(f"the lists of the input have different lengths: {lengths}")
    out: dict[str, list[Any]] = {name: [] for name in kind.returns}
    for start in range(0, next(iter(lengths.values())), batch_size):
        part = {name: value[start : start + batch_size] for name, value in inputs.items()}
        if "prefix" in part:
            part["prefix_text"] = part.pop("prefix")
        answer = _post_json(f"{url.rstrip('/')}{kind.path}", part)
        for name, field in kind.returns.items():
            out[name] += answer[field]
    return {**inputs, **out}


def _post_json(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
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


def evaluate_file(flags: FlagValues) -> None:
    """Evaluate the lists of a JSON file by a server, and write the answers.

    Raises:
        ConfigError: The file cannot be read, or the server refuses a request.
    """
    source, target = (flags[name] or flags[f"{name}_file"] for name in ("input", "output"))
    if not source or not target:
        need(flags, "output" if source else "input")
    try:
        data = json.loads(Path(source).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from error
    url = flags["lm_client.url"]
    answers = evaluate_files(data, flags["eval_type"], url, flags["lm_client.batch_size"])
    Path(target).write_text(json.dumps(answers, indent=2, ensure_ascii=False) + "\n", "utf-8")
    print(f"wrote {target}")
