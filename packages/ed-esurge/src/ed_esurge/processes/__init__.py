"""Replicas of a model in processes of their own, behind one server."""
