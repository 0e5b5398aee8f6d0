"""APIs and pages beside those of OpenAI and Anthropic, which entry points add to the server."""
