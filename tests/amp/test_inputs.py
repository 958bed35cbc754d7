"""Nested batches: floating-point tensors cast, everything else as it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from mixprec import QuantSpec, quantize
from mixprec.amp.inputs import cast_inputs
from mixprec.formats import FORMATS

Pair = namedtuple("Pair", ["image", "label"])


@dataclass
class Sample:
    image: Tensor
    label: Tensor
    extra: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Tensor
    scale: float


@dataclass
class Derived:
    image: Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.image.numel()


class Encoding(UserDict):
    """A mapping that is no dict, as tokenizers return."""


class Named(dict):
    """A dict subclass with state of its own."""

    def __init__(self, name: str, **entries: Any) -> None:
        super().__init__(entries)
        self.name = name


class Node:
    """A container registered with torch's pytrees."""

    def __init__(self, x: Any) -> None:
        self.x = x


_pytree.register_pytree_node(Node, lambda node: ([node.x], None), lambda xs, _: Node(xs[0]))

X = torch.arange(4.0)
LABELS = torch.arange(4)


@pytest.mark.parametrize("before", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
        ("fp64", torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (FORMATS["fp64"], torch.float64),
    ],
    ids=str,
)
def test_floating_tensor_gets_the_type(
    before: torch.dtype, name: str | torch.dtype, dtype: torch.dtype
) -> None:
    found = cast_inputs(X.to(before), name)
    assert found.dtype == dtype
    assert found.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
def test_tensor_of_another_kind_is_the_same_object(dtype: torch.dtype) -> None:
    x = torch.ones(3).to(dtype)
    assert cast_inputs(x, "bf16") is x
    assert cast_inputs([x], "bf16")[0] is x


@pytest.mark.parametrize(
    "leaf",
    [1.5, 3, "text", None, b"x", np.ones(2), torch.Size([2]), Sample, torch.float32],
    ids=lambda leaf: type(leaf).__name__,
)
def test_other_objects_pass_through(leaf: object) -> None:
    assert cast_inputs(leaf, "bf16") is leaf
    found = cast_inputs({"x": X, "leaf": leaf}, "bf16")
    assert found["leaf"] is leaf
    assert found["x"].dtype == torch.bfloat16


def test_quantised_operand_keeps_its_scale() -> None:
    q = quantize(torch.randn(2, 4), QuantSpec(format=FORMATS["e4m3"]))
    assert cast_inputs([X, q], "bf16")[1] is q
    assert cast_inputs(q, "bf16").scale.dtype == torch.float32


@pytest.mark.parametrize(
    "batch",
    [
        [X, LABELS],
        (X, LABELS),
        {"x": X, "y": LABELS},
        OrderedDict(y=LABELS, x=X),
        Pair(X, LABELS),
        deque([X, LABELS], maxlen=7),
        [],
        {},
        (),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_container_keeps_its_type_and_order(batch: Any) -> None:
    found = cast_inputs(batch, "fp16")
    assert type(found) is type(batch)
    items = zip(found, batch, strict=True)
    if isinstance(batch, dict):
        assert list(found) == list(batch)
        items = zip(found.values(), batch.values(), strict=True)
    for new, old in items:
        assert new is old if old is LABELS else torch.equal(new, X.half())
        assert new.dtype == (torch.float16 if old is X else torch.int64)


def test_details_of_containers_survive() -> None:
    counts = defaultdict(list, x=X)
    found = cast_inputs([counts, deque([X], maxlen=2), Named("train", x=X, y=LABELS)], "bf16")
    assert found[0].default_factory is list
    assert found[1].maxlen == 2
    assert (type(found[2]), found[2].name, list(found[2])) == (Named, "train", ["x", "y"])
    assert [part["x"].dtype for part in (found[0], found[2])] == [torch.bfloat16] * 2
    assert counts["x"] is X


def test_nests_are_followed_all_the_way_down() -> None:
    inner = Sample(X, LABELS, extra={"deep": (X, [Pair(X, LABELS)])})
    found = cast_inputs({"a": [Encoding(z=inner)], "b": Node(Sample(X, LABELS))}, "bf16")
    sample = found["a"][0]["z"]
    assert (type(found["a"][0]), type(sample)) == (Encoding, Sample)
    assert sample.extra["deep"][1][0].label is LABELS
    images = [sample.image, sample.extra["deep"][0], sample.extra["deep"][1][0].image]
    assert {x.dtype for x in [*images, found["b"].x.image]} == {torch.bfloat16}
    assert inner.image is X
    assert inner.extra["deep"][0] is X


@pytest.mark.parametrize("record", [Frozen(X, 2.0), Derived(X)], ids=lambda r: type(r).__name__)
def test_dataclasses_of_every_kind_are_copied(record: Any) -> None:
    found = cast_inputs(record, "bf16")
    assert type(found) is type(record)
    assert found.image.dtype == torch.bfloat16
    assert record.image is X
    assert getattr(found, "scale", 2.0) == 2.0
    assert getattr(found, "size", 4) == 4


def test_packed_sequence_keeps_its_sizes() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    found = cast_inputs(packed, "bf16")
    assert type(found) is nn.utils.rnn.PackedSequence
    assert found.data.dtype == torch.bfloat16
    assert found.batch_sizes.tolist() == [2, 1, 1]


def test_batch_of_the_right_type_is_the_same_object() -> None:
    batch = {"x": X, "y": [LABELS, Sample(X, LABELS)], "z": Encoding(x=X), "p": Pair(X, LABELS)}
    assert cast_inputs(batch, "fp32") is batch
    mixed = {"x": X.half(), "y": batch["y"]}
    found = cast_inputs(mixed, torch.float32)
    assert found is not mixed
    assert found["y"] is batch["y"]


def test_gradients_flow_through_the_cast() -> None:
    x = torch.ones(3, requires_grad=True)
    cast_inputs({"x": x}, "bf16")["x"].sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 1.0]


def test_values_are_rounded_to_nearest_and_overflow_to_infinity() -> None:
    x = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, 65520.0, float("nan")])
    found = cast_inputs(x, "fp16").tolist()
    assert found[:3] == [1.0, 1 + 2.0**-9, float("inf")]
    assert found[3] != found[3]


def test_model_in_sixteen_bits_takes_the_batch() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2)).bfloat16()
    batch = cast_inputs({"tokens": LABELS, "target": torch.zeros(4, 2)}, "bf16")
    loss = nn.functional.mse_loss(model(batch["tokens"]), batch["target"])
    assert loss.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "error", "message"),
    [
        ("e4m3", ValueError, "dtype: got e4m3; inputs are whole tensors of fp16, bf16, fp32, fp64"),
        ("tf32", ValueError, "dtype: got tf32"),
        (torch.int32, ValueError, "dtype: got torch.int32"),
        ("bf61", ValueError, "format: got 'bf61'"),
        (16, TypeError, "format: got int; must be a name or a FloatFormat"),
    ],
)
def test_other_types_are_refused(dtype: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cast_inputs([X], dtype)
