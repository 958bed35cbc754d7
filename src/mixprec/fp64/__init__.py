"""FP64 products from small integers: emulated, certified, reproducible, and beyond double."""

from mixprec.fp64.engines import ENGINES, Engine
from mixprec.fp64.matmul import matmul
from mixprec.fp64.report import MatmulReport, record
from mixprec.fp64.settings import Settings, settings_from_environment

__all__ = [
    "ENGINES",
    "Engine",
    "MatmulReport",
    "Settings",
    "matmul",
    "record",
    "settings_from_environment",
]
