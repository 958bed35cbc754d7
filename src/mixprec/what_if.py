"""What if a tensor were an operand of a recipe: the error of each, and tensors to try."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import safetensors
import torch
from torch import Tensor

from mixprec.noise import Noise
from mixprec.quant_spec import QuantSpec
from mixprec.quantization import QuantizedTensor, quantize
from mixprec.quantization_error import ErrorFigures, quantize_error
from mixprec.recipes import OPERANDS, RECIPES, Recipe, operands
from mixprec.scaling import delayed_state

_SHAPE = (512, 1024)
_SPREAD = 2.0
_OUTLIER_SHARE, _OUTLIER_SIZE = 1e-3, 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """One way of quantising: the operands that do it, by recipe, and its error."""

    spec: QuantSpec
    uses: Mapping[str, tuple[str, ...]]
    figures: ErrorFigures


def what_if(
    x: Tensor,
    recipes: Iterable[Recipe] = RECIPES.values(),
    *,
    paths: Collection[str] = OPERANDS,
    seed: int = 0,
) -> tuple[WhatIf, ...]:
    """A tensor under every distinct operand of recipes, in the recipes' order.

    Args:
        x: [..., contraction], a floating-point type of at most 64 bits.
        recipes: Those that quantise nothing add no row.
        paths: Which of the operands.
        seed: Of the noise of stochastic rounding.

    Returns:
        A row a specification. A delayed scale is made of x itself, as in its first use.
    """
    uses: dict[QuantSpec, dict[str, tuple[str, ...]]] = {}
    for recipe in recipes:
        for path, spec in operands(recipe).items():
            if spec is not None and path in paths:
                mine = uses.setdefault(spec, {})
                mine[str(recipe)] = (*mine.get(str(recipe), ()), path)
    return tuple(
        WhatIf(spec=spec, uses=names, figures=_figures(x, spec, seed))
        for spec, names in uses.items()
    )


def _figures(x: Tensor, spec: QuantSpec, seed: int) -> ErrorFigures:
    return quantize_error(x, spec, noise=Noise(seed=seed) if spec.is_stochastic else None)


def first_use(x: Tensor, spec: QuantSpec, *, seed: int = 0) -> QuantizedTensor:
    """x [..., contraction] as an operand whose error ``what_if`` tells: nothing went before it."""
    noise = Noise(seed=seed) if spec.is_stochastic else None
    state = delayed_state(spec.amax_history_len, x.device) if spec.is_delayed else None
    return quantize(x, spec, noise=noise, state=state)


def _normal(generator: torch.Generator) -> Tensor:
    return torch.randn(_SHAPE, generator=generator)


def _lognormal(generator: torch.Generator) -> Tensor:
    """Magnitudes over many binades, as gradients have them; signs at random."""
    size = torch.randn(_SHAPE, generator=generator).mul_(_SPREAD).exp_()
    return size.copysign_(torch.randn(_SHAPE, generator=generator))


def _outliers(generator: torch.Generator) -> Tensor:
    """Normal but for one element in a thousand, 100 times as large, as activations have them."""
    x = torch.randn(_SHAPE, generator=generator)
    is_large = torch.rand(_SHAPE, generator=generator) < _OUTLIER_SHARE
    return torch.where(is_large, x * _OUTLIER_SIZE, x)


SAMPLES: Mapping[str, Callable[[torch.Generator], Tensor]] = MappingProxyType(
    {"normal": _normal, "lognormal": _lognormal, "outliers": _outliers}
)
"""Tensors [512, 1024] to try, by the distribution of their elements."""


def load_data(source: str, *, seed: int = 0) -> Tensor:
    """A tensor by the name of a distribution, or from a file.

    Args:
        source: A name in ``SAMPLES``; a .npy file; or a .safetensors file, with ``:NAME`` behind it
            where it holds several tensors.
        seed: Of the distribution.

    Returns:
        float32 for a distribution, else as stored.

    Raises:
        ValueError: Another source, no such tensor in the file, or one that is not floating-point
            with at least one axis.
    """
    if source in SAMPLES:
        return SAMPLES[source](torch.Generator().manual_seed(seed))
    path, _, name = source.partition(".safetensors:")
    if name:
        path += ".safetensors"
    try:
        x = _FILES[Path(path).suffix](path, name)
    except KeyError:
        raise ValueError(
            f"data: got {source!r}; must be {', '.join(SAMPLES)}, or a .npy or .safetensors file; "
            "name one"
        ) from None
    except (OSError, EOFError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"data: got {source!r}; it cannot be read ({error}); give a file"
        ) from error
    if not x.is_floating_point() or not x.ndim:
        raise ValueError(
            f"data: got {x.dtype} of shape {tuple(x.shape)} in {source}; must be floating-point "
            "with at least one axis; choose another tensor"
        )
    return x


def _from_numpy(path: str, name: str) -> Tensor:
    array = np.load(path, allow_pickle=False)
    if array.dtype.kind != "f" or array.dtype.itemsize > 8:
        raise ValueError(
            f"data: got {array.dtype} in {path}; must be float16, float32 or float64; convert it"
        )
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _from_safetensors(path: str, name: str) -> Tensor:
    with safetensors.safe_open(path, framework="pt") as file:
        names = list(file.keys())
        if not name and len(names) == 1:
            name = names[0]
        if name not in names:
            raise ValueError(
                f"data: got {name!r} of {path}; it holds {', '.join(sorted(names))}; name one of "
                f"them, as in {path}:{names[0] if names else 'NAME'}"
            )
        found: Tensor = file.get_tensor(name)
    return found


_FILES: Mapping[str, Callable[[str, str], Tensor]] = MappingProxyType(
    {".npy": _from_numpy, ".safetensors": _from_safetensors}
)
