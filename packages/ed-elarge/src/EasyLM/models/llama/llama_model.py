"""The import path of EasyLM's documentation; see `ed_elarge.easylm`."""

from ed_elarge.easylm import LLaMAModel as LLaMAModel
