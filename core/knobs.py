"""What routing policies do to a routing: applied in the profile's order, held to the loss budget, written back.

The ids are changed where the graph has chosen them, so that whatever takes a slot gets its true weight. A slot without
a part gets the id of an expert that the token uses anyway, and no weight, at a node in between: before the weights are
made a whole if the others are to make up for it, after that if they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from bmoe.contracts import BatchContext, ExpertKey, Routing, RoutingPolicy
from bmoe.errors import ModelError, NativeError, PluginError
from bmoe.loss import Ledger, Turned, draw, mass_lost
from bmoe.native.evalhook import Seam
from bmoe.native.weighing import Weighing, weights
from bmoe.sight import Sight

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(slots=True)
class KnobCounters:
    """Sums since open: slots routed, left out, given to another expert; token routings and the mass that they lost.

    ``unread_bytes`` are of entries that were missing and that nothing needed in the end.
    """

    slots: int = 0
    dropped: int = 0
    substituted: int = 0
    routings: int = 0
    lost: float = 0.0
    unread_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Open:
    """A routing whose weights are still to be written, at the node ``at``.

    ``ids`` is the graph's memory, ``final`` what it holds in the end; ``gain`` [n_tokens, 1] is what the slots that
    make up for dead ones grow by where the graph does not see to it.
    """

    at: bytes
    ids: NDArray[np.int32]
    final: NDArray[np.int32]
    turned: Turned
    gain: NDArray[np.float64]
    weighing: Weighing


class Knobs:
    """The routing policies of an engine. All calls come from the thread that decodes.

    ``weighings`` are by bank. ``budget`` is the loss that a token may have at most; None = each policy on its own.
    """

    def __init__(
        self,
        policies: Sequence[RoutingPolicy],
        seam: Seam,
        weighings: Sequence[Weighing],
        budget: float | None = None,
    ) -> None:
        self.counters = KnobCounters()
        self._policies, self._seam, self._weighings, self._budget = tuple(policies), seam, weighings, budget
        self._asked: tuple[RoutingPolicy, ...] = ()
        self._allowed = budget
        self._ledger = Ledger(0)
        self._open: _Open | None = None
        seam.weigh = self.weigh

    @property
    def acts(self) -> bool:
        """Whether a policy is asked about the decode in progress."""
        return bool(self._asked)

    @property
    def worst(self) -> float:
        """The greatest loss of a token in the decode that is in progress, or in the last one."""
        return float(self._ledger.means.max(initial=0.0))

    def begin(self, batch: BatchContext) -> None:
        """Before a decode of these tokens."""
        self._open = None
        self._ledger = Ledger(len(batch.positions))
        self._asked = tuple(policy for policy in self._policies if batch.phase in policy.phases)
        self._allowed = None if batch.phase == "draft" else self._budget  # what a guess loses, nobody reads

    def turn(self, bank: int, sight: Sight, keys: list[ExpertKey]) -> list[ExpertKey]:
        """Let the policies change a routing; its keys afterwards, in the order of their last use.

        Raises PluginError naming policy and layer if one leaves a token without an expert, or an id that is none.
        """
        self.expect_weighed()
        facts, counters = self._seam.banks[bank], self.counters
        routing, whole = self._routing(bank, sight)
        own = routing.ids.copy()
        counters.slots += own.size
        counters.routings += len(own)
        turned = self._applied(routing, own, sight)
        if turned is None:
            self._ledger.keep(sight.rows)
            return keys
        lost = mass_lost(whole, turned, routing.probs)
        self._ledger.lost(sight.rows, lost)
        moved, out = turned.ids != own, turned.out
        counters.lost += float(lost.sum())
        counters.dropped += int(out.sum())
        counters.substituted += int((moved & ~out).sum())
        missing = ~routing.resident
        fewer = _distinct(missing, own) - _distinct(missing, turned.ids[~out])
        counters.unread_bytes += fewer * facts.entry_bytes
        if moved.any():
            turned = _in_order(turned, moved.any(axis=1), routing.scores)
        final = _padded(turned)
        sight.own = own
        self._write(bank, sight, turned, final, routing.probs)
        return [self._seam.key_base[bank] + e for e in _last_use(final)]

    def weigh(self) -> None:
        """The node of weights that was sought is computed: give the slots without a part none."""
        pending, self._open = self._open, None
        if pending is None:
            raise NativeError("weights were announced that nobody waits for")
        turned, weighing = pending.turned, pending.weighing
        found = weights(self._seam.node, *pending.final.shape)
        if weighing.kind == "plain":
            found *= pending.gain
            found[turned.out] = 0
        elif pending.at == weighing.gathered:
            found[turned.dead] = float("-inf") if weighing.kind == "softmax" else 0
            if turned.mute.any():
                self._seek(replace(pending, at=weighing.last))
        else:
            found[turned.mute] = 0
            pending.ids[...] = pending.final

    def expect_weighed(self) -> None:
        """Raise NativeError if the weights of a routing were never met: its experts computed with wrong ones."""
        if self._open is not None:
            node, self._open = self._open.at.decode(), None
            raise NativeError(f"the graph never came to {node}, where a routing policy acts; leave [[routing]] out")

    def _routing(self, bank: int, sight: Sight) -> tuple[Routing, NDArray[np.float64]]:
        """What the policies are shown, and the probability of each token's own choice, float64 [n_tokens]."""
        facts = self._seam.banks[bank]
        ids, probs, scores, ranking = sight.ids.copy(), sight.probs, sight.scores, sight.ranking
        if probs is None:
            said = f"layer {facts.layer}: the graph does not show what the router gives to each expert"
            raise ModelError(f"{said}; leave [[routing]] out")
        each = probs[_rows(ids), ids]
        whole: NDArray[np.float64] = each.sum(axis=1, dtype=np.float64)
        if not 0 < whole.min() <= whole.max() < float("inf"):  # nothing compares with what is no number
            said = f"layer {facts.layer}: what the router gives to the experts it chose is not a number above 0"
            raise ModelError(f"{said}; the model file is damaged, or leave [[routing]] out")
        scores = probs if scores is None else scores
        if ranking is None:
            ranking = np.argsort(-scores, axis=1, kind="stable").astype(np.int32)
        routing = Routing(
            layer=facts.layer,
            bank=facts.bank,
            n_expert=facts.n_expert,
            batch=sight.batch,
            ids=ids,
            dead=np.zeros(ids.shape, bool),
            mute=np.zeros(ids.shape, bool),
            shares=(each / whole[:, None]).astype(np.float32),
            probs=probs,
            scores=scores,
            ranking=ranking,
            resident=np.frombuffer(self._seam.resident, np.bool_, facts.n_expert, self._seam.entry_base[bank]).copy(),
        )
        return routing, whole

    def _applied(self, routing: Routing, own: NDArray[np.int32], sight: Sight) -> Turned | None:
        """What the policies, or the budget, make of a routing; None if it stays the model's own."""
        proposals: list[Turned] = []
        for policy in self._asked:
            if self._allowed is not None and proposals:
                routing.ids, routing.dead, routing.mute = own.copy(), proposals[0].none(), proposals[0].none()
            routing.activation = sight.activation if "activation" in policy.wants else None
            policy.apply(routing)
            turned = Turned(routing.ids, routing.dead, routing.mute)
            _check(policy, routing, turned, own)
            proposals.append(turned)
        if self._allowed is not None:
            proposals = [each for each in proposals if each.differs(own)]
            if not proposals:
                return None
            allowed = self._ledger.allowed(sight.rows, self._allowed)
            turned = draw(own, proposals, routing.probs, ~routing.resident, allowed)
        return turned if turned.differs(own) else None

    def _write(
        self, bank: int, sight: Sight, turned: Turned, final: NDArray[np.int32], probs: NDArray[np.float32]
    ) -> None:
        """Put the ids into the graph, and wait for the weights if a slot has no part."""
        weighing = self._weighings[bank]
        # what stays in the sum of the weights must be gathered as itself
        late = turned.mute.any() and weighing.kind != "plain"
        sight.ids[...] = _only(final, turned.ids, turned.mute) if late else final
        if not turned.out.any():
            return
        at = weighing.gathered if turned.dead.any() or weighing.kind == "plain" else weighing.last
        self._seek(_Open(at, sight.ids, final, turned, _gain(turned, probs), weighing))

    def _seek(self, pending: _Open) -> None:
        self._open = pending
        self._seam.seek(pending.at)


