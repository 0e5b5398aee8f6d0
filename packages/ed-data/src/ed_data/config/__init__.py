"""Options of a mixture: sources, tokenization, packing, mixing and saving.

Names and defaults are those of EasyDeL's YAML reference. The subpackage imports pydantic and
nothing heavier, so a configuration is validated in milliseconds.
"""

from ed_data.config.media import Media
from ed_data.config.mixture import Mixture, MixturePoint, MixtureSchedule, Saving, Tokenization
from ed_data.config.source import FILE_TYPES, Inform

__all__ = [
    "FILE_TYPES",
    "Inform",
    "Media",
    "Mixture",
    "MixturePoint",
    "MixtureSchedule",
    "Saving",
    "Tokenization",
]
