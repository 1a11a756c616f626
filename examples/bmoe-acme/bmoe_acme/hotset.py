"""Least frequently used, with decay: what was used most often stays, and old fame fades."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pydantic import Field

from bmoe.contracts import ExpertKey, Options


class HotsetOptions(Options):
    """Options of ``acme.hotset``."""

    window: int = Field(default=4096, ge=1, description="uses after which all counts are halved")


class Hotset:
    """Gives up the resident expert with the fewest uses; of equals the one that came first.

    Uses count for experts that are not resident as well, so one that comes back has not lost its rank. After every
    ``window`` uses all counts are halved: a smaller window follows a change of topic sooner and forgets more.
    """

    below_cycle = True  # what is used often stays, however little of one token's experts fits

    def __init__(self, window: int) -> None:
        self._window = window
        self._since_halved = 0
        self._uses: dict[ExpertKey, int] = {}
        self._resident: dict[ExpertKey, None] = {}

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Count one use of each key."""
        for key in keys:
            self._uses[key] = self._uses.get(key, 0) + 1
        self._since_halved += len(keys)
        if self._since_halved >= self._window:
            self._since_halved = 0
            self._uses = {key: count // 2 for key, count in self._uses.items() if count > 1}

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        """Take ``key`` in; one that was read on speculation has no uses yet, so it is the first to go."""
        self._resident[key] = None

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        """The least used resident key that is not pinned; None if there is none. It looks at all of them."""
        free = (key for key in self._resident if key not in pinned)
        return min(free, key=lambda key: self._uses.get(key, 0), default=None)

    def forget(self, key: ExpertKey, /) -> None:
        """Drop ``key``, whose count stays."""
        self._resident.pop(key, None)
