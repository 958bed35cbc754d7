"""Statistics as TensorBoard's events, one curve a figure and place; TensorBoard is optional."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mixprec.inspection.statistics import StepStatistics

_PLACE = ("layer", "name", "product", "operand")


class Events:
    """An event file in a folder, begun at the first step that is written.

    Args:
        folder: Where; None writes nothing.
        is_asked: Whether anything is written at all.

    Raises: ValueError: It is asked for, and TensorBoard is not installed.
    """

    def __init__(self, folder: Path | None, *, is_asked: bool) -> None:
        self._folder = folder if is_asked else None
        self._writer: Any = None
        if is_asked:
            _summary_writer()

    def write(self, statistics: StepStatistics) -> None:
        """Each figure of each row, as ``sqnr_db/LAYER.NAME.PRODUCT.OPERAND``."""
        if self._folder is None:
            return
        if self._writer is None:
            # what a run that goes on from a checkpoint had written after it is hidden
            self._writer = _summary_writer()(str(self._folder), purge_step=statistics.step)
        for row in statistics.rows:
            fields = asdict(row)
            place = ".".join(filter(None, (fields.pop(key) for key in _PLACE)))
            for figure, value in fields.items():
                if not isinstance(value, str):
                    self._writer.add_scalar(f"{figure}/{place}", value, statistics.step)

    def close(self) -> None:
        """Write what is left."""
        if self._writer is not None:
            self._writer.close()


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ValueError(
            f"inspect.tensorboard: got true; TensorBoard cannot be imported ({error}); install "
            "mixprec[report], or leave it out"
        ) from error
    return SummaryWriter
