"""What earlier runs used most comes into the cache before the first token, and what this one uses is kept for the next.

The entries of a heat file are read in its order, the most used first, in batches as large as those of a routing, and
belong to no decode: hits, misses and bytes of a run are counted from the first token on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from bmoe.contracts import BatchContext, ExpertKey, Fetcher, ModelFacts, Remembering
from bmoe.errors import BmoeError, ReadError
from bmoe.heat import Heat, add_heat
from bmoe.log import get_logger
from bmoe.store import ExpertStore

SHARE = 0.75
"""Of the budget. What is read too much costs time at open alone: it is the first to go, coldest first."""


class Warmth:
    """The heat file of an engine. ``preloaded_bytes`` were read for it at open."""

    def __init__(self, path: str, facts: ModelFacts, heat: Heat) -> None:
        self.preloaded_bytes = 0
        self._path, self._facts, self._heat = path, facts, heat
        self._uses: Counter[ExpertKey] = Counter()
        self._tokens, self._counting = 0, False

    def preload(
        self, store: ExpertStore, fetcher: Fetcher, plugins: Sequence[object], batch: int, cancelled: Callable[[], bool]
    ) -> None:
        """Tell those of ``plugins`` that want to know what was used, read the hottest entries, and count from now on.

        ``batch`` is the most reads that the fetcher takes at a time. A read that fails ends it: what a decode then
        needs of it fails that decode.
        """
        store.tell(self.touched)
        chances = self._heat.chances()
        for plugin in plugins if chances else ():
            if isinstance(plugin, Remembering):
                plugin.remember(chances)
        size = {bank.layer << 8 | bank.bank: bank.entry_bytes for bank in self._facts.banks}
        hottest = sorted(chances, key=lambda key: chances[key] / size[key >> 16], reverse=True)  # hits per byte
        try:
            for bank, experts in store.preload(hottest, int(SHARE * store.budget_bytes)).items():
                last = len(self._facts.banks[bank].projections) - 1
                step = max(1, batch // (last + 1))
                for first in range(0, len(experts), step):
                    if cancelled():
                        store.abandon()
                        return
                    ticket = fetcher.submit(store.reads(bank, experts[first : first + step]))
                    self.preloaded_bytes += fetcher.wait(ticket, last)
                store.commit(bank)
        except ReadError as error:
            store.abandon()
            get_logger().warning("not everything could be read that earlier runs used", reason=str(error))
        except BaseException:
            store.abandon()
            raise

    def begin(self, batch: BatchContext) -> None:
        """A decode begins; a prompt uses nearly everything and is not counted, nor are guesses, which are no text."""
        self._counting = batch.phase not in ("prefill", "draft")

    def ended(self, tokens: int) -> None:
        """It succeeded."""
        self._tokens += tokens if self._counting else 0

    def touched(self, keys: Sequence[ExpertKey]) -> None:
        """Entries were used."""
        if self._counting:
            self._uses.update(keys)

    def close(self) -> None:
        """Add what was decoded to the file, once; a failure is logged."""
        tokens, self._tokens = self._tokens, 0
        if tokens:
            try:
                add_heat(self._path, self._facts, tokens, self._uses)
            except BmoeError as error:
                get_logger().warning("use counts are not kept", reason=str(error))
