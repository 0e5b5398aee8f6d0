"""Endpoints of llama.cpp's server that other APIs do not have: one module for each endpoint."""
