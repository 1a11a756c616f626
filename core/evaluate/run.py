"""One evaluation: every item that is not done yet, one after another, and what all of them come to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bmoe.conversation import Conversation
from bmoe.costs import DecodeCost
from bmoe.engine import Engine, Stopped
from bmoe.errors import BmoeError
from bmoe.evaluate import bootstrap, metrics, tasks
from bmoe.evaluate.datasets import Dataset
from bmoe.evaluate.prompts import make_prompts
from bmoe.evaluate.reference import Reference
from bmoe.evaluate.replies import Replies, run_key
from bmoe.evaluate.scorer import Scorer
from bmoe.plan import Plan
from bmoe.telemetry import SCHEMA, record_json

_COSTS = ("decodes", "decode_s", "read_wait_s", "lookups", "hits", "read_bytes")


@dataclass(frozen=True, slots=True)
class Settings:
    """What a run is asked besides profile and data: the form of prompts, the most tokens of a reply, a reference."""

    prompts: str = "plain"
    tokens: int = 256
    against: str | None = None


class Evaluation:
    """Use it in a ``with`` block, which opens the engine if an item is left to do."""

    def __init__(
        self,
        plan: Plan,
        dataset: Dataset,
        settings: Settings,
        *,
        out: str,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Check everything that can be checked without opening the model.

        Raises RepliesError if the file ``out`` is not this run's, ModelError if it lacks a chat template to ask with.
        """
        self._plan, self._dataset, self._settings = plan, dataset, settings
        template = plan.profile.chat.template or plan.facts.chat_template
        self._prompts = make_prompts(settings.prompts, template, plan.facts.path)
        key = run_key(plan, dataset, dataclasses.asdict(settings))
        self._replies = Replies(out, key, resume=resume, overwrite=overwrite)
        self.pending = [item for item in dataset.items if item.line not in self._replies.done]
        self._cancelled = False
        self._conversation: Conversation | None = None
        self._engine: Engine | None = None
        self._reference: Reference | None = None
        self._closing = contextlib.ExitStack()

    def __enter__(self) -> Evaluation:
        with contextlib.ExitStack() as stack:
            if self.pending:
                self._engine = stack.enter_context(Engine(self._plan))
                self._conversation = stack.enter_context(self._engine.conversation())
                if self._settings.against is not None:
                    self._reference = stack.enter_context(Reference(self._plan))
                stack.callback(self._replies.close)
                self._replies.begin(record_json(self._engine.record))
            self._closing = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def cancel(self) -> None:
        """End :meth:`run` within a node of the graph, from any thread; the item in progress is given up."""
        self._cancelled = True
        if self._conversation is not None:
            self._conversation.cancel()

    def run(self, token: Callable[[], None] = lambda: None, item: Callable[[], None] = lambda: None) -> bool:
        """Score what is left; False if it was cancelled.

        ``token`` is called after each decode and ``item`` after each item. An item that cannot be scored is kept as
        skipped. Raises what a read, a plugin or llama.cpp raised.
        """
        if not self.pending:
            return True
        assert self._engine is not None
        assert self._conversation is not None
        setting = tasks.Setting(self._engine.model, self._plan.ctx, self._prompts, self._settings.tokens)
        scorer = Scorer(self._conversation, self._reference, token)
        for each in list(self.pending):
            try:
                if self._cancelled:
                    raise Stopped
                reply = tasks.score(each, setting, scorer)
            except tasks.Skipped as reason:
                reply = {"skipped": str(reason)}
            except Stopped:
                return False
            costs = {"prefill": _cost(scorer.prefill), "decode": _cost(scorer.decode)}
            self._replies.add(each.line, {"line": each.line, "id": each.id, **reply, **costs})
            self.pending.remove(each)
            item()
        return True

    def value(self, metric: str) -> float | None:
        """A metric of what is done so far, without its interval."""
        scores = [reply["score"] for reply in self._done() if "score" in reply]
        return metrics.mean(scores, metric)

    def summary(self, names: Sequence[str], seed: int = 0) -> dict[str, Any]:
        """The record of the run so far: metrics ``names`` with their intervals, costs, and what was skipped.

        Raises :class:`BmoeError` if everything was skipped.
        """
        done = self._done()
        scored = [reply for reply in done if "score" in reply]
        skipped = [{"line": r["line"], "id": r["id"], "reason": r["skipped"]} for r in done if "skipped" in r]
        if skipped and not scored and not self.pending:
            first = skipped[0]
            raise BmoeError(
                f"{self._dataset.path}: none of {len(skipped)} items could be scored; "
                f"the first (line {first['line']}): {first['reason']}"
            )
        decode, prefill = _sum([r["decode"] for r in done]), _sum([r["prefill"] for r in done])
        scores = [reply["score"] for reply in scored]
        return {
            "event": "eval",
            "schema": SCHEMA,
            "dataset": self._dataset.path,
            "dataset_sha256": self._dataset.sha256,
            "format": self._dataset.format,
            "model": self._plan.facts.path,
            "profile": self._plan.profile.source,
            "settings": dataclasses.asdict(self._settings),
            "lossy": self._plan.lossy,
            "complete": not self.pending,
            "items": len(self._dataset.items),
            "scored": len(scored),
            "skipped": skipped,
            "windowed": sum(reply.get("windows", 1) > 1 for reply in scored),
            "empty": sum(reply.get("text") == "" for reply in scored),
            "metrics": {name: _finite(metrics.aggregate(scores, name, seed)) for name in names},
            "seed": seed,
            "resamples": bootstrap.RESAMPLES,
            "hit_rate": _ratio(decode["hits"], decode["lookups"]),
            "bytes_per_token": _ratio(decode["read_bytes"], decode["decodes"]),
            "prefill_bytes": prefill["read_bytes"],
            "decoded_tokens": decode["decodes"],
            "decode_s": decode["decode_s"],
            "sessions": len(self._replies.sessions),
            "replies": str(self._replies.path),
            "run": self._replies.sessions[-1] if self._replies.sessions else None,
        }

    def _done(self) -> list[dict[str, Any]]:
        """In the order of the data set, so that a resumed run resamples as one that was never interrupted."""
        done = self._replies.done
        return [done[item.line] for item in self._dataset.items if item.line in done]


def _cost(cost: DecodeCost) -> dict[str, Any]:
    return {name: getattr(cost, name) for name in _COSTS}


def _sum(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums; None where nobody measured."""
    known = {name: [cost[name] for cost in costs if cost[name] is not None] for name in _COSTS}
    return {name: sum(values) if values else None for name, values in known.items()}


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in figures.items()}
