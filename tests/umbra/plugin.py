"""A third party's plugin: one cache policy, one sink and one architecture row."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import Field

from bmoe import (
    ArchRow,
    CachePolicy,
    ExpertKey,
    Facts,
    Options,
    Provider,
    RunRecord,
    RunSummary,
    Sink,
    TokenRecord,
    hookimpl,
)


class HotsetOptions(Options):
    """Options of ``umbra.hotset``."""

    keep: int = Field(4, ge=1, description="entries that are never given up")


class Hotset:
    """Keeps the entries that were used most often, also below one token's cycle."""

    below_cycle = True

    def __init__(self) -> None:
        self.uses: dict[ExpertKey, int] = {}

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        for key in keys:
            if key in self.uses:
                self.uses[key] += 1

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self.uses[key] = 0 if cold else 1

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        free = [key for key in self.uses if key not in pinned]
        return min(free, key=self.uses.__getitem__) if free else None

    def forget(self, key: ExpertKey, /) -> None:
        self.uses.pop(key, None)


class Counter:
    """A sink that counts what it gets."""

    def __init__(self) -> None:
        self.tokens = 0

    def open(self, run: RunRecord, /) -> None:
        self.tokens = 0

    def token(self, record: TokenRecord, /) -> None:
        self.tokens += 1

    def close(self, summary: RunSummary | None, /) -> None:
        pass


def _hotset(options: HotsetOptions, facts: Facts, /) -> CachePolicy:
    return Hotset()


def _counter(options: Options, facts: Facts, /) -> Sink:
    return Counter()


@hookimpl
def bmoe_caches() -> list[Provider[CachePolicy]]:
    return [Provider("umbra.hotset", _hotset, HotsetOptions, summary="keeps what is used most")]


@hookimpl
def bmoe_sinks() -> list[Provider[Sink]]:
    return [Provider("umbra.counter", _counter)]


@hookimpl
def bmoe_archs() -> list[ArchRow]:
    return [ArchRow("umbra-moe", (("ffn_up_exps", "ffn_down_exps"),), gating="sigmoid")]
