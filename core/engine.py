"""The composition root: opens one model with one store by a profile, and closes it again."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmoe.bind import HotPath, bind
from bmoe.budget import CacheBudget
from bmoe.cachesize import CacheSize
from bmoe.claims import snapshots
from bmoe.contracts import BatchContext, Placement, RunRecord
from bmoe.costs import DecodeCost, cost_between, snapshot
from bmoe.errors import ModelError, NativeError
from bmoe.guessers import open_draft_model
from bmoe.guesses import GuessingStore
from bmoe.heat import read_heat
from bmoe.importance import scored
from bmoe.knobs import Knobs
from bmoe.lane import Lane
from bmoe.log import get_logger
from bmoe.machine import control_groups, read_machine
from bmoe.native import interrupts, mtp, repack, tensor
from bmoe.native.compiled import make_seam
from bmoe.native.evalhook import Seam
from bmoe.native.model import Context, ContextOptions, Model
from bmoe.native.nodetimer import NodeTimer
from bmoe.native.weighing import Weighing
from bmoe.opened import notices, resolved
from bmoe.plan import Plan
from bmoe.preload import Warmth
from bmoe.pressure import PressureWatch
from bmoe.process import ProcessCounters
from bmoe.profile import Profile
from bmoe.resolve import resolve
from bmoe.slots import SharedSlots
from bmoe.store import ExpertStore, Store
from bmoe.stream import Stream
from bmoe.telemetry import FanOut, describe_run
from bmoe.trace.recording import Tracing
from bmoe.tree import Tree
from bmoe.weights import bind_weights, find_repacked

if TYPE_CHECKING:
    from bmoe.conversation import Conversation


def open_engine(
    profile: str | Path | Mapping[str, Any] | Profile,
    model: str | None = None,
    overrides: Sequence[str] = (),
    *,
    seam: str = "auto",
    remember: Path | None = None,
) -> Engine:
    """Open a model as a profile says; use the result in a ``with`` block, or close it.

    ``profile`` is a path, the name of a bundled profile, or the profile itself; ``model`` replaces ``model.path``;
    ``overrides`` are ``"key.path=VALUE"`` strings; ``seam`` chooses the eval hook: auto, c or python;
    ``remember`` is a file that keeps which fetcher was the fastest on which drive and which cache policy replayed best
    for which model, for ``fetch.plugin = "auto"`` and ``cache.policy = "auto"``.
    Raises ProfileError with every problem of the profile, PluginError, ModelError or NativeError.
    """
    return Engine(resolve(profile, model=model, overrides=overrides, remember=remember), seam=seam)


class Engine:
    """An opened model, its expert store and everything that the plan bound. Conversations are opened on it.

    ``plan`` and ``facts`` say what was resolved, ``record`` what runs, ``open_s`` and ``model.report`` what it cost.
    """

    def __init__(self, plan: Plan, *, seam: str = "auto") -> None:
        """Open everything in order; if any step fails, what was opened before it is closed."""
        began = time.perf_counter()
        self.plan, self.facts = plan, plan.facts
        self._lock = threading.RLock()
        self._active = 0
        # reentrant, since a signal handler may stop the decode that its own thread is about to begin
        self._turn = threading.RLock()
        self._running: Context | None = None
        self._verified: Context | None = None
        self._requests = itertools.count(1)
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        self._log = get_logger()
        with contextlib.ExitStack() as stack:
            with interrupts.deferred() as cancelled:
                self._open(stack, seam, cancelled)
            self._closing = stack.pop_all()
        self.sinks = FanOut(self.hot.sinks)
        self.open_s = time.perf_counter() - began
        self.open_peak_rss_bytes = self.process.peak_rss_bytes()
        self.process.forget_peak()
        self.record: RunRecord = describe_run(plan, notices=notices(self), resolved=resolved(self))
        self._log.info("model opened", model=plan.facts.path, arch=plan.facts.arch, seconds=round(self.open_s, 3))

    def _open(self, stack: contextlib.ExitStack, seam: str, cancelled: Callable[[], bool]) -> None:
        plan = self.plan
        self.tracing = Tracing(plan)
        stack.callback(self.tracing.close)
        tensor.self_check()
        self.hot: HotPath = bind(plan)
        stack.callback(self.hot.close)
        self.hot = replace(self.hot, fetcher=self.tracing.wrap(self.hot.fetcher))
        self.seam: Seam = self._make_seam(seam)
        if plan.drafts_with_head:
            mtp.check_head(plan.facts)
        self.repacked = find_repacked(
            plan.facts, self.hot.dense, self.context_options(), cancelled, head=plan.drafts_with_head
        )
        self.model = Model(
            plan.facts,
            keep_experts_out=plan.streaming,
            read_dense=not getattr(self.hot.dense, "copies", False),
            repack=plan.profile.model.repack,
            load_mtp=plan.drafts_with_head,
            buffer_overrides=repack.overrides(self.repacked) if self.repacked else (),
            cancelled=cancelled,
        )
        stack.callback(self.model.close)
        self.stream: Stream | None = None
        self.warmth: Warmth | None = None
        self.buffers: dict[str, int] = {}
        self.placement: Placement | None = None
        self.released_bytes = 0
        if plan.streaming:
            store = self._make_store()
            stack.callback(store.close)
            self.stream = Stream(self.seam, store, self.hot.fetcher, self._make_lane(store), self.hot.observer)
            stack.callback(self.stream.close)
            self.tracing.attach(self.stream)
            addresses = store.addresses
            bound = bind_weights(
                plan.facts, self.model, addresses, self.hot.dense, self.repacked, self.context_options()
            )
            self.buffers, self.placement, self.released_bytes = bound.buffers, bound.placement, bound.released_bytes
            if plan.overlap != "off":
                self.stream.weights = bound.experts
            if self.hot.routing or self.hot.draft_routing is not None:
                self.stream.obey(self._make_knobs(bound.weighings))
            self.model.count_reads()
            self.warmth = self._make_warmth(stack, store, cancelled)
        self.draft_model = open_draft_model(plan, self.model)
        if self.draft_model is not None:
            stack.callback(self.draft_model.close)
        self.process = ProcessCounters(groups=tuple(control_groups()))
        stack.callback(self.process.close)
        watch: PressureWatch | None = None
        mode = plan.profile.cache.watch
        if plan.streaming and mode != "off":
            watch = PressureWatch(mode, plan.budget.least)
            stack.callback(watch.close)
        self.cache_size = CacheSize(plan, self.stream, self.hot.policy.below_cycle, watch, self._resized)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def conversation(self) -> Conversation:
        """A new conversation with a KV of its own; all conversations share the experts in memory."""
        from bmoe.conversation import Conversation

        conversation = Conversation(self)
        self.close_first(conversation)
        return conversation

    def close_first(self, user: Any) -> None:
        """Close ``user``, which has contexts of the model, before the model itself."""
        self._contexts.add(user)

    def context_options(self) -> ContextOptions:
        """Parameters of every context of this engine."""
        plan, model = self.plan, self.plan.profile.model
        return ContextOptions(
            ctx=plan.ctx,
            ubatch=plan.ubatch,
            threads=plan.threads,
            kv_type=model.kv_type,
            flash_attention=model.flash_attention,
            outputs=1 + plan.max_draft,
            rollback=snapshots(plan.facts, plan.max_draft, plan.ubatch),
            sequences=plan.max_draft if plan.trees else 1,
        )

    def decode(
        self, context: Context, tokens: Sequence[int], batch: BatchContext, cancelled: Callable[[], bool]
    ) -> DecodeCost:
        """One llama_decode of at most a ubatch, after what the KV holds, and its cost; as :meth:`perform`."""
        return self.perform(context, lambda: context.decode(tokens), batch, cancelled)

    def verify(self, context: Context, tree: Tree, batch: BatchContext, cancelled: Callable[[], bool]) -> DecodeCost:
        """One llama_decode of a tree whose root comes after what the KV holds, with logits for all; as :meth:`perform`.

        Afterwards :meth:`keep` says which path of it is kept.
        """

        def work() -> int:
            if tree.sequences:
                context.branch(tree.paths)
            self._verified = context
            return context.decode_at(tree.tokens, batch.positions, tree.sequences)

        return self.perform(context, work, batch, cancelled)

    def keep(self, context: Context, path: int, kept: Sequence[int], length: int) -> tuple[bool, int]:
        """Of the tree that was verified last keep the tokens at ``kept``, which end ``path``: a text of ``length``.

        Whether the KV could be cut to them, and the bytes that were read for others alone.
        """
        with self._lock:
            wasted = 0
            if self.stream is not None and self._verified is context:
                wasted = self.stream.accepted(kept)
            self._verified = None
            return context.take(path, length), wasted

    def perform(
        self,
        context: Context,
        work: Callable[[], int],
        batch: BatchContext,
        cancelled: Callable[[], bool],
        *,
        cut: bool = False,
    ) -> DecodeCost:
        """One llama_decode for ``context``, which ``work`` calls and whose code it returns; its cost.

        Conversations take turns by decodes. ``batch`` says what the tokens are. ``cancelled`` is asked once it is this
        context's turn: a stop may have come while it waited. ``cut``: the graph ends at its first routing, so that
        nothing is read, and nothing that sees routings hears of it; only where no outputs are asked for.

        Raises what a plugin or a read raised inside it, as itself; NativeError if llama.cpp fails; Stopped if
        :meth:`stop` ended it. Afterwards nothing of this decode is in the KV.
        """
        with self._lock:
            self._verified = None
            stream, warmth = (None, None) if cut else (self.stream, self.warmth)
            before = snapshot(self.stream)
            if stream is not None:
                stream.begin(batch)
            if warmth is not None:
                warmth.begin(batch)
            with self._turn:
                self.seam.begin(cut=cut)
                self._running = context
            cpu, began = time.process_time(), time.perf_counter()
            try:
                code = 2 if cancelled() else work()
            finally:
                with self._turn:
                    self._running = None
            took, cpu = time.perf_counter() - began, time.process_time() - cpu
            if stream is not None:
                try:
                    stream.settle()
                except BaseException as error:  # noqa: BLE001 - raised below, unless an earlier failure is stashed
                    self.seam.fail(error)
            stopped = self.seam.stopped
            if stream is not None:
                stream.ended(code == 0 and not stopped, took)
            self.seam.finish()
            # a latch that is set between two groups leaves the graph early, and llama_decode still returns 0
            if code == 2 or (code == 0 and stopped):
                raise Stopped
            if code != 0:
                reason = "no room in the KV cache; raise model.ctx" if code == 1 else f"llama_decode returned {code}"
                raise NativeError(f"{self.facts.path}: {reason}")
            tokens = len(batch.positions)
            cost = cost_between(tokens, took, cpu, before, snapshot(self.stream))
            if stream is not None and stream.knobs is not None:
                cost.worst_loss = stream.knobs.worst
            if warmth is not None:
                warmth.ended(tokens)
            return cost

    def importance(self, prompt: Sequence[int]) -> tuple[float, ...]:
        """How much each token of a prompt matters, for routing policies; empty if none asks.

        Raises PluginError if the scorer fails.
        """
        if self.hot.importance is None or not prompt:
            return ()
        with self._lock:
            return scored(self.hot.importance, self.plan, prompt, [self.model.piece(token) for token in prompt])

    def next_request(self) -> str:
        """What plugins are told to tell prompts of this engine apart."""
        return str(next(self._requests))

    def resize_cache(self, budget_mb: float) -> int:
        """Let cached experts take ``budget_mb`` MiB from now on; the bytes that they hold afterwards.

        For memory pressure; from any thread, which waits for a decode in progress to end. Shrinking gives memory back
        at once; growing is possible up to what all experts hold. Raises ProfileError in one line if the cache is off or
        the policy would never hit with so little, NativeError if it is called inside a decode.
        """
        with self._lock:
            _ = self.model.handle  # refuses a closed engine
            return self.cache_size.resize(budget_mb, busy=self._running is not None)

    def relieve(self) -> None:
        """Between two tokens: look for memory pressure and say so, or shrink the cache, as ``cache.watch`` asks."""
        with self._lock:
            if self.model.is_open:
                self.cache_size.relieve(busy=self._running is not None)

    @property
    def width(self) -> int:
        """Tokens of a prompt that are decoded together: the plan's ubatch, or fewer since the cache became smaller."""
        return self.cache_size.width

    def _resized(self, budget: CacheBudget) -> None:
        """Runs that begin from now on tell the budget that they run with."""
        cache = {**self.record.resolved["cache"], "budget_bytes": budget.bytes, "room_bytes": budget.room}
        self.record = replace(self.record, resolved={**self.record.resolved, "cache": cache})

    def stop(self, context: Context) -> None:
        """End the decode in progress on ``context``, if there is one, at its next node; from any thread."""
        with self._turn:
            if self._running is context:
                self.seam.stop()

    @contextlib.contextmanager
    def run(self) -> Any:
        """Sinks are open while any conversation of this engine generates; yields a callable that takes the summary."""
        with self._lock:
            if not self._active:
                self.sinks.open(self.record)
            self._active += 1
        summary: list[Any] = [None]
        try:
            yield summary
        finally:
            with self._lock:
                self._active -= 1
                if not self._active:
                    self.sinks.close(summary[0])

    def close(self) -> None:
        """Close the conversations, then free everything in the reverse order of opening. May be called twice."""
        with self._lock:
            for user in list(self._contexts):
                user.close()
            self._closing.close()

    def _make_seam(self, kind: str) -> Seam:
        banks, trace = self.plan.banks if self.plan.streaming else (), self.plan.profile.trace
        return NodeTimer(banks) if trace.compute and trace.detail == "node" else make_seam(kind, banks)

    def _make_store(self) -> Store:
        plan, banks = self.plan, self.plan.banks
        if plan.budget.bytes == 0:
            return SharedSlots(banks, self.seam)
        shape = banks, self.seam, self.hot.policy, plan.budget.bytes, read_machine().max_map_count
        return GuessingStore(*shape, plan.budget.room) if plan.budget.room else ExpertStore(*shape)

    def _make_knobs(self, found: Sequence[Weighing | None]) -> Knobs:
        for bank, weighing in zip(self.plan.banks, found, strict=True):
            if weighing is None:
                said = f"{self.facts.path}: layer {bank.layer}: the graph has no node where its experts are weighed"
                raise ModelError(f"{said}; leave [[routing]] out")
        weighings = [weighing for weighing in found if weighing is not None]
        loss = self.plan.profile.loss
        policies = (*self.hot.routing, *([self.hot.draft_routing] if self.hot.draft_routing is not None else ()))
        return Knobs(policies, self.seam, weighings, None if loss is None else loss.budget)

    def _make_warmth(self, stack: contextlib.ExitStack, store: Store, cancelled: Callable[[], bool]) -> Warmth | None:
        path = self.plan.profile.cache.heat
        if path is None or not isinstance(store, ExpertStore):
            return None
        warmth = Warmth(path, self.facts, read_heat(path, self.facts))
        batch = self.plan.facts_for_build().fetch.batch
        told = (self.hot.policy, self.hot.prefetcher)
        warmth.preload(store, self.hot.fetcher, told, batch, cancelled)
        stack.callback(warmth.close)
        return warmth

    def _make_lane(self, store: Store) -> Lane | None:
        prefetcher = self.hot.prefetcher
        if prefetcher is None or not isinstance(store, GuessingStore):
            return None
        return Lane(prefetcher, store, self.hot.fetcher, self.seam, self.facts.banks)


class Stopped(Exception):  # noqa: N818 - not an error: someone asked for it
    """A decode ended because :meth:`Engine.stop` was called."""
