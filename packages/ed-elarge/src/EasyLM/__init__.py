"""The import paths of EasyLM's documentation; `ed_elarge.easylm` has the classes."""
