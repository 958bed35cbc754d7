"""The layer order of docs/design.md: a module imports only from layers above it in ``LAYERS``."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "mixprec"

LAYERS = [
    "formats",
    "modes",
    "torch_operators",
    "hardware",
    "variables",
    "cublas",
    "measure",
    "memory",
    "noise",
    "compiled_calls",
    "compiled_quantizing",
    "compiled_transforms",
    "rounding",
    "codes",
    "windows",
    "sharding",
    "scale_rules",
    "loops",
    "scaling",
    "hadamard",
    "quant_spec",
    "serialization",
    "quantized_tensor",
    "quantization",
    "quantization_error",
    "fp64",
    "recomputation",
    "gemm",
    "recipe_fields",
    "recipes",
    "what_if",
    "operation",
    "policy",
    "gathered_weight",
    "linear_products",
    "autograd",
    "contraction",
    "attention",
    "grouped",
    "nn",
    "optim",
    "amp",
    "inspection",
    "train",
    "bench",
    "pages",
    "support",
    "survey",
    "planning",
    "launch",
    "explanation",
    "layer_errors",
    "mixprec",  # the package's own __init__, which re-exports the public names
    "cli",
    "__main__",
]

# What importlib is given, also as the constant part of an f-string.
MODULE_STRING = re.compile(r"mixprec(\.\w+)+\.?")


def module_name(path: Path) -> str:
    """The dotted name below the package: gemm/impl/emulated.py is gemm.impl.emulated."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "mixprec"


FILES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer(module: str) -> str:
    return module.split(".")[0]


def targets(node: ast.AST, package: list[str]) -> list[str]:
    """Dotted names, from the root ``mixprec`` on, that a statement or a string imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value.rstrip(".")] if MODULE_STRING.fullmatch(node.value) else []
    if not isinstance(node, ast.ImportFrom):
        return []
    start = package[: len(package) - node.level + 1] if node.level else []
    base = ".".join([*start, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def imports(module: str) -> set[str]:
    """Modules of the package that a module imports, lazily or under TYPE_CHECKING too."""
    path = FILES[module]
    package = ["mixprec", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        for target in targets(node, package):
            root, *names = target.split(".")
            if root != "mixprec":
                continue
            while names and ".".join(names) not in FILES:
                names.pop()
            found.add(".".join(names) or "mixprec")
    return found - {module}


def test_every_module_belongs_to_one_layer() -> None:
    assert {layer(module) for module in FILES} == set(LAYERS)


@pytest.mark.parametrize("module", FILES)
def test_module_imports_only_from_layers_above(module: str) -> None:
    below = {
        name for name in imports(module) if LAYERS.index(layer(name)) > LAYERS.index(layer(module))
    }
    assert not below


def test_imports_have_no_cycle() -> None:
    order = graphlib.TopologicalSorter({module: imports(module) for module in FILES})
    assert set(order.static_order()) >= set(FILES)


def test_impls_do_not_import_each_other() -> None:
    impls = {module for module in FILES if module.startswith("gemm.impl.")}
    assert impls
    assert {module: imports(module) & impls for module in impls} == {impl: set() for impl in impls}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import mixprec.rounding", ["mixprec.rounding"]),
        ("from mixprec.gemm import api", ["mixprec.gemm.api"]),
        ("from . import api", ["mixprec.gemm.api"]),
        ("from ..rounding import encode", ["mixprec.rounding.encode"]),
        ("def f():\n    from mixprec import cli", ["mixprec.cli"]),
        ("load(f'mixprec.gemm.impl.{name}')", ["mixprec.gemm.impl"]),
    ],
)
def test_targets_sees_every_way_of_importing(source: str, expected: list[str]) -> None:
    found = [
        name for node in ast.walk(ast.parse(source)) for name in targets(node, ["mixprec", "gemm"])
    ]
    assert found == expected
