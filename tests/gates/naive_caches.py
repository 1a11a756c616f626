"""Cache policies in their plainest form: lists and whole histories, searched as a whole."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from bmoe.contracts import ExpertKey, RoutingEvent


class NaiveLru:
    """Least recently used as a list, searched from its cold end."""

    below_cycle = False

    def __init__(self, capacity: int) -> None:
        self._order: list[ExpertKey] = []
        self._used: list[ExpertKey] = []

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._used = list(keys)
        self._rank(self._used)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._order.insert(0 if cold else len(self._order), key)
        if not cold and key in self._used:
            self._rank(self._used[self._used.index(key) :])

    def _rank(self, keys: Sequence[ExpertKey]) -> None:
        self._order = [k for k in self._order if k not in keys] + [k for k in keys if k in self._order]

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        return next((key for key in self._order if key not in pinned), None)

    def forget(self, key: ExpertKey, /) -> None:
        self._order = [other for other in self._order if other != key]


class NaiveNone(NaiveLru):
    """First in, first out as a list."""

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Use does not count."""

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._order.append(key)


class NaiveHistory:
    """All uses of every entry, by the number of its layer's routing; subclasses rank by their decayed sum."""

    below_cycle = True
    half_life = 8.0

    def __init__(self, capacity: int) -> None:
        self._uses: dict[ExpertKey, list[int]] = {}
        self._times: dict[int, int] = {}
        self._here: set[ExpertKey] = set()
        self._now = 0

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._now = keys[0] >> 16
        self._times[self._now] = self._times.get(self._now, 0) + 1
        for key in keys:
            self._uses.setdefault(key, []).append(self._times[self._now])

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._here.add(key)

    def forget(self, key: ExpertKey, /) -> None:
        self._here.discard(key)

    def count(self, key: ExpertKey, now: float) -> float:
        return sum(2 ** ((time - now) / self.half_life) for time in self._uses.get(key, []))

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        free = sorted(key for key in self._here if key not in pinned)
        return max(free, key=lambda key: round(self.score(key), 9), default=None)

    def score(self, key: ExpertKey) -> float:
        """By which the entry with the most goes first; of equal ones that with the smallest key."""
        return -self.count(key, 0)


