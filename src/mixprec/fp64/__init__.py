"""FP64 products from small integers: emulated, certified, reproducible, and beyond double."""

from mixprec.fp64.cholesky import cholesky
from mixprec.fp64.engines import ENGINES, Engine
from mixprec.fp64.intercept import emulate
from mixprec.fp64.lu import lu
from mixprec.fp64.matmul import matmul
from mixprec.fp64.operations import OPERATIONS
from mixprec.fp64.qr import qr
from mixprec.fp64.report import MatmulReport, record
from mixprec.fp64.settings import Settings, settings_from_environment
from mixprec.fp64.solve import solve
from mixprec.fp64.sparse import spmm
from mixprec.fp64.tally import Tally
from mixprec.fp64.triangular import solve_triangular

__all__ = [
    "ENGINES",
    "OPERATIONS",
    "Engine",
    "MatmulReport",
    "Settings",
    "Tally",
    "cholesky",
    "emulate",
    "lu",
    "matmul",
    "qr",
    "record",
    "settings_from_environment",
    "solve",
    "solve_triangular",
    "spmm",
]
