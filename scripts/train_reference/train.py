"""The training loop: resumable, with a learning rate that follows the elapsed share of the time (or of the steps)."""

from __future__ import annotations

import ctypes
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from torch import Tensor

from .experts import Kernels, activate, activate_backward
from .model import Block, Model, Shape
from .optimiser import optimisers
from .team import Team
from .tokens import Stream

SAVE_EVERY = 200  # steps between checkpoints
MODEL = "checkpoint.pt"


@dataclass(frozen=True)
class Recipe:
    """What a run depends on, beside the data. With `steps`, `minutes` is ignored and the run can be repeated."""

    seed: int = 1
    minutes: float = 62.0
    steps: int = 0
    windows: int = 16
    length: int = 256
    rate: float = 4e-3
    decay: float = 0.05
    warm_up: float = 0.02  # share of the run
    hold: float = 0.3  # share after which the rate falls in a line to zero
    head_weight: float = 0.3
    depth: int = 3  # drafts that the head is unrolled for, every second step; one draft in the others
    balance: float = 0.01  # step of the selection bias, falling with the learning rate


def run(data: Path, folder: Path, recipe: Recipe, shape: Shape, *, workers: int, compiled: bool) -> Path:
    """Train to the end of the recipe, from the checkpoint in `folder` if there is one; return the checkpoint.

    `workers` processes of one thread each share every step; `recipe.windows` must be a multiple.
    """
    if recipe.windows % workers:
        raise ValueError(f"{recipe.windows} windows a step cannot be shared by {workers} processes")
    torch.set_num_threads(1)
    keep_memory()
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(recipe.seed)
    model = Model(shape)
    model.train()
    team = Team(model, workers)
    team.run(lambda rank: work(rank, team, data, folder, recipe, compiled=compiled))
    return folder / MODEL


def work(rank: int, team: Team, data: Path, folder: Path, recipe: Recipe, *, compiled: bool) -> None:
    """Do one process's part of the run."""
    model, each = team.model, recipe.windows // team.size
    tuners = optimisers(team.join(rank), recipe.rate, recipe.decay)
    stream = Stream(data, recipe.length, recipe.seed)
    step, elapsed = load(folder, rank, model, tuners) if (folder / MODEL).exists() else (0, 0.0)
    losses = Losses(model, recipe)
    if compiled:
        compile_parts(model, losses)
    begun = time.monotonic() - elapsed
    step_begun = time.monotonic()
    if rank == 0:
        team.share[0] = progress(recipe, step, elapsed)
    team.meet()
    while (share := float(team.share[0])) < 1:
        tokens = torch.from_numpy(stream.batch(step, recipe.windows)[rank * each : (rank + 1) * each])
        factor = min(1.0, share / recipe.warm_up, (1 - share) / (1 - recipe.hold))
        for tuner in tuners:
            for group in tuner.param_groups:
                group["lr"] = recipe.rate * factor
        with torch.autocast("cpu", torch.bfloat16):
            loss, numbers = losses.of(tokens, recipe.depth if step % 2 else 1)
        loss.backward()
        team.meet()
        team.average(rank)
        for tuner in tuners:
            tuner.step()
        step += 1
        if rank == 0:
            numbers |= rebalance(model, team.loads, recipe.balance * factor)
            now = time.monotonic()
            team.share[0] = progress(recipe, step, now - begun)
            numbers |= {"step": step, "seconds": now - begun, "share": share, "rate": factor}
            numbers["tokens_per_s"] = recipe.windows * recipe.length / (now - step_begun)
            note(folder / "log.jsonl", numbers)
            step_begun = now
        team.meet()
        team.clear(rank)
        if step % SAVE_EVERY == 0 or float(team.share[0]) >= 1:
            save(folder, rank, team, tuners, step, time.monotonic() - begun, recipe)
            team.meet()


def note(path: Path, numbers: dict[str, float]) -> None:
    """Append a line to the log."""
    with path.open("a") as log:
        log.write(json.dumps({k: round(v, 5) for k, v in numbers.items()}) + "\n")


def progress(recipe: Recipe, step: int, seconds: float) -> float:
    """Return the share of the run that is over."""
    return step / recipe.steps if recipe.steps else seconds / (60 * recipe.minutes)