def _check(policy: RoutingPolicy, routing: Routing, turned: Turned, own: NDArray[np.int32]) -> None:
    """Raise PluginError if a policy left something that cannot be computed."""
    said = f"the routing policy {type(policy).__name__}, layer {routing.layer}"
    if any(column.shape != own.shape for column in turned):
        raise PluginError(f"{said}: it changed the shape of a routing; correct the plugin")
    out = turned.out
    if out.any() and out.all(axis=1).any():
        raise PluginError(f"{said}: it left a token without an expert; correct the plugin")
    if (turned.ids == own).all():
        return
    if turned.ids.min() < 0 or turned.ids.max() >= routing.n_expert:
        raise PluginError(f"{said}: it chose an expert outside 0..{routing.n_expert - 1}; correct the plugin")
    apart = np.sort(np.where(out, -1 - np.arange(own.shape[1]), turned.ids), axis=1)
    if (apart[:, 1:] == apart[:, :-1]).any():
        raise PluginError(f"{said}: it chose an expert twice for one token; correct the plugin")


def _in_order(turned: Turned, rows: NDArray[np.bool_], scores: NDArray[np.float32]) -> Turned:
    """The slots of these rows as the router ranks them: sums in another order have other last bits."""
    at = _rows(turned.ids)
    order = np.argsort(-scores[at, turned.ids], axis=1, kind="stable")
    order[~rows] = np.arange(order.shape[1])
    return Turned(turned.ids[at, order], turned.dead[at, order], turned.mute[at, order])


