"""Mixtures of experts: the router, the experts, and the methods that compute them."""
