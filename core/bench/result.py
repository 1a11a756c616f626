"""What a bench found: trials, figures, comparisons with the baseline, and what limits the conclusions."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bmoe.bench import prompts
from bmoe.bench.compare import Comparison, compare, pairs_needed
from bmoe.bench.figures import Figures, figures
from bmoe.bench.sides import Side
from bmoe.bench.trial import Trial
from bmoe.telemetry import SCHEMA

_WARMER_C = 5.0
_FULLER = 0.8


@dataclass(frozen=True)
class Settings:
    """How it is measured: ``rounds`` of all sides, ``warmup`` and measured ``tokens`` each, seconds of ``cooldown``."""

    rounds: int = 8
    tokens: int = 64
    warmup: int = 16
    cooldown_s: float = 2.0
    seed: int = 0
    silence_s: float = 300.0


@dataclass(frozen=True)
class Failure:
    """A side that was given up: the round in which it failed, a word and a line that say how."""

    round: int
    kind: str
    reason: str


@dataclass
class Result:
    """Grows while a bench runs; every view of it is valid at any time."""

    sides: Sequence[Side]
    settings: Settings
    trials: list[Trial] = field(default_factory=list)
    failures: dict[int, Failure] = field(default_factory=dict)
    complete: bool = False

    def of(self, side: int) -> list[Trial]:
        """The trials of one side, by round."""
        return [trial for trial in self.trials if trial.side == side]

    def figures(self, side: int) -> Figures | None:
        """None if the side has no trial."""
        trials = self.of(side)
        return figures(trials) if trials else None

    def comparison(self, side: int) -> Comparison | None:
        """``side`` against the first one, over the rounds that have both; None if none has."""
        base, other = ({trial.round: trial.token_s for trial in self.of(each)} for each in (0, side))
        rounds = sorted(base.keys() & other.keys())
        if not rounds:
            return None
        first, second = [base[each] for each in rounds], [other[each] for each in rounds]
        return compare(first, second, comparisons=len(self.sides) - 1, seed=self.settings.seed)

    def remarks(self) -> Iterator[str]:
        """What a reader should know before believing the figures, one line each."""
        yield from self._same_work()
        yield from self._entries()
        for index, side in enumerate(self.sides):
            found = self.figures(index)
            if found is not None and found.filling:
                yield f"{side.label}: the cache was still filling when measuring began; raise --warmup"
        needed = pairs_needed(max(1, len(self.sides) - 1))
        if len(self.sides) > 1 and self.settings.rounds < needed:
            yield f"--rounds {self.settings.rounds} cannot show a difference; a verdict needs {needed} rounds"

    def _same_work(self) -> Iterator[str]:
        """Whether the sides decoded the same tokens, and came to the same logits."""
        first: dict[int, Trial] = {}
        for trial in self.trials:
            first.setdefault(trial.prompt, trial)
        for index, side in enumerate(self.sides):
            pairs = [(trial, first[trial.prompt]) for trial in self.of(index)]
            if any(list(mine.tokens) != list(other.tokens) for mine, other in pairs):
                yield f"{side.label}: decoded tokens of its own, since its vocabulary is another; the work differs"
                continue
            other_side = next((other.side for mine, other in pairs if mine.logits_sha256 != other.logits_sha256), None)
            if other_side is None:
                continue
            texts = any(list(mine.choices) != list(other.choices) for mine, other in pairs)
            how = "chooses other tokens" if texts else "has other logits"
            against = self.sides[other_side].label
            if self._model(index) != self._model(other_side):
                yield f"{side.label}: runs another model than {against}"
            elif index == other_side:
                yield f"{side.label}: {how} from one trial to the next, which a lossless run never does"
            elif self._lossy(index) or self._lossy(other_side):
                yield f"{side.label}: {how} than {against}, as one is lossy; bmoe eval measures what that costs"
            else:
                yield (
                    f"{side.label}: {how} than {against}, although neither is lossy: a setting that changes the "
                    "arithmetic (model.kv_type, model.ubatch, a repacking), or a defect"
                )

    def _model(self, side: int) -> object:
        return next((trial.run.get("model") for trial in self.of(side)), None)

    def _lossy(self, side: int) -> bool:
        return any(trial.run.get("lossy") for trial in self.of(side))

    def _entries(self) -> Iterator[str]:
        """Sides that found another machine than the baseline did."""
        for index, side in enumerate(self.sides[1:], 1):
            warm, cold = (self._entry(each, "temperature_c") for each in (index, 0))
            if warm is not None and cold is not None and abs(warm - cold) >= _WARMER_C:
                yield f"{side.label}: began at {warm:.0f} °C, {self.sides[0].label} at {cold:.0f} °C; raise --cooldown"
            free, base = (self._entry(each, "available_bytes") for each in (index, 0))
            if free is not None and base is not None and min(free, base) < _FULLER * max(free, base):
                sizes = f"{free / 2**30:.1f} GiB of memory free, the baseline with {base / 2**30:.1f}"
                yield f"{side.label}: began with {sizes}"
        loads = [trial.entry.load_1min for trial in self.trials if trial.entry.load_1min is not None]
        cpus = next((trial.run.get("machine", {}).get("cpus") for trial in self.trials), None)
        if loads and cpus and statistics.median(loads) > cpus:
            yield f"the machine was busy: a load of {statistics.median(loads):.1f} on {cpus} processors"

    def _entry(self, side: int, name: str) -> float | None:
        known = [value for trial in self.of(side) if (value := getattr(trial.entry, name)) is not None]
        return statistics.median(known) if known else None

    def as_dict(self) -> dict[str, Any]:
        """One JSON object with everything: settings, each side with its run record, every trial token by token."""
        return {
            "schema": SCHEMA,
            "event": "bench",
            "complete": self.complete,
            "prompts": {"version": prompts.VERSION, "count": len(prompts.PROMPTS)},
            "settings": asdict(self.settings),
            "sides": [self._side(index, side) for index, side in enumerate(self.sides)],
            "remarks": list(self.remarks()),
            "trials": [trial.as_dict() for trial in self.trials],
        }

    def _side(self, index: int, side: Side) -> dict[str, Any]:
        found, trials = self.figures(index), self.of(index)
        compared = self.comparison(index) if index else None
        failure = self.failures.get(index)
        return {
            **asdict(side),
            "figures": asdict(found) if found else None,
            "against_baseline": asdict(compared) if compared else None,
            "failure": asdict(failure) if failure else None,
            "run": dict(trials[0].run) if trials else None,
        }
