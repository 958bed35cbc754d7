"""Writes the tables of README.md and docs/ from the code that they describe.

A region between ``<!-- generated: NAME -->`` and ``<!-- end: NAME -->`` is replaced by what the
function of that name in ``TABLES`` returns. ``--check`` writes nothing and exits with 1 when a
region is out of date.
"""

from __future__ import annotations

import argparse
import ast
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path

from mixprec.formats import FORMATS, FloatFormat
from mixprec.gemm import GemmSpec
from mixprec.quantization import QuantSpec
from mixprec.recipes import NARROW, PRODUCTS, RECIPES, Recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "design.md", ROOT / "docs" / "numerics.md"]
PACKAGE = ROOT / "src" / "mixprec"
REGION = re.compile(r"(<!-- generated: (\w+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)


def number(value: float) -> str:
    """A limit of a format as people write it: 448, 2^-9, 3.403e38."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 1 <= value <= 64:
        return f"2^{exponent - 1}"
    return f"{value:g}" if value < 1e6 else f"{value:.3e}".replace("e+", "e")


def specials(fmt: FloatFormat) -> str:
    """The codes of a format that are no finite numbers."""
    if fmt.has_inf:
        return "inf, NaN"
    return "NaN" if fmt.has_nan else "none"


def formats_table() -> list[str]:
    """One row a format."""
    lines = [
        "| format | bits | exp., mant. | max | smallest normal | subnormal | eps | specials |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, fmt in FORMATS.items():
        limits = (fmt.max, fmt.smallest_normal, fmt.smallest_subnormal, fmt.eps)
        cells = [name, f"{fmt.bits}", f"{fmt.exponent}, {fmt.mantissa}", *map(number, limits)]
        lines.append(f"| {' | '.join([*cells, specials(fmt)])} |")
    return lines


def operand(spec: QuantSpec | None) -> str:
    """One operand in words: format, block, scale rule."""
    if spec is None:
        return "high precision"
    free, contraction = spec.block
    blocks = {(-1, -1): "tensor", (1, -1): "row"}
    block = blocks.get(spec.block, f"{free}x{contraction}")
    words = [str(spec.format)]
    if spec.scale_rule != "none":
        words += [block, f"`{spec.scale_rule}`"]
    if spec.amax_history_len:
        words.append(f"delayed ({spec.amax_history_len})")
    if spec.is_stochastic:
        words.append("stochastic")
    if spec.hadamard:
        words.append("RHT")
    return " ".join(words)


def product(gemm: GemmSpec) -> str:
    """One product in words: its operands, and what the result is rounded to."""
    a, b = operand(gemm.a), operand(gemm.b)
    words = f"{a} both" if a == b else f"{a}; {b}"
    words += ", exact sums" if gemm.is_exact else ""
    return words if gemm.out is None else f"{words}, result {operand(gemm.out)}"


def around(recipe: Recipe) -> list[str]:
    """What a recipe does outside the products: base, loss scale, parameters, updates."""
    scale = f", {recipe.loss_scale} loss scale" if recipe.loss_scale else ""
    update = "" if recipe.parameters not in NARROW else f", {recipe.update} updates"
    return [f"{recipe.base}{scale}", f"{recipe.parameters}{update}"]


def recipes_table() -> list[str]:
    """One row a recipe: its base, its parameters, and the operands of its three products."""
    lines = [
        "| recipe | base | parameters | output: x, w | grad_input: g, w | grad_weight: g, x |",
        "|---|---|---|---|---|---|",
    ]
    for name, recipe in RECIPES.items():
        first, *rest = (product(getattr(recipe, part)) for part in PRODUCTS)
        products = [first, *("the same" if text == first else text for text in rest)]
        lines.append(f"| {' | '.join([f'`{name}`', *around(recipe), *products])} |")
    return lines


def summary(path: Path) -> str:
    """The first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    return docstring.splitlines()[0] if docstring else ""


def modules_table() -> list[str]:
    """The tree of modules, each with the first line of its docstring."""
    lines = ["```", "src/mixprec/"]
    for path in sorted(PACKAGE.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE).parts):
        *folders, name = path.relative_to(PACKAGE).parts
        if name == "__init__.py":
            name, folders = f"{folders[-1]}/" if folders else name, folders[:-1]
        lines.append(f"{'  ' * (len(folders) + 1) + name:<22} {summary(path)}".rstrip())
    return [*lines, "```"]


TABLES: dict[str, Callable[[], list[str]]] = {
    "formats": formats_table,
    "recipes": recipes_table,
    "modules": modules_table,
}


def regenerate(text: str) -> str:
    """The page with every generated region written anew."""

    def fill(match: re.Match[str]) -> str:
        return match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3]

    return REGION.sub(fill, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only report regions out of date")
    is_check = parser.parse_args().check
    stale = {
        page: new for page in PAGES if (new := regenerate(page.read_text())) != page.read_text()
    }
    for page, text in stale.items():
        if is_check:
            print(f"{page.relative_to(ROOT)}: out of date; run python docs/generate.py")
        else:
            page.write_text(text)
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
