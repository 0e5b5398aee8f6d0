"""Builders of the parts of an `eLargeModel`."""
