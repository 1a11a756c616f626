"""What rounds of draft and verification came to, for a page: from a routing trace, or from the records of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bmoe.replay.route_trace import ACCEPTED, GUESS, REJECTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BINS = 400
SERIES = ("drafted", "accepted", "demanded", "live", "verify_bytes", "draft_bytes", "rejected_bytes")
"""Per round: tokens, entries that routers asked for and that policies left, and bytes."""
_RECORDED = dict(zip(SERIES, ("drafted", "accepted", "demanded", "lookups", "demand_bytes"), strict=False))


def of_records(tokens: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rounds of the token records of one run; None if none verified a draft."""
    rounds = [token for token in tokens if token.get("drafted")]
    if not rounds:
        return None
    series = {name: [_number(token.get(_RECORDED.get(name, name))) for token in rounds] for name in SERIES}
    rates = [_number(rate) for rate in summary.get("acceptance") or ()]
    return _digest(series, [rate for rate in rates if rate is not None])


def of_routes(columns: Mapping[str, NDArray[Any]], n_expert: int) -> dict[str, Any] | None:
    """The rounds of the columns of a routing trace; None if it has none.

    What routers asked for before policies changed it is not in a trace.
    """
    import numpy as np

    if "round" not in columns:
        return None
    phase, nbytes = columns["phase"], columns["expert_bytes"].astype(np.float64)
    verify = (phase == ACCEPTED) | (phase == REJECTED)
    numbers, of = np.unique(columns["round"][verify], return_inverse=True)
    of, count = of.reshape(-1), len(numbers)
    if not count:
        return None
    entry = (of * (int(columns["layer"].max()) + 1) + columns["layer"][verify]) * n_expert + columns["expert"][verify]
    entries, of_entry = np.unique(entry, return_inverse=True)
    of_entry = of_entry.reshape(-1)
    heard = np.zeros(len(entries), np.bool_)
    heard[of_entry[phase[verify] == ACCEPTED]] = True
    owner = np.zeros(len(entries), np.int64)
    owner[of_entry] = of
    read = np.bincount(of_entry, nbytes[verify], len(entries))
    place, step = columns["place"][verify], columns["step"][verify]
    depth = np.zeros(count, np.int64)
    root = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(root, of, step)
    np.maximum.at(depth, of, step - root[of])
    guesses = phase == GUESS
    at = np.searchsorted(numbers, columns["round"][guesses])
    known = at < count
    known[known] = numbers[at[known]] == columns["round"][guesses][known]
    drafted, accepted = _tokens(of, place, count) - 1, _tokens(of, place, count, phase[verify] == ACCEPTED) - 1
    series: dict[str, list[float | None]] = {
        "drafted": drafted.tolist(),
        "accepted": accepted.tolist(),
        "demanded": [None] * count,
        "live": np.bincount(owner, minlength=count).tolist(),
        "verify_bytes": np.bincount(of, nbytes[verify], count).tolist(),
        "draft_bytes": np.bincount(at[known], nbytes[guesses][known], count).tolist(),
        "rejected_bytes": np.bincount(owner[~heard], read[~heard], count).tolist(),
    }
    return _digest(series, acceptance(accepted.tolist(), depth.tolist()))


def acceptance(accepted: Sequence[int], depths: Sequence[int]) -> list[float]:
    """By position in a draft, the share of tokens accepted where those before were; drafts had paths of ``depths``."""
    rates = []
    for place in range(max(depths, default=0)):
        reached = sum(count >= place < depth for count, depth in zip(accepted, depths, strict=True))
        if not reached:
            break
        rates.append(sum(count > place for count in accepted) / reached)
    return rates


def _digest(series: Mapping[str, Sequence[float | None]], rates: Sequence[float]) -> dict[str, Any]:
    count = len(series["accepted"])
    width = max(1, math.ceil(count / _BINS))
    means = {name: [_mean(values[at : at + width]) for at in range(0, count, width)] for name, values in series.items()}
    sums = {name: sum(value for value in values if value is not None) for name, values in series.items()}
    return {
        "rounds": count, "width": width, "series": means, "acceptance": list(rates),
        "drafted": sums["drafted"], "accepted": sums["accepted"], "length": 1 + sums["accepted"] / count,
        **{name: sums[name] for name in ("verify_bytes", "draft_bytes", "rejected_bytes")},
    }  # fmt: skip


def _tokens(of: NDArray[Any], place: NDArray[Any], count: int, chosen: NDArray[Any] | None = None) -> NDArray[Any]:
    """How many different places each round has, of the rows that are ``chosen``."""
    import numpy as np

    named = np.stack([of, place], axis=1)
    return np.bincount(
        np.unique(named if chosen is None else named[chosen], axis=0)[:, 0].astype(np.int64), None, count
    )


def _number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
