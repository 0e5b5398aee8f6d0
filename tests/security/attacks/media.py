"""Attacks with pictures and templates: their children end within limits of time and memory."""

from __future__ import annotations

import base64

from tests.security.attacks.requests import ROUTES, Ask, as_json

_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATES = {
    "endless loops": _LOOP,
    "a gigabyte": "{{ 'a' * 10**9 }}",
    "a width": "{{ '%999999999s' | format('a') }}",
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
}


def media() -> dict[str, Ask]:
    """Return the attacks with templates, template variables, and pictures by name."""
    path = "/v1/chat/completions"
    chat = ROUTES[path]
    picture = base64.b64encode(b"\xff\xd8" + b"\xff\xda\0\2" * 500_000).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}
    messages = [{"role": "user", "content": "a"}] * 2000
    variables = {"eos_token": "a" * 2**20}
    return {
        **{
            f"template: {name}": as_json(path, {**chat, "chat_template": template})
            for name, template in TEMPLATES.items()
        },
        "repeated variable": as_json(
            path, {**chat, "messages": messages, "chat_template_kwargs": variables}
        ),
        "picture of many scans": as_json(
            path, {**chat, "messages": [{"role": "user", "content": [part]}]}
        ),
    }
