"""Carries a bench out: turn by turn, each in a process of its own, with what was measured kept at every step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bmoe.bench.child import PROGRAM, Child, SideFailed
from bmoe.bench.entry import read_entry_state
from bmoe.bench.prompts import PROMPTS
from bmoe.bench.result import Failure, Result, Settings
from bmoe.bench.schedule import Turn, schedule
from bmoe.bench.sides import Side
from bmoe.bench.trial import Trial

_FIELDS = tuple(Trial.__dataclass_fields__)
_HERE = {"round", "side", "prompt", "entry", "prompt_tokens"}
_MEASURED = set(_FIELDS) - _HERE


class Bench:
    """Measures ``sides`` into ``result``. :meth:`cancel` is for any thread, or a signal handler."""

    def __init__(
        self,
        sides: Sequence[Side],
        settings: Settings,
        *,
        remember: Path | None = None,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        """``remember`` keeps which fetcher was the fastest; ``program`` is the worker's command."""
        self.result = Result(sides, settings)
        self._remember, self._program = remember, program
        self._stop = threading.Event()
        self._child: Child | None = None
        self._given: dict[int, dict[str, Any]] = {}

    def run(self, before: Callable[[Turn], None], after: Callable[[Turn], None]) -> None:
        """Measure until all is done, cancelled, or no side is left; ``before`` and ``after`` see every turn.

        A side that fails is in ``result.failures`` and gets no further turn.
        """
        settings, result = self.result.settings, self.result
        began = False
        for turn in schedule(len(result.sides), settings.rounds, len(PROMPTS)):
            if turn.side in result.failures:
                continue
            if began:
                self._stop.wait(settings.cooldown_s)
            if self._stop.is_set():
                return
            began = True
            before(turn)
            try:
                result.trials.append(self._measure(turn))
            except SideFailed as failure:
                if self._stop.is_set():
                    return
                result.failures[turn.side] = Failure(turn.round, failure.kind, str(failure))
            after(turn)
        result.complete = not self._stop.is_set()

    def cancel(self) -> None:
        """End the measurement in progress, which is lost, and begin no other one."""
        self._stop.set()
        child = self._child
        if child is not None:
            child.kill()

    def _measure(self, turn: Turn) -> Trial:
        settings, side = self.result.settings, self.result.sides[turn.side]
        request = {
            "profile": side.profile,
            "model": side.model,
            "overrides": list(side.overrides),
            "remember": str(self._remember) if self._remember else None,
            "prompt": PROMPTS[turn.prompt],
            "warmup": settings.warmup,
            "tokens": settings.tokens,
            "given": self._given.get(turn.prompt),
        }
        entry = read_entry_state()
        with Child(request, silence_s=settings.silence_s, program=self._program) as child:
            self._child = child
            if self._stop.is_set():  # it was asked for before there was a child to end
                child.kill()
            try:
                found = child.measured()
            finally:
                self._child = None
        missing = sorted({"prompt_ids", "n_vocab", *_MEASURED} - found.keys())
        if missing:
            raise SideFailed("protocol", f"the answer of the process lacks {', '.join(missing)}")
        found |= {"round": turn.round, "side": turn.side, "prompt": turn.prompt, "entry": entry}
        found["prompt_tokens"] = len(found["prompt_ids"])
        given = {name: found[name] for name in ("prompt_ids", "n_vocab", "tokens")}
        self._given.setdefault(turn.prompt, given)
        return Trial(**{name: found[name] for name in _FIELDS})
