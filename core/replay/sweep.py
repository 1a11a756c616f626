"""Every trace with every policy and every budget: the replays of a comparison, and what they say beside each other."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe.contracts import ModelFacts
from bmoe.errors import BmoeError
from bmoe.problems import cause
from bmoe.replay.contender import BELADY, LRU, Contender
from bmoe.replay.lookups import Lookups
from bmoe.replay.play import Played

MIB = 1 << 20
CLUSTERS = ("dask", "ray")
_NEEDED = {"dask": ("distributed", "dask[distributed]"), "ray": ("ray", "ray")}


class SweepError(BmoeError):
    """The replays cannot be spread as asked; names the option and the remedy."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay: which trace, by number, who plays, and with how many bytes."""

    trace: int
    contender: Contender
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one replay.

    ``mib_per_token`` is what the misses read, MiB of 2**20 bytes, None where tokens cannot be told apart.
    ``gap_closed`` is the share of the way from LRU to Belady, 0 for LRU and 1 for Belady, negative for what is worse
    than LRU; None where the two are the same.
    """

    trace: Lookups
    contender: Contender
    budget_bytes: int
    played: Played
    mib_per_token: float | None
    gap_closed: float | None

    @property
    def below_cycle(self) -> bool:
        """Whether the budget is less than one token uses, where a policy of recency has few hits, if any."""
        return self.budget_bytes < self.trace.cycle_bytes


def sweep(
    traces: Sequence[Lookups],
    contenders: Sequence[Contender],
    budgets: Sequence[int],
    *,
    model: ModelFacts | None = None,
    jobs: int = 1,
    backend: str | None = None,
    cluster: str | None = None,
    seed: int = 0,
) -> list[Result]:
    """Replay every trace with every contender and budget (bytes), in this order; LRU and Belady play along unseen.

    ``jobs`` processes of this machine, or those of a ``backend`` of :data:`CLUSTERS` at the address ``cluster``
    (default: what that library finds). Raises :class:`SweepError` if they cannot be had, PluginError as a contender
    does.
    """
    extra = [Contender(name, name) for name in (LRU, BELADY) if all(c.name != name for c in contenders)]
    replays = [
        Replay(index, contender, budget)
        for index in range(len(traces))
        for contender in [*contenders, *extra]
        for budget in budgets
    ]
    played = dict(zip(map(_name, replays), _played(traces, replays, model, jobs, backend, cluster, seed), strict=True))
    return [
        _result(traces[replay.trace], replay, played[_name(replay)], played)
        for replay in replays
        if replay.contender in contenders
    ]


def play_one(trace: Lookups, replay: Replay, model: ModelFacts | None, seed: int) -> Played:
    """What one worker does."""
    return replay.contender.play(trace, replay.budget_bytes, model, seed)


def _name(replay: Replay) -> tuple[int, str, int]:
    return replay.trace, replay.contender.label, replay.budget_bytes


def _result(trace: Lookups, replay: Replay, played: Played, everyone: dict[tuple[int, str, int], Played]) -> Result:
    def hits(name: str) -> int:
        return everyone[replay.trace, name, replay.budget_bytes].hits

    gap = hits(BELADY) - hits(LRU)
    return Result(
        trace,
        replay.contender,
        replay.budget_bytes,
        played,
        played.missed_bytes / MIB / trace.tokens if trace.tokens else None,
        (played.hits - hits(LRU)) / gap if gap else None,
    )


def _played(
    traces: Sequence[Lookups],
    replays: Sequence[Replay],
    model: ModelFacts | None,
    jobs: int,
    backend: str | None,
    cluster: str | None,
    seed: int,
) -> list[Played]:
    if backend is None and jobs == 1:
        return [play_one(traces[each.trace], each, model, seed) for each in replays]
    if importlib.util.find_spec("joblib") is None:
        option = f"--backend {backend}" if backend else f"--jobs {jobs}"
        raise SweepError(f'{option}: needs joblib, which is not installed; pip install "bmoe[sweeps]"')
    joblib: Any = importlib.import_module("joblib")
    with _backend(joblib, backend, cluster):
        workers = joblib.Parallel(n_jobs=-1 if backend and jobs == 1 else jobs)
        made = workers(joblib.delayed(play_one)(traces[each.trace], each, model, seed) for each in replays)
    return list(made)


@contextlib.contextmanager
def _backend(joblib: Any, backend: str | None, cluster: str | None) -> Iterator[None]:
    """Where joblib runs its tasks; :class:`SweepError` if a cluster's library is lacking or does not reach it."""
    if backend is None:
        yield
        return
    module, package = _NEEDED[backend]
    if importlib.util.find_spec(module) is None:
        raise SweepError(f'--backend {backend}: needs {module}, which is not installed; pip install "{package}"')
    with contextlib.ExitStack() as stack:
        try:
            if backend == "dask":
                stack.enter_context(importlib.import_module("distributed").Client(cluster))
            else:
                ray = importlib.import_module("ray")
                ray.init(address=cluster, ignore_reinit_error=True, log_to_driver=False)
                stack.callback(ray.shutdown)
                importlib.import_module("ray.util.joblib").register_ray()
            stack.enter_context(joblib.parallel_config(backend=backend))
        except Exception as error:  # whatever a cluster's library raises when it finds none
            where = f" --cluster {cluster}" if cluster else ""
            raise SweepError(
                f"--backend {backend}{where}: cannot be reached ({cause(error)}); check that it runs, or leave it out"
            ) from error
        yield
