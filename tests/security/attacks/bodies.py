"""Attacks with one body: keys, texts, nesting, counts, parts of forms, grammars."""

from __future__ import annotations

import json

from tests.security.attacks.requests import LIMIT, ROUTES, USER, Ask, as_json, long_text, upload


def chained_schema(count: int) -> dict[str, object]:
    """Return a schema of objects, each with a property that refers to the next object."""
    definitions: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def chained_rules(count: int) -> str:
    """Return a grammar of rules, each of which refers to the next rule."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "x"'])


def grammars() -> dict[str, Ask]:
    """Return the attacks on the grammar compiler by name."""
    chat = ROUTES["/v1/chat/completions"]
    schema = {"name": "a", "schema": chained_schema(1000)}
    wide = {"properties": {f"k{place}": {"type": "string"} for place in range(7000)}}
    fields: dict[str, dict[str, object]] = {
        "references": {"response_format": {"type": "json_schema", "json_schema": schema}},
        "schema as text": {"guided_json": json.dumps(chained_schema(1000))},
        "wide schema": {"guided_json": wide},
        "rules": {"guided_grammar": chained_rules(3000)},
        "endless rule": {"guided_grammar": "start: a\na: a"},
        "parentheses": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
        "long choice": {"guided_choice": ["a" * 60_000]},
    }
    return {
        f"grammar: {name}": as_json("/v1/chat/completions", {**chat, **more})
        for name, more in fields.items()
    }


def bodies() -> dict[str, Ask]:
    """Return all attacks with one body by name."""
    chat, anthropic = ROUTES["/v1/chat/completions"], ROUTES["/v1/messages"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    keys = {f"temperatur{number}": 0 for number in range(30_000)}
    marks = "".join(f"\ufdd0{number}." for number in range(10_000))
    nested = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    lists = b'{"prompt": [' + b"[]," * (LIMIT // 3 - 20) + b"0]}"
    many = b"{" + b",".join(b'"k%x":0' % n for n in range(LIMIT // 11)) + b"}"
    texts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 500}
    wrong = {"role": "user", "content": [{"type": "text"}] * 1000}
    kwargs = {"k": {f"k{n}": n for n in range(60_000)}}
    return {
        **{
            f"unknown keys {path}": as_json(path, {**body, **keys}) for path, body in ROUTES.items()
        },
        **{f"long text {path}": long_text(path, LIMIT - 2**12) for path in ROUTES},
        "4 MB key": as_json("/v1/completions", {"prompt": "a", "k" * 2**22: 0}),
        "4 MB model": as_json("/v1/completions", {"prompt": "a", "model": "m" * 2**22}),
        "nesting": ("/v1/completions", "application/json", nested),
        "empty lists": ("/v1/completions", "application/json", lists),
        "700,000 keys": ("/v1/completions", "application/json", many),
        "digits": ("/v1/completions", "application/json", b'{"prompt": ' + b"9" * 10**6 + b"}"),
        "many messages": as_json("/v1/chat/completions", {**chat, "messages": [USER] * 4096}),
        "many parts": as_json("/v1/chat/completions", {**chat, "messages": [texts] * 80}),
        "wrong blocks": as_json("/v1/messages", {**anthropic, "messages": [wrong] * 120}),
        "marks": as_json(
            "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": marks}]}
        ),
        "template variables": as_json(
            "/v1/chat/completions", {**chat, "chat_template_kwargs": kwargs}
        ),
        "tools": as_json("/v1/chat/completions", {**chat, "tools": [tool] * 100}),
        "bad words": as_json(
            "/v1/completions", {"prompt": "a", "bad_words": ["a b " * 900] * 1000}
        ),
        "allowed tokens": as_json(
            "/v1/completions", {"prompt": "a", "allowed_token_ids": [65] * 2**18}
        ),
        "many prompts": as_json("/v1/completions", {"prompt": ["a"] * 2000, "n": 100}),
        "part header": upload(b"X: " + b"a" * 10**6 + b"\r\n", b"{}"),
        "part headers": upload(b"X: a\r\n" * 10**6, b"{}"),
        "boundaries": upload(b"", b"\r\n--" * (LIMIT // 4)),
        **grammars(),
    }