def _padded(turned: Turned) -> NDArray[np.int32]:
    """The ids, with that of the token's first slot with a part wherever a slot has none."""
    out = turned.out
    pad = turned.ids[_rows(out), out.argmin(axis=1)[:, None]]
    found: NDArray[np.int32] = np.where(out, pad, turned.ids)
    return found


def _only(final: NDArray[np.int32], ids: NDArray[np.int32], mute: NDArray[np.bool_]) -> NDArray[np.int32]:
    found: NDArray[np.int32] = np.where(mute, ids, final)
    return found


def _gain(turned: Turned, probs: NDArray[np.float32]) -> NDArray[np.float64]:
    each = probs[_rows(turned.ids), turned.ids].astype(np.float64)
    whole = each.sum(axis=1, keepdims=True)
    found: NDArray[np.float64] = whole / (whole - (each * turned.dead).sum(axis=1, keepdims=True))
    return found


def _rows(columns: NDArray[Any]) -> NDArray[np.intp]:
    """The number of each row, [n_tokens, 1], to index columns by."""
    return np.arange(len(columns))[:, None]


def _distinct(wanted: NDArray[np.bool_], ids: NDArray[np.int32]) -> int:
    """How many of the experts in ``ids`` are wanted."""
    used = np.zeros(len(wanted), bool)
    used[ids.ravel()] = True
    return int((used & wanted).sum())


def _last_use(ids: NDArray[np.int32]) -> list[int]:
    """Distinct ids in the order of their last use."""
    backwards = dict.fromkeys(ids.ravel()[::-1].tolist())
    return list(backwards)[::-1]
