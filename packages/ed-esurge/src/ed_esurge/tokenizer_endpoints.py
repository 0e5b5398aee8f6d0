"""Tokenizers in other processes: the options `tokenizer_endpoint` and `detokenizer_endpoint`.

An endpoint has the routes `/tokenize` and `/detokenize` of vLLM, as `esurge serve`, and the
tokenizer of the model. A probe compares the tokenizers when the engine starts. If an endpoint does
not answer later, the tokenizer of the engine replaces it, with a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger, once

from ed_esurge.tokenizer import Tokenizer

logger = get_logger(__name__)

TIMEOUT_SECONDS = 10.0
#: Largest answer of an endpoint, in bytes.
MAX_ANSWER = 2**26
#: Text with letters, digits, white space and bytes of several characters.
PROBE = "A probe, 12 tokens:\n  größer als 東京!"


class TokenizerEndpoint:
    """A tokenizer whose texts are encoded, or whose ids are decoded, by another process.

    Args:
        tokenizer: the tokenizer of the engine, which has the other attributes.
        encodes: address for texts; None = the tokenizer of the engine.
        decodes: address for token ids; None = the tokenizer of the engine.
    """

    def __init__(self, tokenizer: Tokenizer, encodes: str | None, decodes: str | None) -> None:
        self._local = tokenizer
        self._encodes, self._decodes = encodes, decodes
        self._client = httpx.Client(timeout=TIMEOUT_SECONDS, trust_env=False)
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # its incremental decoder would not ask the endpoint
            raise AttributeError(name)
        return getattr(self._local, name)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, Any]:
        """Return a mapping with `input_ids`."""
        if self._encodes is None:
            return self._local(text, add_special_tokens=add_special_tokens)
        body = {"prompt": text, "add_special_tokens": add_special_tokens}
        try:
            ids = self._post(self._encodes, "tokenize", body)["tokens"]
            return {"input_ids": [int(token) for token in ids]}
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            self._report(self._encodes, error)
            return self._local(text, add_special_tokens=add_special_tokens)

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **options: object
    ) -> str:
        """Return the text of token ids."""
        if self._decodes is None:
            return self._local.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        special = self._special if skip_special_tokens else ()
        ids = [int(token) for token in token_ids if token not in special]
        try:
            return str(self._post(self._decodes, "detokenize", {"tokens": ids})["prompt"])
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            self._report(self._decodes, error)
            return self._local.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)

    def check(self) -> None:
        """Compare the endpoints with the tokenizer of the engine.

        Raises:
            ConfigError: an endpoint does not answer, or has another tokenizer.
        """
        ids = list(self._local(PROBE)["input_ids"])
        options = {"tokenizer_endpoint": self._encodes, "detokenizer_endpoint": self._decodes}
        for name, address in options.items():
            if address is None:
                continue
            try:
                if name == "tokenizer_endpoint":
                    body: dict[str, Any] = {"prompt": PROBE, "add_special_tokens": True}
                    equal = self._post(address, "tokenize", body)["tokens"] == ids
                else:
                    text = self._post(address, "detokenize", {"tokens": ids})["prompt"]
                    equal = text == self._local.decode(ids)
            except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{name} {address} does not answer as a tokenizer ({error}): start a server "
                    "with the routes /tokenize and /detokenize there, or omit the option",
                    field=name,
                ) from error
            if not equal:
                raise ConfigError(
                    f"{name} {address} has another tokenizer than the model: serve the tokenizer "
                    "of the model there, or omit the option",
                    field=name,
                )

    def _post(self, address: str, route: str, body: Mapping[str, object]) -> Any:
        with self._client.stream("POST", f"{address}/{route}", json=body) as reply:
            reply.raise_for_status()
            content = bytearray()
            for chunk in reply.iter_bytes():
                content += chunk
                if len(content) > MAX_ANSWER:
                    raise ValueError(f"the answer has more than {MAX_ANSWER} bytes")
        return httpx.Response(200, content=bytes(content)).json()

    def _report(self, address: str, error: Exception) -> None:
        once(logger, f"{address} failed ({error}): the tokenizer of the engine replaces it")


def connect_tokenizers(
    tokenizer: Tokenizer | None, encodes: str | None, decodes: str | None
) -> tuple[Tokenizer | None, Tokenizer | None]:
    """Return the tokenizers of prompts and of outputs.

    Args:
        tokenizer: the tokenizer of the engine.
        encodes: the option `tokenizer_endpoint`.
        decodes: the option `detokenizer_endpoint`.

    Raises:
        ConfigError: see `TokenizerEndpoint.check`; or the engine has no tokenizer.
    """
    if encodes is None and decodes is None:
        return tokenizer, tokenizer
    if tokenizer is None:
        raise ConfigError(
            "tokenizer_endpoint and detokenizer_endpoint require the tokenizer of the model for "
            "special tokens and templates: pass a tokenizer, or omit the options",
            field="tokenizer_endpoint",
        )
    TokenizerEndpoint(tokenizer, encodes, decodes).check()
    # The other attributes are those of the tokenizer, which a type checker does not see.
    encoder: Any = TokenizerEndpoint(tokenizer, encodes, None)
    decoder: Any = TokenizerEndpoint(tokenizer, None, decodes)
    return tokenizer if encodes is None else encoder, tokenizer if decodes is None else decoder
