"""What a run takes and what runs natively, on hardware that need not be there."""

from mixprec.planning.planner import plan

__all__ = ["plan"]
