"""One figure of a page: a plot with its caption, a choice of what it shows, and its table."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

# Each stands out by 3 to 1 from the page's background, light and dark; after Okabe and Ito, whose
# colours are told apart by people who see few.
COLORS = ("#0a7abf", "#d55e00", "#009e73", "#c2649a", "#a67c00", "#8a6fd1", "#7f7f7f")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
ALARM_COLOR = "#dc3545"
MOST_POINTS = 2000
_AXIS = {"linecolor": "#808080", "zeroline": False}
_MARGIN = {"l": 60, "r": 10, "t": 30, "b": 45}
_LAYOUT: Mapping[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {"size": 12, "family": "system-ui, sans-serif"},
    "template": {},
    "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    "hoverlabel": {"bgcolor": "#24292f", "font": {"color": "#ffffff"}, "namelength": -1},
}
# a drag zooms, a double click goes back; a bar of tools would cover the legend
_INTERACTION = {"responsive": True, "displayModeBar": False}


def figure(
    name: str,
    caption: str,
    traces: Sequence[Mapping[str, Any]],
    *,
    x: Mapping[str, Any],
    y: Mapping[str, Any],
    across: str = "step",
    height: int = 420,
    choices: Sequence[tuple[str, str]] | None = None,
) -> str:
    """A plot as HTML; the page that holds it brings the plotting library.

    Args:
        name: Its id, one in a page.
        caption: What it shows, which is also what a screen reader says of it.
        traces: plotly's traces. With ``choices`` one is shown at a time, first the one that is
            visible.
        x, y: The axes beside their defaults.
        across: What ``x`` is, at the head of the table's first column.
        height: In pixels.
        choices: A group and a name for each trace.
    """
    layout = {
        **_LAYOUT,
        "height": height,
        "margin": _MARGIN | ({"t": 70} if choices else {}),
        "xaxis": {**_AXIS, **x},
        "yaxis": {
            **_AXIS,
            "automargin": True,
            **y,
            "title": {"text": y.get("title"), "standoff": 12},
        },
        "showlegend": choices is None and any(trace.get("name") for trace in traces),
    }
    drawn = _plotly("plotly.io").to_html(
        {"data": list(traces), "layout": layout},
        full_html=False,
        include_plotlyjs=False,
        div_id=name,
        default_height=f"{height}px",
        config=_INTERACTION,
    )
    return (
        f'<figure>\n<figcaption id="{name}-caption">{escape(caption)}</figcaption>\n'
        f"{_chooser(name, traces, choices) if choices else ''}"
        f'<div class="drawing" role="img" aria-labelledby="{name}-caption">{drawn}</div>\n'
        f'<details data-plot="{name}" data-across="{escape(across)}">\n'
        "<summary>The same figures as a table</summary>\n"
        f'<div class="wide" role="region" tabindex="0" aria-labelledby="{name}-caption"></div>\n'
        "</details>\n</figure>\n"
    )


def line(name: str, x: Sequence[Any], y: Sequence[Any], place: int, **more: Any) -> dict[str, Any]:
    """A curve in the colour and the dashes of its place among the runs.

    Of more than ``MOST_POINTS`` points each stretch keeps its lowest and its highest.
    """
    x, y = _thinned(x, y)
    style = {"color": color(place), "dash": DASHES[place % len(DASHES)]}
    return {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "lines",
        **more,
        "line": style | more.get("line", {}),
    }


def marks(
    name: str, x: Sequence[Any], y: Sequence[Any], place: int, symbol: str, **more: Any
) -> dict[str, Any]:
    """Points of a run in its colour."""
    marker = {"color": color(place), "symbol": symbol, "size": 9}
    return {
        "type": "scatter",
        "name": name,
        "x": list(x),
        "y": list(y),
        "mode": "markers",
        "cliponaxis": False,
        "marker": marker,
        **more,
    }


def color(place: int) -> str:
    """The colour of the run, or recipe, at a place."""
    return COLORS[place % len(COLORS)]


def plotting_library() -> str:
    """The source of plotly's script.

    Raises: ImportError: plotly is missing (extra ``report``).
    """
    source: str = _plotly("plotly.offline").get_plotlyjs()
    return source


def _plotly(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"plotly: got {error}; pages need it; run pip install 'mixprec[report]'"
        ) from error


def _chooser(
    name: str, traces: Sequence[Mapping[str, Any]], choices: Sequence[tuple[str, str]]
) -> str:
    groups: dict[str, list[str]] = {}
    for (group, text), trace in zip(choices, traces, strict=True):
        chosen = "" if trace.get("visible") is False else " selected"
        groups.setdefault(group, []).append(f"<option{chosen}>{escape(text)}</option>")
    inner = "".join(
        f'<optgroup label="{escape(group)}">{"".join(options)}</optgroup>'
        for group, options in groups.items()
    )
    return (
        f'<p><label for="{name}-choice">Show</label> '
        f'<select id="{name}-choice" data-plot="{name}">{inner}</select></p>\n'
    )


def _thinned(x: Sequence[Any], y: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(x) <= MOST_POINTS:
        return x, y
    stretch = -(-len(x) // (MOST_POINTS // 2))
    kept: list[int] = []
    for start in range(0, len(x), stretch):
        places = [i for i in range(start, min(start + stretch, len(x))) if y[i] is not None]
        kept += sorted(
            {min(places, key=y.__getitem__), max(places, key=y.__getitem__)} if places else {start}
        )
    return [x[i] for i in kept], [y[i] for i in kept]
