"""A cache with room for guesses: entries that were read ahead of their use lie apart from those that were used.

The policy does not see a guess. When a routing uses one, it is admitted as any entry that was missing, only that
nothing is read for it. So guesses never evict what was used, and what is cached does not depend on what was guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bmoe.contracts import BankFacts, CachePolicy, ExpertKey, ReadBatch
from bmoe.frames import Spans
from bmoe.native import memory
from bmoe.native.evalhook import Seam
from bmoe.store import ExpertStore


class GuessingStore(ExpertStore):
    """An :class:`~bmoe.store.ExpertStore` of which ``room_bytes`` are for guesses.

    Pages of a guess that was used count as the cache's from then on: it gives up an entry for them when they are
    needed, not before.
    """

    def __init__(
        self,
        banks: Sequence[BankFacts],
        seam: Seam,
        policy: CachePolicy,
        budget_bytes: int,
        max_mappings: int | None,
        room_bytes: int,
    ) -> None:
        super().__init__(banks, seam, policy, budget_bytes, max_mappings)
        self.guesses: dict[ExpertKey, None] = {}
        self._room = self._aside = room_bytes // memory.PAGE
        self._taken = 0
        self._retained: frozenset[ExpertKey] = frozenset()
        self._share(0)

    @property
    def room_bytes(self) -> int:
        """Bytes of the budget that are set aside for guesses, lent to the cache or not."""
        return self._aside * memory.PAGE

    def knows(self, key: ExpertKey) -> bool:
        """Whether an entry is valid, staged or guessed: there is no use in guessing it. KeyError if there is none."""
        bank = self._bank_of[key >> 16]
        if not 0 <= key & 0xFFFF < len(self._pages[bank].edges):
            raise KeyError(key)
        valid = self._resident[self._entry_base[bank] + (key & 0xFFFF)]
        return bool(valid) or key in self.guesses or key in self.staged.get(bank, ())

    def meets(self, key: ExpertKey, others: Collection[ExpertKey]) -> bool:
        """Whether an entry has a page in common with one of ``others``."""
        near = [other & 0xFFFF for other in others if other >> 16 == key >> 16]
        return bool(near) and self._pages[self._bank_of[key >> 16]].meets(key & 0xFFFF, near)

    def guess(self, key: ExpertKey, instead: ExpertKey | None = None) -> ReadBatch | None:
        """Bring memory to an entry that may be needed and say what to read; None if the room is taken.

        The guess ``instead``, whose reads have ended, is given up for it.
        """
        pages, expert = self._pages[self._bank_of[key >> 16]], key & 0xFFFF
        frames, needed = self.frames, pages.pages
        try:
            if instead is not None:
                frames.give_back(self._vacate(instead))
            if self._taken + needed > self._room:
                return None
            donor = frames.unspare()
            self._share(needed)
            donor = self._make_room(needed, frames.budget - frames.spare, donor)
            if frames.held + needed > frames.budget:  # all else is pinned
                frames.give_back(donor)
                self._share(0)
                return None
            frames.keep_spares(min(frames.spare_limit, frames.budget - frames.held - needed))
            self.guesses[key] = None
            self._taken += needed
            frames.occupy(pages, expert, donor)
            self._share(0)
            return pages.reads([expert])
        except BaseException:
            self._start_over()
            raise

    def forgo(self, key: ExpertKey) -> None:
        """A guess is given up; nothing of it is being read."""
        self.frames.give_back(self._vacate(key))

    def retain(self, keys: Collection[ExpertKey]) -> None:
        """Until the next call, give these up last: a policy is asked for others first. Their ranks stay as they are."""
        self._retained = frozenset(keys)

    def lend(self, lent: bool) -> None:
        """Whether the cache may use the room too, while nothing is guessed; there must be no guess.

        The cache grows into it miss by miss. Taken back, it is freed when the next entry needs memory, guessed or not.
        """
        self._room = 0 if lent else self._aside
        self._share(0)

    def resize(self, budget_bytes: int, room_bytes: int = 0) -> None:
        """As :meth:`ExpertStore.resize`; there must be no guess. A room that is lent stays so."""
        self.frames.keep_spares(0)
        lent = self._room < self._aside
        self._aside = room_bytes // memory.PAGE
        self._room = 0 if lent else self._aside
        super().resize(budget_bytes)
        self._share(0)

    def _share(self, more: int) -> None:
        """What of the room no guess has taken, and ``more`` pages will not, is for pages that wait for one."""
        self.frames.keep_spares(max(0, self._room - self._taken - more))

    def _limit(self) -> int:
        return self.frames.budget - self._room + self._taken

    def _claim(self, bank: int, missing: list[ExpertKey]) -> list[ExpertKey]:
        used = [key for key in missing if key in self.guesses]
        if not used:
            return missing
        self.staged.setdefault(bank, []).extend(used)
        for key in used:
            del self.guesses[key]
            self._taken -= self._pages[bank].pages
            self._admit_one(key, cold=self._withheld)
        self._share(0)
        return [key for key in missing if key not in used]

    def _evict(self, pinned: set[ExpertKey]) -> Spans | None:
        if self._retained:
            spans = super()._evict(pinned | self._retained)
            if spans is not None:
                return spans
        return super()._evict(pinned)

    def _vacate(self, key: ExpertKey) -> Spans:
        bank = self._bank_of[key >> 16]
        del self.guesses[key]
        self._taken -= self._pages[bank].pages
        self._share(0)
        return self.frames.vacate(self._pages[bank], key & 0xFFFF)

    def _start_over(self) -> None:
        self.guesses.clear()
        self._taken = 0
        self.frames.spare_limit = self._room
        super()._start_over()
