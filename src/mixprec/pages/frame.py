"""What every page has beside its content: the style, light and dark, and one short script."""

from __future__ import annotations

# Text and lines have these colours in plots too, so that those follow the scheme without a script.
STYLE = """
:root { color-scheme: light dark;
  --paper: #ffffff; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --shade: #f3f5f7;
  --link: #0550ae; --alarm: #a40e26; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #14171b; --ink: #e6e9ec; --dim: #a3adb8; --line: #3a424b; --shade: #1f242a;
  --link: #79b8ff; --alarm: #ff9a9a; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; background: var(--paper);
  color: var(--ink); overflow-wrap: break-word; }
header, nav, main, footer { max-width: 80rem; margin: 0 auto; padding: 0.5rem 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 1rem 0 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; padding-top: 0.5rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2rem 0 0.3rem; overflow-wrap: anywhere; }
p { margin: 0.4rem 0; max-width: 50rem; }
a { color: var(--link); }
nav { position: sticky; top: 0; z-index: 2; background: var(--paper);
  border-bottom: 1px solid var(--line); overflow-x: auto; white-space: nowrap; }
nav a { margin-right: 1rem; }
section { scroll-margin-top: 2.5rem; }
.skip { position: absolute; left: -100rem; }
.skip:focus { left: 1rem; background: var(--paper); z-index: 3; }
.alarm { color: var(--alarm); font-weight: 600; }
figure { margin: 0.8rem 0 1.2rem; }
figcaption, caption, footer { color: var(--dim); }
caption { text-align: left; padding-bottom: 0.3rem; max-width: calc(100vw - 2rem); }
figcaption { max-width: 50rem; }
details { margin: 0.4rem 0; }
summary { cursor: pointer; color: var(--link); width: fit-content; }
select { font: inherit; max-width: 100%; color: var(--ink); background: var(--shade);
  border: 1px solid var(--dim); border-radius: 4px; padding: 0.2rem; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
.wide { overflow-x: auto; max-width: 100%; }
figure .wide { max-height: 30rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.25rem 0.8rem 0.25rem 0; border-bottom: 1px solid var(--line);
  text-align: right; vertical-align: top; overflow-wrap: normal; }
thead th { vertical-align: bottom; }
th { font-weight: 600; }
th:first-child, .text, .long { text-align: left; }
.text { white-space: nowrap; }
.long { max-width: 32rem; min-width: 14rem; }
.drawing .js-plotly-plot { width: 100%; }
.drawing .main-svg text { fill: var(--ink) !important; }
.drawing .hoverlayer text { fill: #ffffff !important; }
.drawing .gridlayer path, .drawing .zerolinelayer path { stroke: var(--line) !important; }
@media (max-width: 30rem) { h1 { font-size: 1.3rem; } }
@media print { nav, .skip { display: none; } .wide { overflow: visible; max-height: none; } }
"""

# A table is made when it is opened: as text of the page it would outweigh everything else.
SCRIPT = """
"use strict";
const column = (trace, number) => trace.name || `${number + 1}`;
const isShown = trace => trace.visible !== false && trace.visible !== "legendonly";
function rowsOf(plot, across) {
  const traces = plot.data.filter(isShown);
  if (traces.length && traces[0].type === "heatmap") {
    const {x, y, z} = traces[0];
    const heading = ["layer", ...x.map(step => `${across} ${step}`)];
    return [heading, ...y.map((name, i) => [name, ...z[i]])];
  }
  const places = [...new Set(traces.flatMap(trace => Array.from(trace.x)))];
  if (places.every(place => typeof place === "number")) places.sort((a, b) => a - b);
  const known = traces.map(trace => new Map(Array.from(trace.x, (place, i) =>
    [place, trace.text && trace.mode === "markers" ? trace.text[i] : trace.y[i]])));
  return [[across, ...traces.map(column)],
    ...places.map(place => [place, ...known.map(values => values.get(place))])];
}
function written(value) {
  if (typeof value !== "number") return (value ?? "").toString().replaceAll("<br>", " ");
  return Number.isInteger(value) ? value.toLocaleString("en") : `${Number(value.toPrecision(5))}`;
}
function fill(details) {
  const table = document.createElement("table");
  const head = table.createTHead(), body = table.createTBody();
  const plot = document.getElementById(details.dataset.plot);
  rowsOf(plot, details.dataset.across).forEach((row, place) => {
    const line = (place ? body : head).insertRow();
    row.forEach((value, number) => {
      const cell = document.createElement(place && number ? "td" : "th");
      if (cell.tagName === "TH") cell.scope = place ? "row" : "col";
      cell.textContent = written(value);
      line.append(cell);
    });
  });
  details.querySelector(".wide").replaceChildren(table);
}
for (const details of document.querySelectorAll("details[data-plot]")) {
  details.addEventListener("toggle", () => details.open && fill(details));
}
for (const chooser of document.querySelectorAll("select[data-plot]")) {
  const choose = async () => {
    const plot = document.getElementById(chooser.dataset.plot);
    await Plotly.restyle(plot, {visible: plot.data.map((_, i) => i === chooser.selectedIndex)});
    document.querySelectorAll(`details[open][data-plot="${plot.id}"]`).forEach(fill);
  };
  chooser.addEventListener("change", choose);
  // a browser may keep the choice of the page's last visit
  if (!chooser.options[chooser.selectedIndex].defaultSelected) choose();
}
"""
