"""What all GPU tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def no_memory_is_kept() -> Iterator[None]:
    """Gives back the GPU's memory that torch keeps after a test: several workers share the GPU."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
