"""FP64 from small integers."""

from mixprec.fp64.settings import Settings, settings_from_environment

__all__ = ["Settings", "settings_from_environment"]
