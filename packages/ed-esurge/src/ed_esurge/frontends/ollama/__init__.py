"""Ollama's API: one module for each endpoint.

The requests are converted to chat requests, so every option has one implementation. Answers and
streams have Ollama's formats: a stream consists of lines of JSON.
"""
