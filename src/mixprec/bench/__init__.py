"""What recipes cost: step time, throughput and memory of models, and tables of single products."""

from mixprec.bench.steps import run

__all__ = ["run"]
