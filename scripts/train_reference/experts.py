"""The routed experts as one autograd function: rows sorted by expert, one matrix product per expert.

Each expert's rows are padded to a multiple of ROUND, so that the products come in few shapes: oneDNN builds a kernel
for every new shape, which would cost more than the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROUND = 64


def activate(hidden: Tensor, scale: Tensor) -> Tensor:
    """Return scale * silu(gate) * up for rows of [gate, up]."""
    gate, up = hidden.float().chunk(2, 1)
    return (gate * torch.sigmoid(gate) * up * scale[:, None]).to(hidden.dtype)


def activate_backward(hidden: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of hidden and of scale, and what `activate` returned."""
    gate, up = hidden.float().chunk(2, 1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dscaled = grad.float()
    dact = dscaled * scale[:, None]
    dhidden = torch.cat([dact * up * (sigmoid + silu * (1 - sigmoid)), dact * silu], 1)
    return dhidden.to(hidden.dtype), (dscaled * silu * up).sum(1), (silu * up * scale[:, None]).to(hidden.dtype)


class Kernels:
    """The elementwise parts, plain or compiled."""

    activate: Callable[[Tensor, Tensor], Tensor] = staticmethod(activate)
    activate_backward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] = staticmethod(
        activate_backward
    )


class Layout:
    """Where every (row, choice) stands among the rows sorted by expert and padded."""

    def __init__(self, chosen: Tensor, experts: int) -> None:
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts)
        padded = (counts + ROUND - 1) // ROUND * ROUND
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        place = torch.arange(len(flat)) + shift[flat[order]]
        total = len(flat) + experts * ROUND
        self.rows = torch.zeros(total, dtype=torch.int64)
        self.rows[place] = order // chosen.shape[1]
        self.place = torch.empty_like(flat)
        self.place[order] = place
        ends = padded.cumsum(0).tolist()
        self.parts = [slice(e - n, e) for e, n in zip(ends, padded.tolist(), strict=True)]
        self.total = total

    def spread(self, weights: Tensor) -> Tensor:
        """Return the weights in this order, zero for padding."""
        scale = torch.zeros(self.total, dtype=torch.float32)
        scale[self.place] = weights.reshape(-1).float()
        return scale

    def gather(self, values: Tensor, used: int) -> Tensor:
        """Return, for every row, the sum of its choices' values."""
        return values[self.place].view(-1, used, values.shape[1]).sum(1)


class _Routed(torch.autograd.Function):
    """y[t] = sum over the chosen e of weight[t, e] * down_e(silu(gate_e x[t]) * up_e x[t])."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, weights: Tensor, chosen: Tensor, both: Tensor, down: Tensor, kernels: Kernels
    ) -> Tensor:
        layout = Layout(chosen, both.shape[0])
        scale = layout.spread(weights)
        sorted_x = x[layout.rows]
        hidden = x.new_zeros(layout.total, both.shape[1])
        for e, part in enumerate(layout.parts):
            torch.mm(sorted_x[part], both[e].T, out=hidden[part])
        act = kernels.activate(hidden, scale)
        y = torch.empty_like(sorted_x)
        for e, part in enumerate(layout.parts):
            torch.mm(act[part], down[e].T, out=y[part])
        ctx.save_for_backward(sorted_x, scale, both, down, hidden, weights)
        ctx.layout, ctx.kernels = layout, kernels
        return layout.gather(y, chosen.shape[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        sorted_x, scale, both, down, hidden, weights = ctx.saved_tensors
        layout: Layout = ctx.layout
        sorted_grad = grad.to(sorted_x.dtype)[layout.rows]
        dact = hidden.new_zeros(layout.total, down.shape[2])
        for e, part in enumerate(layout.parts):
            torch.mm(sorted_grad[part], down[e], out=dact[part])
        dhidden, dscale, act = ctx.kernels.activate_backward(hidden, scale, dact)
        dboth, ddown = torch.empty_like(both), torch.empty_like(down)
        dx = torch.empty_like(sorted_x)
        for e, part in enumerate(layout.parts):
            torch.mm(sorted_grad[part].T, act[part], out=ddown[e])
            torch.mm(dhidden[part].T, sorted_x[part], out=dboth[e])
            torch.mm(dhidden[part], both[e], out=dx[part])
        dweights = dscale[layout.place].view(weights.shape).to(weights.dtype)
        return layout.gather(dx, weights.shape[1]), dweights, None, dboth, ddown, None


def routed(
    x: Tensor, weights: Tensor, chosen: Tensor, matrices: tuple[Tensor, Tensor, Tensor], kernels: Kernels
) -> Tensor:
    """Return the weighted sum of the chosen experts for rows x (n, width); under autocast in its type.

    weights and chosen are (n, used); of the matrices, gate and up are (experts, hidden, width), down (experts, width,
    hidden).
    """
    kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    gate, up, down = matrices
    both = torch.cat([gate.to(kind), up.to(kind)], 1)
    result: Tensor = _Routed.apply(x.to(kind), weights, chosen, both, down.to(kind), kernels)
    return result
