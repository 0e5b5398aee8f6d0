"""Endpoints for operators: health, sleep, adapters."""
