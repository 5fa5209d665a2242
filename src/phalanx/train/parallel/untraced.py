"""Set-up that needs real values also where a step is traced on tensors without any."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._subclasses.fake_tensor import unset_fake_temporarily


def untraced() -> AbstractContextManager[Any]:
    """Leave the fake-tensor mode of `phalanx trace` for a while; nothing where there is none.

    A mesh is a tensor of rank numbers that torch reads, and FSDP2 over tensor parallelism looks for its own rank in it
    (`nonzero`); fake tensors refuse both.
    """
    return unset_fake_temporarily()
