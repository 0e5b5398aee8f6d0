"""Endpoints of the OpenAI API, and vLLM's additions to it."""
