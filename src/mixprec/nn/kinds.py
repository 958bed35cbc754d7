"""Which layers multiply, and the class that each gets: one table, and the way back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from mixprec.nn import convolution, recurrent
from mixprec.nn.attention import (
    CallingEncoder,
    CallingEncoderLayer,
    QuantizedMultiheadAttention,
)
from mixprec.nn.bilinear import QuantizedBilinear
from mixprec.nn.calls import QuantizedCalls, called_names
from mixprec.nn.layer import QuantizedLayer
from mixprec.nn.linear import QuantizedLinear
from mixprec.nn.wrapping import sharded_class

KINDS: Mapping[type[nn.Module], type[QuantizedLayer]] = MappingProxyType(
    {
        nn.Linear: QuantizedLinear,
        nn.Conv1d: convolution.QuantizedConv1d,
        nn.Conv2d: convolution.QuantizedConv2d,
        nn.Conv3d: convolution.QuantizedConv3d,
        nn.ConvTranspose1d: convolution.QuantizedConvTranspose1d,
        nn.ConvTranspose2d: convolution.QuantizedConvTranspose2d,
        nn.ConvTranspose3d: convolution.QuantizedConvTranspose3d,
        nn.MultiheadAttention: QuantizedMultiheadAttention,
        nn.RNN: recurrent.QuantizedRNN,
        nn.GRU: recurrent.QuantizedGRU,
        nn.LSTM: recurrent.QuantizedLSTM,
        nn.RNNCell: recurrent.QuantizedRNNCell,
        nn.GRUCell: recurrent.QuantizedGRUCell,
        nn.LSTMCell: recurrent.QuantizedLSTMCell,
        nn.Bilinear: QuantizedBilinear,
    }
)
"""The layers of torch that multiply, and what each becomes."""
CALLING: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {
        nn.TransformerEncoderLayer: CallingEncoderLayer,
        nn.TransformerEncoder: CallingEncoder,
    }
)
"""Modules that would pass their layers by, and what each becomes around converted ones."""
# torch's own subclass, with nothing of its own, of every MultiheadAttention's out_proj
_SAME: dict[type[nn.Module], type[nn.Module]] = {NonDynamicallyQuantizableLinear: nn.Linear}

_CONVERTED: dict[type[nn.Module], type[nn.Module]] = {**KINDS, **CALLING}
_ORIGINAL = {converted: original for original, converted in _CONVERTED.items()}


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The layer of torch's that a module is, or a subclass of; None if it does not multiply."""
    return next((kind for kind in plain_class(module).__mro__ if kind in KINDS), None)


def calling_of(module: nn.Module) -> type[nn.Module] | None:
    """The entry of ``CALLING`` that a module is, or a subclass of; None for all others."""
    return next((kind for kind in plain_class(module).__mro__ if kind in CALLING), None)


def is_kind_itself(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's, parametrised or not, and no subclass of a user's."""
    own = sharded_class(plain_class(module))
    if parametrize.is_parametrized(module):
        own = own.__bases__[0]
    return _SAME.get(own, own) in KINDS


def layer_class(module: nn.Module, include: Collection[str] = ()) -> type[QuantizedLayer] | None:
    """What a module becomes by conversion, or a base of that; None if it does not multiply.

    Of a module that is no layer of torch's, what its forward calls may multiply: where its own code
    names such a function, or the module is included by its class' name.
    """
    kind, own = kind_of(module), plain_class(module)
    if kind is not None:
        return KINDS[kind]
    return QuantizedCalls if called_names(own) or own.__name__ in include else None


def converted_class(module: nn.Module) -> type[nn.Module]:
    """The class that a module gets, made once.

    For a subclass of a layer it lies between the two, so that a forward that calls
    ``super().forward`` reaches the quantised products there.
    """
    original = plain_class(module)
    if original not in _CONVERTED:
        kind, calling = kind_of(module), calling_of(module)
        if calling is not None:
            bases: tuple[type, ...] = (CALLING[calling], original)
        else:
            bases = (QuantizedCalls, original) if kind is None else (original, KINDS[kind])
        converted = type(f"Quantized{original.__name__}", bases, {"__reduce_ex__": _reduce})
        _CONVERTED[original], _ORIGINAL[converted] = converted, original
    return _CONVERTED[original]


def is_converted_class(kind: type[nn.Module]) -> bool:
    """Whether a class is one that conversion gives, not one that something else derived from it."""
    return kind in _ORIGINAL


def plain_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module; of a converted one the class that it had before."""
    return _ORIGINAL.get(type(module), type(module))


def _reduce(module: Any, protocol: Any) -> Any:
    return _rebuild, (plain_class(module),), module.__getstate__()


def _rebuild(original: type[nn.Module]) -> nn.Module:
    module = original.__new__(original)
    cls = converted_class(module)
    return cls.__new__(cls)
