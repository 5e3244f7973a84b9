"""Stand-ins for two packages that OLMo-core 3.0.0 imports, each made only where the package is missing.

`cached_path` opens URLs, and imports the clients of two cloud stores. The comparison reads local files only.

`grouped_gemm` has to be compiled with CUDA. OLMo-core's dropless experts call its product of groups of rows
with one matrix per group, which torch has as F.grouped_mm (OLMo-core's newer experts call that themselves,
but need TransformerEngine). Without grouped_gemm and TransformerEngine OLMo-core computes one product per
expert in a loop.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F


class Client:
    """In place of the clients for URLs, from which OLMo-core derives one of its own."""

    recoverable_errors = ()


def no_urls(*arguments: Any, **options: Any) -> Any:
    """In place of the function that opens a URL."""
    raise NotImplementedError(f"the comparison has local files only, not {arguments}")


def grouped_mm(
    rows: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False
) -> torch.Tensor:
    """Multiply `sizes[i]` rows by matrix i, transposed if `trans_b`, for all i.

    Args:
        rows: (rows, in)
        weights: (groups, in, out), or (groups, out, in) with `trans_b`
        sizes: (groups,), the number of rows of each group
    """
    ends = sizes.to(rows.device).cumsum(0).to(torch.int32)
    return F.grouped_mm(rows, weights.transpose(-2, -1) if trans_b else weights, offs=ends)


def before_import() -> list[str]:
    """Put stand-ins in place of missing packages. Returns a description of each."""
    changes = []
    if importlib.util.find_spec("cached_path") is None:
        schemes = module("cached_path.schemes", SchemeClient=Client, S3Client=Client)
        schemes.add_scheme_client = lambda client: None
        module("cached_path", cached_path=no_urls, schemes=schemes)
        changes.append("cached_path opens no URLs")
    if importlib.util.find_spec("grouped_gemm") is None:
        ops = module("grouped_gemm.ops", gmm=grouped_mm)
        module("grouped_gemm", ops=ops)
        changes.append("grouped_gemm is F.grouped_mm")
    return changes


def module(name: str, **attributes: Any) -> Any:
    """Make a module that can be imported by this name."""
    made = ModuleType(name)
    made.__path__ = []
    made.__spec__ = ModuleSpec(name, None)  # find_spec needs it
    vars(made).update(attributes)
    sys.modules[name] = made
    return made
