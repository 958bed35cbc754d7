"""Functions as operators of torch, which autograd and compilers take as they take torch's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

LIBRARY = torch.library.Library("mixprec", "FRAGMENT")
"""Where they are registered, ``torch.ops.mixprec``."""


def define(
    name: str,
    implementation: Callable[..., Any],
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., None] | None = None,
    tags: Sequence[torch.Tag] = (),
) -> OpOverload[..., Any]:
    """A new operator of torch, ``torch.ops.mixprec.NAME``.

    Args:
        name: Its name.
        implementation: What runs on tensors of any device; its annotations are the operator's
            schema. Never returns an argument.
        fake: The shapes and types of the results.
        backward, setup_context: As ``torch.library.register_autograd`` takes them.
        tags: What a compiler has to know of it.

    Returns:
        The operator's only overload, callable; ``torch.library.register_vmap`` takes it.
    """
    # not torch.library.custom_op, which loads Dynamo at the first call: three seconds
    LIBRARY.define(name + torch.library.infer_schema(implementation, mutates_args=()), tags=tags)
    LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    qualified = f"mixprec::{name}"
    torch.library.register_fake(qualified, fake, lib=LIBRARY)
    if backward is not None:
        torch.library.register_autograd(
            qualified, backward, setup_context=setup_context, lib=LIBRARY
        )
    return getattr(torch.ops.mixprec, name).default
