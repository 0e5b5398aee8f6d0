"""The endpoints of the server, and those that entry points add."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from ed_infra.errors import ConfigError
from ed_infra.logging import get_logger

from ed_esurge.server.batches import endpoints as batches
from ed_esurge.server.messages import endpoint as messages
from ed_esurge.server.openai import (
    chat,
    classification,
    completions,
    embeddings,
    pooling,
    ranking,
    tokens,
    transcriptions,
)
from ed_esurge.server.operations import admin, health, prefixes, weights
from ed_esurge.server.responses import endpoint as responses
from ed_esurge.server.routing import Endpoint

logger = get_logger(__name__)

#: Entry point group of further endpoints; an entry point is an Endpoint or a tuple.
ENDPOINT_GROUP = "easydel.endpoints"

#: The endpoints of the APIs of OpenAI and Anthropic, and of the operation of the server.
ENDPOINTS = (
    *completions.ENDPOINTS,
    *chat.ENDPOINTS,
    *responses.ENDPOINTS,
    *messages.ENDPOINTS,
    *embeddings.ENDPOINTS,
    *pooling.ENDPOINTS,
    *ranking.ENDPOINTS,
    *classification.ENDPOINTS,
    *transcriptions.ENDPOINTS,
    *batches.ENDPOINTS,
    *tokens.ENDPOINTS,
    *prefixes.ENDPOINTS,
    *admin.ENDPOINTS,
    *weights.ENDPOINTS,
    *health.ENDPOINTS,
)


@cache
def list_endpoints() -> tuple[Endpoint, ...]:
    """Return `ENDPOINTS`, and those of the entry points of the group `easydel.endpoints`.

    An entry point that cannot be imported is omitted, with a warning.

    Raises:
        ConfigError: an entry point is no endpoint, or two endpoints have one path and method.
    """
    endpoints = {(one.method, one.path): one for one in ENDPOINTS}
    for point in sorted(entry_points(group=ENDPOINT_GROUP)):
        source = f"the entry point {point.name!r} = {point.value!r} of {ENDPOINT_GROUP}"
        for endpoint in _load_endpoints(point, source):
            key = (endpoint.method, endpoint.path)
            if key in endpoints:
                raise ConfigError(
                    f"{source} has {' '.join(key)}, which the server has already: choose another "
                    "path"
                )
            endpoints[key] = endpoint
    return tuple(endpoints.values())


def _load_endpoints(point: EntryPoint, source: str) -> list[Endpoint]:
    try:
        value = point.load()
    except (ImportError, AttributeError) as error:
        logger.warning("%s cannot be loaded, so its paths are absent: %s", source, error)
        return []
    endpoints = [*value] if isinstance(value, Iterable) else [value]
    for endpoint in endpoints:
        if not isinstance(endpoint, Endpoint):
            raise ConfigError(
                f"{source} is {endpoint!r:.100}; it must be an Endpoint of "
                "ed_esurge.server.routing, or a tuple of endpoints"
            )
    return endpoints


def get_batched_endpoints() -> dict[str, Endpoint]:
    """Return the endpoints that the lines of a batch may call, by path."""
    return {endpoint.path: endpoint for endpoint in list_endpoints() if endpoint.batched}
