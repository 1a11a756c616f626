"""Processes that train together: each takes some windows of a step and updates some of the parameters.

One thread each, and two meetings a step: threads inside every small operation would meet thousands of times, which
costs most of the time on a machine that does other things as well. Parameters and gradients are in shared memory.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .model import Model

MEETING_S = 900.0  # after this long, the others are taken to be dead


class Team:
    """What the members share. Made before they are forked."""

    def __init__(self, model: Model, size: int) -> None:
        self.size = size
        self.model = model
        self._context = multiprocessing.get_context("fork")
        self._barrier = self._context.Barrier(size)
        model.share_memory()
        self.named = list(model.named_parameters())
        self.grads = [[torch.zeros_like(p).share_memory_() for _, p in self.named] for _ in range(size)]
        layers = len(model.expert_layers())
        self.loads = torch.zeros(size, layers, model.shape.experts, dtype=torch.int64).share_memory_()
        self.share = torch.zeros(1, dtype=torch.float64).share_memory_()  # of the run that is over
        self.owner = _owners([p for _, p in self.named], size)

    def run(self, member: Callable[[int], None]) -> None:
        """Call `member` with every rank: 0 here, the others in processes of their own."""
        others = [self._context.Process(target=member, args=(rank,), daemon=True) for rank in range(1, self.size)]
        for process in others:
            process.start()
        member(0)
        for process in others:
            process.join()
            if process.exitcode:
                raise RuntimeError(f"a training process ended with code {process.exitcode}")

    def meet(self) -> None:
        """Wait until every member is here. Raises BrokenBarrierError if one does not come."""
        self._barrier.wait(MEETING_S)

    def join(self, rank: int) -> list[tuple[str, nn.Parameter]]:
        """Point this process's model at its own gradients and counts; return the parameters it updates."""
        for (_, parameter), grad in zip(self.named, self.grads[rank], strict=True):
            parameter.grad = grad
        for layer, load in zip(self.model.expert_layers(), self.loads[rank], strict=True):
            layer.load = load
        return [n for n, owner in zip(self.named, self.owner, strict=True) if owner == rank]

    def average(self, rank: int) -> None:
        """Leave in the gradients of the parameters that `rank` updates the mean over all members."""
        for i, owner in enumerate(self.owner):
            if owner == rank:
                mine: Tensor = self.grads[rank][i]
                for other in range(self.size):
                    if other != rank:
                        mine += self.grads[other][i]
                mine /= self.size

    def clear(self, rank: int) -> None:
        """Zero this process's gradients."""
        for grad in self.grads[rank]:
            grad.zero_()


def _owners(parameters: list[Any], size: int) -> list[int]:
    """Share the parameters out by their entries, the largest first."""
    work = [0] * size
    owner = [0] * len(parameters)
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        owner[i] = work.index(min(work))
        work[owner[i]] += parameters[i].numel()
    return owner