class Losses:
    """The next token's cross-entropy, and the head's against what the trunk itself says."""

    def __init__(self, model: Model, recipe: Recipe) -> None:
        self.model = model
        self.recipe = recipe

    def of(self, tokens: Tensor, depth: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of windows (batch, length + 1) and what to log; the head sees a part of the windows.

        Its targets are the trunk's own probabilities, since a draft is right when the trunk agrees with it.
        """
        x, y = tokens[:, :-1], tokens[:, 1:]
        hidden = self.model.trunk(x)
        loss = self.next_token(hidden, y)
        numbers = {"loss": loss.item()}
        rows = max(1, len(x) // (2 if depth == 1 else 4))
        states = self.model.draft(x[:rows], hidden[:rows], depth)
        with torch.no_grad():
            target = self.targets(hidden[:rows])
        for i, state in enumerate(states):
            draft, agreed = self.agreement(state, target)
            loss = loss + self.recipe.head_weight / depth * draft
            numbers |= {f"draft{i + 1}": draft.item(), f"agreed{i + 1}": agreed.item()}
        return loss, numbers

    def next_token(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the output matrix on the labels."""
        return F.cross_entropy(self.model.logits(hidden).float().flatten(0, 1), labels.flatten())

    def targets(self, hidden: Tensor) -> Tensor:
        """Return the trunk's probabilities."""
        return self.model.logits(hidden).float().softmax(-1)

    def agreement(self, state: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head's cross-entropy on the targets, and how often both name the same token first."""
        logits = self.model.logits(state).float()
        loss = -(target * logits.log_softmax(-1)).sum(-1).mean()
        return loss, (logits.argmax(-1) == target.argmax(-1)).float().mean()


def rebalance(model: Model, loads: Tensor, step: float) -> dict[str, float]:
    """Move the selection biases towards an even load, clear the counts (member, layer, expert); return how uneven."""
    worst, least = 0.0, 1.0
    for layer, load in zip(model.expert_layers(), loads.sum(0).float(), strict=True):
        even = load.mean()
        if even > 0:
            layer.bias += step * torch.sign(even - load)
            layer.bias -= layer.bias.mean()
            worst, least = max(worst, float(load.max() / even)), min(least, float(load.min() / even))
    loads.zero_()
    return {"most_used": worst, "least_used": least}


def compile_parts(model: Model, losses: Losses) -> None:
    """Compile what is not a big matrix product: a sixth less work a step, after two minutes of compiling."""
    torch._dynamo.config.recompile_limit = 64  # noqa: SLF001 (a block is compiled once per kind and depth of draft)
    kernels = Kernels()
    kernels.activate = torch.compile(activate, dynamic=False)  # type: ignore[method-assign]
    kernels.activate_backward = torch.compile(activate_backward, dynamic=False)  # type: ignore[method-assign]
    for layer in model.expert_layers():
        layer.kernels = kernels
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = torch.compile(module.forward, dynamic=False)  # type: ignore[method-assign]
    losses.next_token = torch.compile(losses.next_token, dynamic=False)  # type: ignore[method-assign]
    losses.agreement = torch.compile(losses.agreement, dynamic=False)  # type: ignore[method-assign]


def keep_memory() -> None:
    """Have glibc keep freed memory: fresh pages for every tensor cost more than many of the operations."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX: never by mmap
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-2, 2**28)  # M_TOP_PAD


def save(folder: Path, rank: int, team: Team, tuners: list[Any], step: int, elapsed: float, recipe: Recipe) -> None:
    """Write this process's part of a checkpoint: its optimisers' state, and rank 0 the model as well.

    The place in the data is the step. The files get their names when all parts are written.
    """
    parts = {f"tuners-{rank}.pt": {"tuners": [t.state_dict() for t in tuners], "step": step}}
    if rank == 0:
        parts[MODEL] = {
            "model": team.model.state_dict(),
            "shape": asdict(team.model.shape),
            "recipe": asdict(recipe),
            "step": step,
            "elapsed": elapsed,
        }
    for name, state in parts.items():
        torch.save(state, folder / f"{name}.part")
    team.meet()
    for name in parts:
        (folder / f"{name}.part").replace(folder / name)


def load(folder: Path, rank: int, model: Model, tuners: list[Any]) -> tuple[int, float]:
    """Restore a checkpoint; return its step and the seconds spent. Raises ValueError if its parts differ in step."""
    state = torch.load(folder / MODEL, weights_only=True)
    own = torch.load(folder / f"tuners-{rank}.pt", weights_only=True)
    if own["step"] != state["step"]:
        raise ValueError(f"{folder}: parts of two checkpoints (steps {own['step']} and {state['step']}); start anew")
    if rank == 0:
        model.load_state_dict(state["model"])
    for tuner, saved in zip(tuners, own["tuners"], strict=True):
        tuner.load_state_dict(saved)
    return int(state["step"]), float(state["elapsed"])


def trained(path: Path) -> Model:
    """Return the model of a checkpoint, for measurements."""
    state = torch.load(path, weights_only=True)
    model = Model(Shape(**state["shape"]))
    model.load_state_dict(state["model"])
    return model.eval()
