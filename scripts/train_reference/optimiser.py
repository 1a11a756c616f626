"""Muon for matrices, AdamW for everything else, with one learning rate for both.

Muon turns a matrix's averaged gradient into the nearest orthogonal one (Newton-Schulz iteration); its step is scaled
so that its entries are as large as AdamW's. Stacks of experts are turned matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return the last two axes' matrices with singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrices.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; decoupled weight decay."""

    def __init__(self, parameters: Iterable[nn.Parameter], rate: float, momentum: float, decay: float) -> None:
        super().__init__(list(parameters), {"lr": rate, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                average = state["average"].lerp_(parameter.grad, 1 - group["momentum"])
                ahead = parameter.grad.lerp(average, group["momentum"])  # Nesterov
                scale = 0.2 * max(parameter.shape[-2:]) ** 0.5
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(orthogonal(ahead), alpha=-group["lr"] * scale)


def optimisers(named: Iterable[tuple[str, nn.Parameter]], rate: float, decay: float) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the blocks and AdamW for the rest of the named parameters."""
    turned, rest, vectors = [], [], []
    for name, parameter in named:
        if parameter.ndim < 2:
            vectors.append(parameter)
        elif name in ("token_embd", "output"):
            rest.append(parameter)
        else:
            turned.append(parameter)
    adam = torch.optim.AdamW(
        [{"params": rest, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=rate, betas=(0.9, 0.95), eps=1e-10,
    )  # fmt: skip
    return [Muon(turned, rate, 0.95, decay), adam] if turned else [adam]
