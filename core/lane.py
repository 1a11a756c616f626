"""The read-ahead lane: what a prefetcher suggests is read while the device has nothing else to do.

Guesses have a room of their own in the cache, and reads of the lower rank in the fetcher: none delays a read that is
needed by more than the few pieces that are with the device already. A guess that fails is no failure of the decode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from bmoe.contracts import BankFacts, BatchContext, ExpertKey, Fetcher, Prefetcher, Ticket, expert_key
from bmoe.errors import PluginError, ReadError
from bmoe.governor import Governor
from bmoe.guesses import GuessingStore
from bmoe.native.evalhook import Seam
from bmoe.sight import Sight


@dataclass(slots=True)
class LaneCounters:
    """Sums since open: bytes that guesses brought in, those of them that were used, and those given up unused.

    What is neither is in memory still. ``claimed`` counts entries that a routing used, ``failed`` those whose read
    failed.
    """

    read_bytes: int = 0
    used_bytes: int = 0
    wasted_bytes: int = 0
    claimed: int = 0
    failed: int = 0


@dataclass(slots=True)
class Guess:
    """An entry that was read ahead, or is being read; ``past`` once its layer was routed and did not use it."""

    bank: int
    ticket: Ticket
    landed: bool = False
    past: bool = False


class Lane:
    """Between a prefetcher, the store's room for guesses, and the fetcher. All calls come from the decoding thread."""

    def __init__(
        self, prefetcher: Prefetcher, store: GuessingStore, fetcher: Fetcher, seam: Seam, banks: Sequence[BankFacts]
    ) -> None:
        """``banks`` are those that the prefetcher knows of, the first of the seam's: the trunk's."""
        self.counters = LaneCounters()
        self._prefetcher, self._store, self._fetcher, self._seam = prefetcher, store, fetcher, seam
        self._bank_of = {expert_key(b.layer, 0, b.bank) >> 16: index for index, b in enumerate(banks)}
        self._last = [len(bank.projections) - 1 for bank in seam.banks]
        self._guesses: dict[ExpertKey, Guess] = {}
        self.governor = Governor(max(bank.entry_bytes for bank in banks))
        self.listens = True
        """Whether the prefetcher is shown the routings of this decode and asked. One that is switched off, or compared
        with none, is not: its own work is a part of what it costs."""
        self._told = (0, 0)
        self._retain = getattr(prefetcher, "retain", None)

    def yield_to(self, bank: int, keys: Sequence[ExpertKey]) -> None:
        """Before the reads of a routing are submitted: none of a guess's pages may be the target of one of them.

        A guess that is needed is waited for, one that is not is given up. With the pages of the others it is left.
        """
        for key, guess in list(self._guesses.items()):
            if guess.bank == bank and not guess.landed and self._store.meets(key, keys):
                if key in keys:
                    with contextlib.suppress(ReadError):  # then it is read anew
                        self._fetcher.wait(guess.ticket, self._last[bank])
                else:
                    self._judge(guess, right=False)
                    self._fetcher.cancel(guess.ticket)
                self._end(key, guess)

    def claim(self, keys: Sequence[ExpertKey]) -> list[Ticket]:
        """The tickets of the guesses among ``keys``, which the store has staged: from now on they are waited for."""
        claimed = [guess for key in keys if (guess := self._guesses.pop(key, None)) is not None]
        for guess in claimed:
            self._judge(guess, right=True)
            self.counters.claimed += 1
            self.counters.used_bytes += guess.ticket.nbytes
            if not guess.landed:
                self.counters.read_bytes += guess.ticket.nbytes
        return [guess.ticket for guess in claimed]

    def attend(self, bank: int, sight: Sight, *, asked: bool) -> None:
        """Show the routing that is being handled to the prefetcher, and :meth:`look` if it is to be asked.

        One of a head for next-token prediction is none of its business.
        """
        if bank >= len(self._bank_of):
            return
        self._prefetcher.observe(sight.event(self._prefetcher.wants))
        if asked:
            self.look(bank)

    def look(self, bank: int) -> None:
        """After the reads of a routing were submitted: note what has arrived, ask for guesses and begin them.

        Afterwards nothing is being read for ``bank`` but what it needs: a drive that decrypts in place would put other
        bytes, for a moment, into the pages that a guess shares with an expert that is computed.
        """
        for key, guess in list(self._guesses.items()):
            if guess.bank == bank:
                self._judge(guess, right=False)
                guess.past = True
                if not guess.landed:
                    self._fetcher.cancel(guess.ticket)
                    self._end(key, guess)
        self._land()
        trusted = self.governor.allowed()
        layer = self._seam.banks[bank].layer
        suggested = self._prefetcher.suggest(layer) if trusted else ()
        if self._retain is not None:
            self._store.retain(self._retain(layer) if trusted else ())
        for key in suggested:
            if not self._begin(key, bank, trusted):
                break

    @property
    def note(self) -> str:
        """Why nothing is read ahead now, in words; empty while it is."""
        return self._given_up or self.governor.note

    def tally(self) -> tuple[int, int, int, int]:
        """Sums since open: bytes read ahead, wasted and used of them, and tokens for which it was switched off."""
        counters = self.counters
        return counters.read_bytes, counters.wasted_bytes, counters.used_bytes, self.governor.off_tokens

    def begin(self, batch: BatchContext) -> None:
        """Before a decode of these tokens."""
        self._told = (self.counters.read_bytes, self.counters.used_bytes)
        self.listens = not self._given_up and (self.governor.is_on or not _is_token(batch))
        if not self.listens:
            self._store.retain(())
            for key, guess in list(self._guesses.items()):  # as :meth:`look` would see to it
                if not guess.landed:
                    self._fetcher.cancel(guess.ticket)
                    self._end(key, guess)

    def ended(self, batch: BatchContext, took_s: float) -> None:
        """A decode of these tokens ended. While it does not pay to read ahead, the cache has the room for guesses."""
        told, counters = self._told, self.counters
        if not _is_token(batch):
            return
        off = self.governor.token(took_s, counters.read_bytes - told[0], counters.used_bytes - told[1])
        off = off or bool(self._given_up)
        if off:
            self.clear()
        self._store.lend(off)

    def clear(self) -> None:
        """Give up every guess; afterwards nothing of the lane is being read."""
        guesses, self._guesses = self._guesses, {}
        self._store.retain(())
        with contextlib.ExitStack() as all_of_it:  # an interrupt in one step keeps no other from being done
            for key in list(self._store.guesses):
                all_of_it.callback(self._store.forgo, key)
            for guess in guesses.values():
                all_of_it.callback(self._count, guess)
                all_of_it.callback(self._fetcher.cancel, guess.ticket)

    @property
    def _given_up(self) -> str:
        """Why the prefetcher suggests nothing any more, in words; empty while it may."""
        return getattr(self._prefetcher, "note", "")

    def _judge(self, guess: Guess, *, right: bool) -> None:
        """Its layer was routed: it was used, or it was not. What is used later all the same had counted already."""
        if not guess.past:
            self.governor.judge(right)

    def _begin(self, key: ExpertKey, routed: int, trusted: int) -> bool:
        """Read one entry ahead, if that is of use; False if no more can be."""
        try:
            if self._store.knows(key) or self._bank_of[key >> 16] == routed or self._store.meets(key, self._flying()):
                return True
        except (KeyError, TypeError):
            name = type(self._prefetcher).__name__
            raise PluginError(f"the prefetcher {name} suggests {key!r}, no entry of this model; correct it") from None
        if len(self._flying()) >= trusted:
            return False
        reads = self._store.guess(key)
        if reads is None:
            old = next((k for k, guess in self._guesses.items() if guess.past and guess.landed), None)
            if old is None:
                return False
            self.counters.wasted_bytes += self._guesses.pop(old).ticket.nbytes
            reads = self._store.guess(key, old)
            if reads is None:
                return False
        bank = self._bank_of[key >> 16]
        self._guesses[key] = Guess(bank, self._fetcher.submit(reads, ahead=True))
        return True

    def _flying(self) -> list[ExpertKey]:
        return [key for key, guess in self._guesses.items() if not guess.landed]

    def _land(self) -> None:
        """Note what has arrived, in the order in which it was asked for."""
        for key, guess in list(self._guesses.items()):
            if not guess.landed:
                if not self._fetcher.ready(guess.ticket, self._last[guess.bank]):
                    return
                self._end(key, guess)

    def _end(self, key: ExpertKey, guess: Guess) -> None:
        """Nothing of a guess is being read any more: it is whole, or it is given up."""
        whole = self._fetcher.ready(guess.ticket, self._last[guess.bank])
        try:
            nbytes = self._fetcher.wait(guess.ticket, -1)
        except ReadError:
            nbytes, whole = 0, False
            self.counters.failed += 1
        self.counters.read_bytes += nbytes
        guess.landed = whole
        if not whole:
            self.counters.wasted_bytes += nbytes
            del self._guesses[key]
            self._store.forgo(key)

    def _count(self, guess: Guess) -> None:
        """A guess that is given up, landed or cancelled."""
        if guess.landed:
            self.counters.wasted_bytes += guess.ticket.nbytes
            return
        with contextlib.suppress(ReadError):
            nbytes = self._fetcher.wait(guess.ticket, -1)
            self.counters.read_bytes += nbytes
            self.counters.wasted_bytes += nbytes


def _is_token(batch: BatchContext) -> bool:
    """Whether a decode is one of those by which the governor judges."""
    return batch.phase == "decode" and len(batch.positions) == 1
