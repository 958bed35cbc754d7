"""Products of quantised operands: one definition, several implementations."""

from mixprec.gemm.api import IMPLS, GemmSpec, quantized_matmul, resolve, resolve_spec

__all__ = ["IMPLS", "GemmSpec", "quantized_matmul", "resolve", "resolve_spec"]
