"""Tests of the wheels in fresh environments, outside the workspace and its lock."""
