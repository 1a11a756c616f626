"""What a generation cost: one record per token, the sums of its decodes, and at the end what made it slow."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from dataclasses import replace
from typing import Any

from bmoe.contracts import RunSummary, TokenRecord
from bmoe.costs import DecodeCost
from bmoe.decode import Step
from bmoe.diagnosis import Signs, diagnose
from bmoe.draftaccount import DraftAccount
from bmoe.drafting import Drafting
from bmoe.engine import Engine
from bmoe.opened import preloaded_bytes
from bmoe.process import ProcessSample

WINDOW = 32
"""Decodes that ``window_hit_rate`` is taken over."""


class Account:
    """Adds up one generation. The prompt's decodes are kept apart from those of single tokens."""

    def __init__(self, engine: Engine, digest: hashlib._Hash | None, drafting: Drafting | None = None) -> None:
        self._engine = engine
        self._drafts = None if drafting is None else DraftAccount(drafting)
        self._made = 0
        self.digest = digest
        self.prefill = DecodeCost()
        self.stop = "error"
        self.tokens = 0
        self._decode = DecodeCost()
        self._signs = Signs()
        self._window: deque[tuple[int, int]] = deque(maxlen=WINDOW)
        self._delays: dict[int, float] = {}
        self._others: float | None = None
        self._between = 0.0
        self._ended: float | None = None
        engine.process.sample()

    def spent(self, step: Step) -> None:
        """The decode behind a step, if it was not the prompt's."""
        if step.cost is not self.prefill:
            self._decode.add(step.cost)
            self._made += 1
            if step.draft is not None and self._drafts is not None:
                self._drafts.add(step.draft)

    def resumed(self) -> None:
        """The caller asked for more: what it did meanwhile counts as between tokens."""
        if self._ended is not None:
            self._between = time.perf_counter() - self._ended

    def token(self, step: Step, text: str) -> TokenRecord:
        """Count a token and describe the decode that it came from."""
        self.spent(step)
        cost, process = step.cost, self._engine.process.sample()
        if cost is self.prefill:
            self._delays, self._others = self._engine.process.delays_s(), self._engine.process.others_s()
        elif cost.decodes:
            self._window.append((cost.hits or 0, cost.lookups or 0))
        if cost is not self.prefill:
            self._suffered(process)
        record = TokenRecord(
            index=self.tokens,
            token_id=step.token,
            text=text,
            decode_s=cost.decode_s,
            read_wait_s=cost.read_wait_s,
            manage_s=cost.manage_s,
            between_s=self._between if self._ended is not None else None,
            lookups=cost.lookups,
            hits=cost.hits,
            hit_rate=_rate(self._decode.hits, self._decode.lookups),
            window_hit_rate=_rate(sum(h for h, _ in self._window), sum(n for _, n in self._window)),
            demand_bytes=cost.read_bytes,
            speculative_bytes=cost.ahead_bytes,
            # of a prompt's layers that are read ahead, what no token used is not told apart
            wasted_bytes=cost.wasted_bytes if step.cost is not self.prefill else None,
            evictions=cost.evictions,
            rereads=cost.rereads,
            dropped=cost.dropped,
            substituted=cost.substituted,
            lost_mass=cost.lost_mass,
            **_of_draft(step),
            **process._asdict(),
        )
        self.tokens += 1
        self._ended = time.perf_counter()
        return record

    def summary(self) -> RunSummary:
        """The figures so far."""
        engine, prefill_cost, decode = self._engine, self.prefill, self._decode
        store = engine.stream.store if engine.stream is not None else None
        lookups, hits = decode.lookups or 0, decode.hits or 0
        losses = [cost.worst_loss for cost in (prefill_cost, decode) if cost.worst_loss is not None]
        drafts = self._drafts
        decoding_s = decode.decode_s + (0.0 if drafts is None else drafts.seconds)
        lane = engine.stream.lane if engine.stream is not None else None
        prefill_bytes, decode_bytes = prefill_cost.all_bytes, decode.all_bytes
        decode_bytes += 0 if drafts is None else drafts.cost.all_bytes
        return RunSummary(
            tokens=self.tokens,
            prompt_tokens=prefill_cost.tokens,
            tok_s=self._made / decoding_s if decode.decodes else None,
            open_s=engine.open_s,
            prefill_s=prefill_cost.decode_s,
            decode_s=decode.decode_s,
            hit_rate=_rate(hits, lookups),
            lookups=lookups,
            hits=hits,
            evictions=decode.evictions or 0,
            rereads=decode.rereads or 0,
            bytes_read=decode_bytes + prefill_bytes,
            prefill_bytes=prefill_bytes,
            bytes_per_token=None if decode.read_bytes is None else decode_bytes / self._made,
            io_wait_s=decode.read_wait_s,
            manage_s=decode.manage_s,
            cpu_s=decode.cpu_s if decode.decodes else None,
            open_read_bytes=engine.model.report.read_bytes,
            open_peak_rss_bytes=engine.open_peak_rss_bytes,
            peak_rss_bytes=engine.process.peak_rss_bytes(),
            dense_bytes=engine.facts.dense_bytes,
            slot_bytes=store.slot_bytes if store is not None else 0,
            cache_budget_bytes=store.budget_bytes if store is not None else 0,
            cache_held_bytes=store.held_bytes if store is not None else 0,
            cache_resizes=engine.cache_size.resizes,
            preloaded_bytes=preloaded_bytes(engine),
            direct_io=engine.stream.fetcher.direct if engine.stream is not None else None,
            seam=engine.seam.name if store is not None else "none",
            lossy=engine.plan.lossy,
            stop=self.stop,
            logits_sha256=self.digest.hexdigest() if self.digest is not None else None,
            dropped=decode.dropped,
            substituted=decode.substituted,
            lost_mass=decode.lost_mass,
            worst_lost_mass=max(losses, default=None),
            causes=diagnose(self._measured(store.budget_bytes if store is not None else 0)),
            ahead_bytes=None if lane is None else decode.ahead_bytes or 0,
            ahead_used_bytes=None if lane is None else decode.used_ahead_bytes or 0,
            ahead_wasted_bytes=None if lane is None else decode.wasted_bytes or 0,
            ahead_off_tokens=None if lane is None else decode.off or 0,
            ahead_note=None if lane is None else lane.note,
            **({} if drafts is None else drafts.summary(decode, self._made)),
        )

    def _suffered(self, process: ProcessSample) -> None:
        """What happened to the process since the token before."""
        signs = self._signs
        if process.majflt is not None:
            signs.majflt = (signs.majflt or 0) + process.majflt
        signs.swapped_bytes = process.swap_bytes

    def _delayed(self) -> float | None:
        """Of the thread that waited most for a processor."""
        now, then = self._engine.process.delays_s(), self._delays
        return max((delay - then.get(thread, 0.0) for thread, delay in now.items()), default=None)

    def _worked_for_others(self) -> float | None:
        now = self._engine.process.others_s()
        return None if now is None or self._others is None else max(0.0, now - self._others)

    def _measured(self, budget_bytes: int) -> Signs:
        decode = self._decode
        return replace(
            self._signs,
            tokens=decode.decodes,
            decode_s=decode.decode_s,
            read_wait_s=decode.read_wait_s,
            manage_s=decode.manage_s,
            delayed_s=self._delayed(),
            others_s=self._worked_for_others(),
            lookups=decode.lookups or 0,
            hits=decode.hits or 0,
            rereads=decode.rereads or 0,
            read_bytes=decode.all_bytes,
            budget_bytes=budget_bytes,
        )


def _of_draft(step: Step) -> dict[str, Any]:
    """Fields of a token's record about the draft that its decode verified; none if there was none."""
    draft = step.draft
    if draft is None or not draft.drafted:
        return {}
    return {
        "drafted": draft.drafted,
        "accepted": draft.accepted,
        "demanded": step.cost.demanded,
        "draft_s": draft.seconds,
        "draft_bytes": draft.cost.read_bytes,
        "rejected_bytes": draft.wasted_bytes if step.cost.read_bytes is not None else None,
    }


def _rate(hits: int | None, lookups: int | None) -> float | None:
    return (hits or 0) / lookups if lookups else None
