"""The base class of models, and the implementation of its methods."""
