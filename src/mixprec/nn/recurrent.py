"""Converted recurrent layers and cells: a product of the inputs, and one of the state each step.

    RNN     h' = tanh(a + b)                        or relu
    GRU     r = sigmoid(a_r + b_r);  z = sigmoid(a_z + b_z);  n = tanh(a_n + r b_n)
            h' = (h - n) z + n
    LSTM    i, f, o = sigmoid(a + b);  c~ = tanh(a + b), each by its part
            c' = f c + i c~;   h' = o tanh(c')      times weight_hr.T with proj_size

    a = x @ weight_ih.T + bias_ih      [T B, G H]   contraction: K, the features of x
    b = h @ weight_hh.T + bias_hh      [B, G H]     contraction: H, the features of h

Legend: T steps, B sequences, K and H features of inputs and state, G = 1, 3 or 4 gates.
Source of the equations: ``torch.nn.RNN``, ``GRU`` and ``LSTM``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from mixprec.nn.layer import QuantizedLayer
from mixprec.recipes import Recipe
from mixprec.rounding import check_floating

State = tuple[Tensor, ...]
Gates = Callable[[Tensor, Tensor, State], State]
"""From a, b and the state to the next state, h first."""


def _tanh_gates(a: Tensor, b: Tensor, state: State) -> State:
    return ((b + a).tanh(),)


def _relu_gates(a: Tensor, b: Tensor, state: State) -> State:
    return ((b + a).relu(),)


def _gru_gates(a: Tensor, b: Tensor, state: State) -> State:
    a_r, a_z, a_n = a.chunk(3, 1)
    b_r, b_z, b_n = b.chunk(3, 1)
    r, z = (b_r + a_r).sigmoid(), (b_z + a_z).sigmoid()
    n = (a_n + b_n * r).tanh()
    return ((state[0] - n) * z + n,)


def _lstm_gates(a: Tensor, b: Tensor, state: State) -> State:
    i, f, c, o = (b + a).chunk(4, 1)
    cell = f.sigmoid() * state[1] + i.sigmoid() * c.tanh()
    return o.sigmoid() * cell.tanh(), cell


_GATES: Mapping[str, Gates] = {
    "RNN_TANH": _tanh_gates,
    "RNN_RELU": _relu_gates,
    "GRU": _gru_gates,
    "LSTM": _lstm_gates,
}
_STATES = {"LSTM": 2}
_CELL_PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class _Products:
    """The products of one forward pass."""

    def __init__(self, layer: QuantizedLayer, parameters: Mapping[str, Tensor | None]) -> None:
        self._layer = layer
        self._parameters = parameters

    def has(self, name: str) -> bool:
        """Whether there is such a weight."""
        return name in self._parameters

    def multiply(self, x: Tensor, name: str, step: int = 0) -> Tensor:
        """x by a weight, plus the bias that belongs to it."""
        weight = self._parameters[name]
        assert weight is not None
        return self._layer.multiply(
            x,
            weight,
            self._parameters.get(name.replace("weight", "bias")),
            name=name,
            entry=step,
        )


class QuantizedRecurrent(QuantizedLayer, nn.RNNBase):
    """A recurrent layer whose products follow a recipe; made by ``mixprec.convert``.

    Each layer and direction has the products of the module docstring, named by their weights
    ("weight_ih_l0", "weight_hh_l0_reverse"):

        all steps at once                gemm(x[T B, K],           weight_ih[G H, K])
        each step                        gemm(h[B, H],             weight_hh[G H, H])
        each step, with proj_size P      gemm((o tanh(c'))[B, H],  weight_hr[P, H])

    Of each, grad_input contracts the weight's rows and grad_weight the rows of x or h: all steps
    and sequences for weight_ih, the sequences of one step for the others, whose gradients are
    added up over the steps. Of packed sequences there are the rows that they have. Delayed scaling
    has one history a weight for all steps. Gates and states have the type of the products'
    results: x's, or that of a region of 16 bits.

    A weight is quantised once a forward pass (unless stochastically), or, with ``cache_weights``,
    once until it changes. Compiled code unrolls the steps; torch compiles recurrent layers, these
    too, under ``torch._dynamo.config.allow_rnn = True`` alone.

    Raises:
        ValueError: No steps; and what torch's own layer raises.

    Edge cases: no sequences; packed, unsorted, unbatched inputs.

    Exactness: as ``mixprec.linear``, product by product.
    """

    reuses_weights = True

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        # any other size is one of these times gates or directions
        return tuple(filter(None, (layer.input_size, layer.hidden_size, layer.proj_size)))

    def product_names(self) -> tuple[str, ...]:
        return tuple(name for name in self._flat_weights_names if name.startswith("weight"))

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As torch's layer, its products by the recipe."""
        self._update_flat_weights()
        if isinstance(input, PackedSequence):
            rows, batch_sizes, places, places_back = input
            sizes = batch_sizes.tolist()
            first = None if hx is None else self.permute_hidden(hx, places)
            first = self._checked(rows, first, sizes[0], batch_sizes)
            out, last = self._layers(rows, sizes, first)
            packed = PackedSequence(out, batch_sizes, places, places_back)
            return packed, self.permute_hidden(_as_hidden(last), places_back)
        is_batched, batch_axis = input.dim() != 2, 0 if self.batch_first else 1
        x = input if is_batched else input.unsqueeze(batch_axis)
        if hx is not None and not is_batched:
            hx = _as_hidden(tuple(part.unsqueeze(1) for part in _as_state(hx)))
        first = self._checked(x, hx, x.shape[batch_axis], None)
        x_TBK = x.transpose(0, 1) if self.batch_first else x
        steps, batch, features = x_TBK.shape
        if not steps:
            raise ValueError("input: got no steps; there must be one or more; leave it out")
        out, last = self._layers(x_TBK.reshape(-1, features), [batch] * steps, first)
        out = out.reshape(steps, batch, out.shape[-1])
        out = out.transpose(0, 1) if self.batch_first else out
        if is_batched:
            return out, _as_hidden(last)
        return out.squeeze(batch_axis), _as_hidden(tuple(part.squeeze(1) for part in last))

    def _checked(self, x: Tensor, hx: Any, batch: int, batch_sizes: Tensor | None) -> State:
        """The first state, zeros where there is none, once torch's layer has nothing against it."""
        check_floating("input", x)
        if hx is None:
            count = self.num_layers * (2 if self.bidirectional else 1)
            widths = (self.proj_size or self.hidden_size, self.hidden_size)
            hx = _as_hidden(
                tuple(x.new_zeros(count, batch, w) for w in widths[: _STATES.get(self.mode, 1)])
            )
        self.check_forward_args(x, hx, batch_sizes)
        return _as_state(hx)

    def _layers(self, rows: Tensor, sizes: list[int], first: State) -> tuple[Tensor, State]:
        """Output rows and last states of all layers; step t has sizes[t] rows."""
        # what is made inside inference mode is of no use outside it
        keeps_weights = self.cache_weights and not torch.is_inference_mode_enabled()
        if not keeps_weights:
            self._held = {}
        parameters = dict(zip(self._flat_weights_names, self._flat_weights, strict=True))
        products, gates = _Products(self, parameters), _GATES[self.mode]
        suffixes = ("", "_reverse") if self.bidirectional else ("",)
        ends: list[State] = []
        for layer in range(self.num_layers):
            if layer:
                rows = nn.functional.dropout(rows, self.dropout, self.training)
            parts = []
            for suffix in suffixes:
                start = tuple(part[len(ends)] for part in first)
                order = range(len(sizes))[:: -1 if suffix else 1]
                out, end = _steps(gates, products, f"l{layer}{suffix}", rows, sizes, order, start)
                parts.append(out)
                ends.append(end)
            rows = torch.cat(parts, 1)
        if not keeps_weights:
            self._held = {}
        return rows, tuple(map(torch.stack, zip(*ends, strict=True)))

    def __getstate__(self) -> dict[str, Any]:
        # torch's layer makes its weak references anew
        state = super().__getstate__()
        return {key: value for key, value in state.items() if key != "_flat_weight_refs"}


def _as_state(hx: Tensor | Sequence[Tensor]) -> State:
    return (hx,) if isinstance(hx, Tensor) else tuple(hx)


def _as_hidden(state: State) -> Any:
    return state if len(state) > 1 else state[0]


def _steps(
    gates: Gates,
    products: _Products,
    place: str,
    rows: Tensor,
    sizes: list[int],
    order: Sequence[int],
    first: State,
) -> tuple[Tensor, State]:
    """One layer in one direction: output rows, and each sequence's last state."""
    a = products.multiply(rows, f"weight_ih_{place}").split(sizes)
    first = tuple(part.to(a[0].dtype) for part in first)
    state = tuple(part[: sizes[order[0]]] for part in first)
    out: dict[int, Tensor] = {}
    ended: list[State] = []
    for step in order:
        size, before = sizes[step], len(state[0])
        if size < before:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        elif size > before:
            more = (part[before:size] for part in first)
            state = tuple(map(torch.cat, zip(state, more, strict=True)))
        b = products.multiply(state[0], f"weight_hh_{place}", step)
        state = gates(a[step], b, state)
        if products.has(f"weight_hr_{place}"):
            state = products.multiply(state[0], f"weight_hr_{place}", step), *state[1:]
        out[step] = state[0]
    # sequences are sorted by length: the shorter ones, which ended earlier, come last
    state = tuple(map(torch.cat, zip(state, *reversed(ended), strict=True)))
    return torch.cat([out[step] for step in range(len(sizes))]), state


class QuantizedCell(QuantizedLayer, nn.RNNCellBase):
    """One step of a recurrent layer by a recipe; made by ``mixprec.convert``.

    The products a and b of the module docstring, "weight_ih" and "weight_hh". ``cache_weights``
    saves quantising both at each call.

    Raises:
        ValueError: Sizes that do not match; and what torch's own cell raises.
    """

    @staticmethod
    def sizes(layer: Any) -> tuple[int, ...]:
        return layer.input_size, layer.hidden_size

    def product_names(self) -> tuple[str, ...]:
        return "weight_ih", "weight_hh"

    def _mode(self) -> str:
        raise NotImplementedError

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """As torch's cell, its products by the recipe."""
        check_floating("input", input)
        is_batched, (features, width) = input.dim() != 1, self.sizes(self)
        mode = self._mode()
        count = _STATES.get(mode, 1)
        x = input if is_batched else input.unsqueeze(0)
        if hx is None:
            state: State = (x.new_zeros(len(x), width),) * count
        else:
            state = tuple(part if is_batched else part.unsqueeze(0) for part in _as_state(hx))
        wanted = (len(x), features), *[(len(x), width)] * count
        if tuple(tuple(part.shape) for part in (x, *state)) != wanted:
            shapes = " and ".join(str(tuple(part.shape)) for part in (x, *state))
            raise ValueError(
                f"input: got shapes {shapes} of input and state; must be (B, {features}) and "
                f"(B, {width}), or without B; reshape them"
            )
        products = _Products(self, {name: getattr(self, name) for name in _CELL_PARAMETERS})
        a = products.multiply(x, "weight_ih")
        state = tuple(part.to(a.dtype) for part in state)
        state = _GATES[mode](a, products.multiply(state[0], "weight_hh"), state)
        return _as_hidden(state if is_batched else tuple(part.squeeze(0) for part in state))


class QuantizedRNN(QuantizedRecurrent, nn.RNN):
    """``nn.RNN`` by a recipe."""


class QuantizedGRU(QuantizedRecurrent, nn.GRU):
    """``nn.GRU`` by a recipe."""


class QuantizedLSTM(QuantizedRecurrent, nn.LSTM):
    """``nn.LSTM`` by a recipe."""


def _rnn_mode(cell: nn.RNNCell) -> str:
    return f"RNN_{cell.nonlinearity.upper()}"


class QuantizedRNNCell(QuantizedCell, nn.RNNCell):
    """``nn.RNNCell`` by a recipe."""

    @staticmethod
    def why_not(layer: Any, recipe: Recipe) -> str | None:
        if _rnn_mode(layer) not in _GATES:
            return f"nonlinearity {layer.nonlinearity!r} is neither 'tanh' nor 'relu'"
        return None

    def _mode(self) -> str:
        return _rnn_mode(self)


class QuantizedGRUCell(QuantizedCell, nn.GRUCell):
    """``nn.GRUCell`` by a recipe."""

    def _mode(self) -> str:
        return "GRU"


class QuantizedLSTMCell(QuantizedCell, nn.LSTMCell):
    """``nn.LSTMCell`` by a recipe."""

    def _mode(self) -> str:
        return "LSTM"
