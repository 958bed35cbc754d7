"""The largest batch that fits: doubling until one does not, then bisection."""

from collections.abc import Callable

MOST = 2**20


def largest(fits: Callable[[int], bool], most: int = MOST) -> int:
    """The largest number of rows that fits, if whatever is smaller than one that fits does too.

    Args:
        fits: Tries a batch; called about 2 log2(result) times, never twice with the same number.
        most: No larger one is tried.

    Returns: 0 where not even one row fits.
    """
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good
