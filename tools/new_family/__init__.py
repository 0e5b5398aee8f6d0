"""Draft a family of ed-models from the model of `transformers`.

`lineage` reads the modular file of a type, `tiny` proposes small configurations, `trace` runs the
small model and records how its parts depend on each other, `attention`, `feed_forward` and `names`
express these facts in the vocabulary of this project, `draft` writes the source, and `verify`
compares logits.
"""
