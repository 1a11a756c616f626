"""What routing policies do to a routing: applied in the profile's order, held to the loss budget, written back.

The ids are changed where the graph has chosen them, so that whatever takes a slot gets its true weight. A slot without
a part gets the id of an expert that the token uses anyway, and no weight, at a node in between: before the weights are
made a whole if the others are to make up for it, after that if they are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bmoe.contracts import BankFacts, BatchContext, ExpertKey, Routing, RoutingPolicy
from bmoe.errors import ModelError, NativeError, PluginError
from bmoe.loss import Ledger, Turned, draw, mass_lost
from bmoe.native.evalhook import Seam
from bmoe.native.weighing import Weighing, weights
from bmoe.sight import Sight

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(slots=True)
class KnobCounters:
    """Sums since open: slots routed, left out, given to another expert; token routings and the mass that they lost.

    ``unread_bytes`` are of entries that were missing and that nothing needed in the end. ``worst`` is the greatest loss
    of a token in the last decode.
    """

    slots: int = 0
    dropped: int = 0
    substituted: int = 0
    routings: int = 0
    lost: float = 0.0
    unread_bytes: int = 0
    worst: float = 0.0


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
        self._ledger = Ledger(0)
        self._open: _Open | None = None
        seam.weigh = self.weigh

    def begin(self, batch: BatchContext) -> None:
        """Before a decode of these tokens."""
        self._open = None
        self._ledger = Ledger(len(batch.positions))
        self._asked = tuple(policy for policy in self._policies if batch.phase in policy.phases)
        self.counters.worst = 0.0

    def turn(self, bank: int, sight: Sight, keys: list[ExpertKey]) -> list[ExpertKey]:
        """Let the policies change a routing; its keys afterwards, in the order of their last use.

        Raises PluginError naming policy and layer if one leaves a token without an expert, or an id that is none.
        """
        self.expect_weighed()
        if not self._asked:
            return keys
        import numpy as np

        facts = self._seam.banks[bank]
        resident = np.frombuffer(self._seam.resident, np.bool_, facts.n_expert, self._seam.entry_base[bank]).copy()
        routing = _routing(facts, sight, resident)
        own = routing.ids.copy()
        chosen = np.take_along_axis(routing.probs, own, 1).astype(np.float64).sum(axis=1)
        if not (np.isfinite(chosen) & (chosen > 0)).all():
            said = f"layer {facts.layer}: what the router gives to the experts it chose is not a number above 0"
            raise ModelError(f"{said}; the model file is damaged, or leave [[routing]] out")
        routing.shares = (np.take_along_axis(routing.probs, own, 1) / chosen[:, None]).astype(np.float32)
        turned = self._applied(routing, own, sight)
        lost = mass_lost(chosen, turned, routing.probs)
        self._ledger.lost(sight.rows, lost)
        moved, out = turned.ids != own, turned.dead | turned.mute
        self._count(facts, own, turned, resident, lost)
        if not moved.any() and not out.any():
            return keys
        if moved.any():
            turned = _in_order(turned, moved.any(axis=1), routing.scores)
        final = _padded(turned)
        self._write(bank, sight, turned, final, routing.probs)
        return [self._seam.key_base[bank] + e for e in _last_use(final)]

    def weigh(self) -> None:
        """The node of weights that was sought is computed: give the slots without a part none."""
        pending, self._open = self._open, None
        if pending is None:
            raise NativeError("weights were announced that nobody waits for")
        found, turned, weighing = weights(self._seam.node), pending.turned, pending.weighing
        if weighing.kind == "plain":
            found *= pending.gain
            found[turned.dead | turned.mute] = 0
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

    def _applied(self, routing: Routing, own: NDArray[np.int32], sight: Sight) -> Turned:
        import numpy as np

        proposals = []
        for policy in self._asked:
            if self._budget is not None:
                routing.ids, routing.dead, routing.mute = (
                    own.copy(),
                    np.zeros_like(routing.dead),
                    np.zeros_like(routing.mute),
                )
            routing.activation = sight.activation if "activation" in policy.wants else None
            policy.apply(routing)
            turned = Turned(routing.ids, routing.dead, routing.mute)
            _check(policy, routing, turned, own)
            proposals.append(turned)
        if self._budget is None:
            return proposals[-1]
        return draw(own, proposals, routing.probs, ~routing.resident, self._ledger.allowed(sight.rows, self._budget))

    def _write(
        self, bank: int, sight: Sight, turned: Turned, final: NDArray[np.int32], probs: NDArray[np.float32]
    ) -> None:
        """Put the ids into the graph, and wait for the weights if a slot has no part."""
        weighing = self._weighings[bank]
        # what stays in the sum of the weights must be gathered as itself
        late = turned.mute.any() and weighing.kind != "plain"
        sight.ids[...] = _only(final, turned.ids, turned.mute) if late else final
        if not (turned.dead | turned.mute).any():
            return
        at = weighing.gathered if turned.dead.any() or weighing.kind == "plain" else weighing.last
        self._seek(_Open(at, sight.ids, final, turned, _gain(turned, probs), weighing))

    def _seek(self, pending: _Open) -> None:
        self._open = pending
        self._seam.seek(pending.at)

    def _count(
        self,
        facts: BankFacts,
        own: NDArray[np.int32],
        turned: Turned,
        resident: NDArray[np.bool_],
        lost: NDArray[np.float64],
    ) -> None:
        import numpy as np

        counters, out = self.counters, turned.dead | turned.mute
        counters.slots += own.size
        counters.dropped += int(out.sum())
        counters.substituted += int(((turned.ids != own) & ~out).sum())
        counters.routings += len(own)
        counters.lost += float(lost.sum())
        counters.worst = float(self._ledger.means.max(initial=0.0))
        needed, before = np.unique(turned.ids[~out]), np.unique(own)
        fewer = int((~resident[before]).sum()) - int((~resident[needed]).sum())
        counters.unread_bytes += fewer * facts.entry_bytes


def _routing(facts: BankFacts, sight: Sight, resident: NDArray[np.bool_]) -> Routing:
    import numpy as np

    ids, probs, scores, ranking = sight.ids.copy(), sight.probs, sight.scores, sight.ranking
    if probs is None:
        raise ModelError(
            f"layer {facts.layer}: the graph does not show what the router gives to each expert; leave [[routing]] out"
        )
    scores = probs if scores is None else scores
    return Routing(
        layer=facts.layer,
        bank=facts.bank,
        n_expert=facts.n_expert,
        batch=sight.batch,
        ids=ids,
        dead=np.zeros(ids.shape, bool),
        mute=np.zeros(ids.shape, bool),
        shares=np.empty(ids.shape, np.float32),
        probs=probs,
        scores=scores,
        ranking=np.argsort(-scores, axis=1, kind="stable").astype(np.int32) if ranking is None else ranking,
        resident=resident,
    )


def _check(policy: RoutingPolicy, routing: Routing, turned: Turned, own: NDArray[np.int32]) -> None:
    """Raise PluginError if a policy left something that cannot be computed."""
    import numpy as np

    said = f"the routing policy {type(policy).__name__}, layer {routing.layer}"
    if any(column.shape != own.shape for column in turned):
        raise PluginError(f"{said}: it changed the shape of a routing; correct the plugin")
    out = turned.dead | turned.mute
    if out.all(axis=1).any():
        raise PluginError(f"{said}: it left a token without an expert; correct the plugin")
    if ((turned.ids < 0) | (turned.ids >= routing.n_expert)).any():
        raise PluginError(f"{said}: it chose an expert outside 0..{routing.n_expert - 1}; correct the plugin")
    if (turned.ids != own).any():
        apart = np.sort(np.where(out, -1 - np.arange(own.shape[1]), turned.ids), axis=1)
        if (apart[:, 1:] == apart[:, :-1]).any():
            raise PluginError(f"{said}: it chose an expert twice for one token; correct the plugin")


def _in_order(turned: Turned, rows: NDArray[np.bool_], scores: NDArray[np.float32]) -> Turned:
    """The slots of these rows as the router ranks them: sums in another order have other last bits."""
    import numpy as np

    order = np.argsort(-np.take_along_axis(scores, turned.ids, 1), axis=1, kind="stable")
    order[~rows] = np.arange(order.shape[1])
    ids, dead, mute = (np.take_along_axis(column, order, 1) for column in turned)
    return Turned(ids.astype(np.int32), dead.astype(bool), mute.astype(bool))


def _padded(turned: Turned) -> NDArray[np.int32]:
    """The ids, with that of the token's first slot with a part wherever a slot has none."""
    import numpy as np

    out = turned.dead | turned.mute
    pad = np.take_along_axis(turned.ids, np.argmin(out, axis=1)[:, None], 1)
    found: NDArray[np.int32] = np.where(out, pad, turned.ids)
    return found


def _only(final: NDArray[np.int32], ids: NDArray[np.int32], mute: NDArray[np.bool_]) -> NDArray[np.int32]:
    import numpy as np

    found: NDArray[np.int32] = np.where(mute, ids, final)
    return found


def _gain(turned: Turned, probs: NDArray[np.float32]) -> NDArray[np.float64]:
    import numpy as np

    each = np.take_along_axis(probs, turned.ids, 1).astype(np.float64)
    whole = each.sum(axis=1, keepdims=True)
    found: NDArray[np.float64] = whole / (whole - (each * turned.dead).sum(axis=1, keepdims=True))
    return found


def _last_use(ids: NDArray[np.int32]) -> list[int]:
    """Distinct ids in the order of their last use."""
    backwards = dict.fromkeys(ids.ravel()[::-1].tolist())
    return list(backwards)[::-1]
