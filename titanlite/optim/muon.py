"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for the matrices of the blocks, and
AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from titanlite.config.component import ConfigError, check_at_least
from titanlite.mesh import Mesh
from titanlite.models.base import Decoder
from titanlite.optim.adamw import AdamWKeys, build_adamw
from titanlite.optim.muon_optimizer import Matrix, MuonOptimizer, MuonSettings
from titanlite.optim.orthogonalize import coefficients_of, num_flops


@dataclass(frozen=True, kw_only=True)
class Muon(AdamWKeys, name="muon"):
    """Muon: the update of a matrix is its momentum with all singular values set to about 1. The rule `muon`
    has the matrices of the blocks, each expert's projections one by one; all other parameters have the rule
    `adamw`, with beta1, beta2, eps and state_dtype. `rule` in param_groups changes the choice."""

    rules: ClassVar[tuple[str, ...]] = ("muon", "adamw")

    momentum: float = 0.95
    """Decay rate of the gradient's running mean, for Muon's rule."""
    nesterov: bool = True
    """Look ahead by one step of momentum."""
    adjust_lr_fn: Literal["match_rms_adamw", "original", "spectral"] = "match_rms_adamw"
    """Factor of a matrix's learning rate: for AdamW's lr and weight decay (`match_rms_adamw`), for an lr of
    about 0.02 (`original`), or for an lr that carries over to other widths (`spectral`)."""
    adamw_lr_multiplier: float = 1.0
    """Factor of optimizer.lr under AdamW's rule. With `original` and lr = 0.02, 0.015 gives 3e-4."""
    ns_steps: int = 5
    """Number of Newton-Schulz steps."""
    ns_coefficients: Literal["polar_express", "jordan"] = "polar_express"
    """`polar_express` (arXiv 2505.16932) brings smaller singular values to 1 in as many steps; `jordan` is
    torch.optim.Muon's."""
    ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the Newton-Schulz products, and of updates between ranks. `auto`: bfloat16 on CUDA, else
    float32."""
    normalize: Literal["none", "neuron"] = "none"
    """`neuron`: give the rows of the update equal sizes over time, by a running mean with beta2 (NorMuon,
    arXiv 2510.05491)."""
    equalize_rows: bool = False
    """Scale the rows of the momentum to equal norms before the Newton-Schulz steps (MuonEq, arXiv
    2603.28254)."""
    exact_norm: bool = False
    """Scale the result of the Newton-Schulz steps to the Frobenius norm of a matrix with singular values of 1
    (Muon+, arXiv 2602.21545), before `normalize`."""
    split_heads: bool = False
    """Orthogonalise the rows of each attention head separately in the query, key and value projections."""
    cautious_weight_decay: bool = False
    """Under Muon's rule, decay weights only where the update shrinks them, too (arXiv 2510.12402)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"{self.momentum} is not in [0, 1)", "momentum")
        if not 0 <= self.adamw_lr_multiplier < math.inf:
            raise ConfigError(
                f"{self.adamw_lr_multiplier} is not a finite number of at least 0", "adamw_lr_multiplier"
            )
        check_at_least(self, 1, "ns_steps")

    def default_rule(self, model: Decoder, name: str) -> str:
        is_matrix = model.parameter_role(name) in ("matrix", "expert")
        return "muon" if is_matrix and _fits(model.get_parameter(name)) else "adamw"

    def peak_lr(self, rule: str) -> float:
        return self.lr * (self.adamw_lr_multiplier if rule == "adamw" else 1.0)

    def width_exponent(self, rule: str) -> float:
        """Muon's update has singular values of about adjust_lr_fn's factor, and 1 is the size that carries
        over. The update of AdamW has a largest singular value that grows with the width."""
        if rule == "adamw":
            return 1.0
        return 0.5 if self.adjust_lr_fn == "match_rms_adamw" else 0.0

    def check(self, model: Decoder, tensor_parallel: int = 1) -> None:
        super().check(model, tensor_parallel)
        for settings, names in self.grouped(model).items():
            for name in names if settings.rule == "muon" else ():
                if not _fits(parameter := model.get_parameter(name)):
                    raise ConfigError(
                        f"{name} has the shape {list(parameter.shape)}: the rule muon is for matrices whose "
                        "dims are above 1, or stacks of them",
                        f"optimizer.param_groups.{settings.entry}.rule",
                    )

    def hyperparameters(self, rule: str) -> dict[str, float]:
        if rule == "adamw":
            return super().hyperparameters(rule)
        return {"momentum": self.momentum, **({"beta2": self.beta2} if self.normalize == "neuron" else {})}

    def state_bytes(self, parameter: torch.Tensor, rule: str) -> float:
        if rule == "adamw":
            return super().state_bytes(parameter, rule)
        return 4 + (4 / parameter.shape[-1] if self.normalize == "neuron" else 0)

    def step_flops(self, model: Decoder, name: str, rule: str) -> float:
        if rule == "adamw":
            return 0.0
        *experts, rows, columns = model.get_parameter(name).shape
        stacked = model.num_stacked(name)
        return math.prod(experts) * stacked * num_flops(rows // stacked, columns, self.ns_steps)

    def check_cpu_offload(self) -> None:
        raise ConfigError(
            "muon would orthogonalise the matrices on the CPU, which takes minutes per step for a large "
            'model; use optimizer.name = "adamw" with CPU offload',
            "training.enable_cpu_offload",
        )

    def build(self, model: Decoder, mesh: Mesh) -> torch.optim.Optimizer:
        names = {p: name for name, p in model.named_parameters()}
        blocks = {p: key for key, block in model.blocks().items() for p in block.parameters()}
        groups = self.groups(model)
        muon = [group for group in groups if group["rule"] == "muon"]
        others = [group for group in groups if group["rule"] == "adamw"]
        matrices = [
            Matrix(p, blocks.get(p, names[p]), self._num_stacked(model, names[p]), group)
            for group in muon
            for p in group["params"]
        ]
        # In the model's order: groups of parameters must not change which matrices are in a batch.
        position = {p: i for i, p in enumerate(names)}
        matrices.sort(key=lambda matrix: position[matrix.parameter])
        adamw = build_adamw(others, self.eps, self.state_dtype, mesh.same_bits) if others else None
        is_cuda = any(p.device.type == "cuda" for p in names)
        return MuonOptimizer(matrices, muon, adamw, self._settings(is_cuda), mesh.stage_group)

    def _num_stacked(self, model: Decoder, name: str) -> int:
        """The matrices above one another in a parameter that are orthogonalised separately."""
        return model.num_stacked(name) * (model.num_heads(name) if self.split_heads else 1)

    def _settings(self, is_cuda: bool) -> MuonSettings:
        dtype = {"auto": "bfloat16" if is_cuda else "float32"}.get(self.ns_dtype, self.ns_dtype)
        return MuonSettings(
            nesterov=self.nesterov,
            adjust_lr_fn=self.adjust_lr_fn,
            coefficients=coefficients_of(self.ns_coefficients, self.ns_steps),
            dtype=torch.bfloat16 if dtype == "bfloat16" else torch.float32,
            normalizes_rows=self.normalize == "neuron",
            equalizes_rows=self.equalize_rows,
            has_exact_norm=self.exact_norm,
            cautious_weight_decay=self.cautious_weight_decay,
        )

    def update_of(
        self, weight: torch.Tensor, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """AdamW's update; None under Muon's rule, where it follows only from the whole matrix."""
        return None if group["rule"] == "muon" else super().update_of(weight, state, group)

    def signal_and_noise(
        self, state: Mapping[str, Any], group: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """AdamW's estimates; None under Muon's rule, which keeps no second moments."""
        return None if group["rule"] == "muon" else super().signal_and_noise(state, group)


def _fits(parameter: torch.Tensor) -> bool:
    return parameter.ndim in (2, 3) and min(parameter.shape[-2:]) > 1