class NaiveLfu(NaiveHistory):
    """All uses count alike; of equal ones the oldest last use goes first."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: list[ExpertKey] = []

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        super().touch(keys)
        self._order += keys

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        free = [key for key in self._here if key not in pinned]
        last = {key: index for index, key in enumerate(self._order)}
        return min(free, key=lambda key: (len(self._uses.get(key, ())), last.get(key, 0)), default=None)


class NaiveNextUse(NaiveHistory):
    """The distance to the next use, computed for every entry."""

    def score(self, key: ExpertKey) -> float:
        groups = sorted(self._times)
        chance = self.count(key, self._times[key >> 16]) * (1 - 2 ** (-1 / self.half_life))
        turn = (groups.index(key >> 16) - groups.index(self._now) - 1) % len(groups) + 1
        return turn + len(groups) * (1 / min(1.0, chance) - 1)


class NaiveRouterEma(NaiveNextUse):
    """All that was seen of every layer, one token at a time; sums over it instead of averages that move."""

    near_half_life, near = 2.0, 0.5
    wants = frozenset({"probs"})

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._shares: dict[int, list[list[float]]] = {}

    def observe(self, event: RoutingEvent, /) -> None:
        for chosen, given in zip(event.ids.tolist(), [] if event.probs is None else event.probs.tolist(), strict=True):
            shares = [min(1.0, len(chosen) * each / sum(given)) for each in given]
            self._shares.setdefault(event.layer << 8, []).append(shares)

    def score(self, key: ExpertKey) -> float:
        groups, seen = sorted(self._times), self._shares[key >> 16]
        uses = self.count(key, self._times[key >> 16]) * (1 - 2 ** (-1 / self.half_life))
        fade = 2 ** (-1 / self.near_half_life)
        near = sum((1 - fade) * fade**age * each[key & 0xFFFF] for age, each in enumerate(reversed(seen)))
        turn = (groups.index(key >> 16) - groups.index(self._now) - 1) % len(groups) + 1
        return turn + len(groups) * (1 / ((1 - self.near) * uses + self.near * near) - 1)


class NaiveEdgeMoe(NaiveHistory):
    """Layers until the turn over all uses."""

    def score(self, key: ExpertKey) -> float:
        groups = sorted({k >> 16 for k in self._uses})
        turn = (groups.index(key >> 16) - groups.index(self._now)) % len(groups) or len(groups)
        return turn / len(self._uses[key])


class NaiveSieve:
    """A list in the order of admission, a hand, and marks; the hand is moved when what it names is taken."""

    below_cycle = False

    def __init__(self, capacity: int) -> None:
        self._order: list[ExpertKey] = []
        self._used: set[ExpertKey] = set()
        self._hand = 0

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        self._used |= set(keys) & set(self._order)

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        self._order.append(key)

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        seen = self._order[self._hand :] + self._order[: self._hand]
        free = [key for key in seen if key not in pinned]
        return next((key for key in free if key not in self._used), free[0] if free else None)

    def forget(self, key: ExpertKey, /) -> None:
        if key not in self._order:
            return
        at = self._order.index(key)
        passed = range(self._hand, at) if at >= self._hand else [*range(self._hand, len(self._order)), *range(at)]
        self._used -= set(self._order) if key in self._used else {self._order[index] for index in passed}
        self._order.remove(key)
        self._hand = at


class NaiveS3Fifo:
    """The paper's eviction, carried out when a victim is asked for, on lists of entries and their uses."""

    below_cycle = True

    def __init__(self, capacity: int) -> None:
        self._capacity, self._share = capacity, max(1, capacity // 10)
        self._small: list[list[int]] = []
        self._main: list[list[int]] = []
        self._gone: list[ExpertKey] = []

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        for entry in self._small + self._main:
            entry[1] = min(3, entry[1] + (entry[0] in keys))

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        (self._main if key in self._gone else self._small).append([key, 0])
        self._gone = [gone for gone in self._gone if gone != key]

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        if len(self._small) >= self._share or not self._main:
            for entry in list(self._small):
                if entry[1] >= 2:
                    self._small.remove(entry)
                    self._main.append([entry[0], 0])
                elif entry[0] not in pinned:
                    self._gone = [*self._gone, entry[0]][-self._capacity :]
                    return entry[0]
        while any(key not in pinned for key, _ in self._main):
            key, uses = self._main[0]
            if not uses and key not in pinned:
                return key
            self._main = [*self._main[1:], [key, max(0, uses - 1)]]
        free = sorted((uses, index) for index, (key, uses) in enumerate(self._small) if key not in pinned)
        if not free:
            return None
        self._gone = [*self._gone, self._small[free[0][1]][0]][-self._capacity :]
        return self._small[free[0][1]][0]

    def forget(self, key: ExpertKey, /) -> None:
        self._small = [entry for entry in self._small if entry[0] != key]
        self._main = [entry for entry in self._main if entry[0] != key]


class NaiveArc:
    """The paper's four lists, each from its oldest use."""

    below_cycle = False

    def __init__(self, capacity: int) -> None:
        self._capacity, self._target = capacity, 0.0
        self._t: tuple[list[ExpertKey], list[ExpertKey]] = ([], [])
        self._b: tuple[list[ExpertKey], list[ExpertKey]] = ([], [])

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        for key in keys:
            for each in self._t:
                if key in each:
                    each.remove(key)
                    self._t[1].append(key)
                    break
            else:
                once, again = map(len, self._b)
                if key in self._b[0]:
                    self._target = min(self._capacity, self._target + max(1, again / once))
                if key in self._b[1]:
                    self._target = max(0, self._target - max(1, once / again))

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        known = False
        for gone in self._b:
            known |= key in gone
            gone[:] = [other for other in gone if other != key]
        self._t[known].append(key)

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        first = 0 if len(self._t[0]) > self._target else 1
        return next((key for key in self._t[first] + self._t[1 - first] if key not in pinned), None)

    def forget(self, key: ExpertKey, /) -> None:
        for here, gone in zip(self._t, self._b, strict=True):
            if key in here:
                here.remove(key)
                gone.append(key)
        while self._b[0] and len(self._t[0]) + len(self._b[0]) > self._capacity:
            del self._b[0][0]
        while self._b[1] and len(self._b[0]) + len(self._b[1]) > self._capacity:
            del self._b[1][0]
