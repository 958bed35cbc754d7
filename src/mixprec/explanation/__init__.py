"""What runs in which type: every operation of a forward and a backward pass, and what decided."""

from mixprec.explanation.operations import LOSS, OperationRow
from mixprec.explanation.passes import explain, explain_run

__all__ = ["LOSS", "OperationRow", "explain", "explain_run"]
