"""The fields of a recipe that are no products: what they may be, and which go together."""

from __future__ import annotations

import math
from typing import Any, Literal, get_args

from mixprec.gemm.api import GemmSpec

PRODUCTS = ("output", "grad_input", "grad_weight")
Base = Literal["fp64", "fp32", "bf16", "fp16"]
Update = Literal["plain", "masters", "stochastic", "compensated"]
NARROW = ("bf16", "fp16")
"""The bases of 16 bits, in which the policy of operations is at work."""
DYNAMIC: Literal["dynamic"] = "dynamic"


def check_recipe(recipe: Any) -> None:
    """Raise for the first field of a recipe that is of another type, or out of its range."""
    for product in PRODUCTS:
        gemm = getattr(recipe, product)
        if not isinstance(gemm, GemmSpec):
            raise TypeError(
                f"{product}: got {type(gemm).__name__}; must be a GemmSpec; pass "
                "GemmSpec(a=..., b=...)"
            )
    for name, known in (
        ("base", get_args(Base)),
        ("parameters", get_args(Base)),
        ("update", get_args(Update)),
    ):
        if getattr(recipe, name) not in known:
            raise ValueError(
                f"{name}: got {getattr(recipe, name)!r}; must be one of {', '.join(known)}"
            )
    if recipe.update != "plain" and recipe.parameters not in NARROW:
        raise ValueError(
            f"update: got {recipe.update!r} with parameters {recipe.parameters}; only parameters "
            "of 16 bits need it; use parameters='bf16' or update='plain'"
        )
    for name in ("keep_batchnorm_fp32", "attention"):
        if not isinstance(getattr(recipe, name), bool):
            raise ValueError(
                f"{name}: got {getattr(recipe, name)!r}; must be True or False; choose one"
            )
    if recipe.attention and any(spec is not None and spec.is_delayed for spec in recipe.specs):
        raise ValueError(
            "attention: got True with delayed scaling; histories belong to one product of a layer, "
            "attention has many; use a recipe with dynamic scales"
        )
    if not _is_loss_scale(recipe.loss_scale):
        raise ValueError(
            f"loss_scale: got {recipe.loss_scale!r}; must be 'dynamic', a finite number above 0 "
            "or None; use 'dynamic' for fp16"
        )


def _is_loss_scale(value: object) -> bool:
    if value is None or value == DYNAMIC:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value < math.inf
