"""FP64 products from small integers: emulated, certified, reproducible, and beyond double."""

from mixprec.fp64.engines import ENGINES, Engine
from mixprec.fp64.intercept import emulate
from mixprec.fp64.matmul import matmul
from mixprec.fp64.operations import OPERATIONS
from mixprec.fp64.report import MatmulReport, record
from mixprec.fp64.settings import Settings, settings_from_environment
from mixprec.fp64.tally import Tally

__all__ = [
    "ENGINES",
    "OPERATIONS",
    "Engine",
    "MatmulReport",
    "Settings",
    "Tally",
    "emulate",
    "matmul",
    "record",
    "settings_from_environment",
]
