"""What a page shows of each file: sums in bins of steps, so that a long run makes no bigger page than a short one."""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from bmoe.replay.route_trace import ACCEPTED, DECODE
from bmoe.trace import rounds
from bmoe.trace.io import ARRIVED, CANCELLED, FAILED
from bmoe.trace.reading import Loaded

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BINS, _CELLS = 400, 1_200_000
_SERIES = 20_000


def digest(loaded: Loaded) -> list[dict[str, Any]]:
    """Sections of plain data: one, or one per run of a run record."""
    if loaded.kind == "route":
        return [_route(loaded)]
    if loaded.kind == "io":
        return [_io(loaded)]
    if loaded.kind == "compute":
        return [_compute(loaded)]
    return _runs(loaded)


def _route(loaded: Loaded) -> dict[str, Any]:
    import numpy as np

    model, every = loaded.model, loaded.columns
    assert model is not None
    # rejected tokens and guesses are no text: what they read is shown with their rounds
    text = every["phase"] <= ACCEPTED
    c = {name: column[text] for name, column in every.items()}
    rows = len(c["layer"])
    layers = sorted({*np.unique(c["layer"]).tolist()})
    of_layer = np.zeros(max(layers, default=0) + 1, np.int64)
    of_layer[layers] = range(len(layers))
    order = np.stack([c["turn"], c["step"], c["phase"]]).astype(np.int64)
    tokens, rank = (np.unique(order, axis=1, return_inverse=True)) if rows else (order, np.empty(0, np.int64))
    rank = rank.reshape(-1)
    n = tokens.shape[1]
    most = max(1, min(_BINS, _CELLS // max(1, len(layers) * model.n_expert)))
    width = max(1, math.ceil(n / most))
    bins = math.ceil(n / width)
    place = rank // width
    cell = (of_layer[c["layer"]] * model.n_expert + c["expert"]) * bins + place
    size = len(layers) * model.n_expert * bins
    missed = c["residency"] != 1
    count = np.bincount(cell, minlength=size)
    miss = np.bincount(cell[missed], minlength=size)
    ahead = np.bincount(place[c["residency"] == 2], minlength=bins)
    used = np.flatnonzero(count)
    decode = c["phase"] >= DECODE
    nbytes = np.bincount(place, weights=c["expert_bytes"].astype(np.float64), minlength=bins)
    starts = np.arange(bins) * width
    return {
        "kind": "route", "file": _name(loaded), "model": model.model, "arch": model.arch, "layers": layers,
        "experts": model.n_expert, "used": model.n_used, "rows": rows, "tokens": n, "width": width, "bins": bins,
        "decode_hit_rate": float((c["residency"][decode] == 1).mean()) if decode.any() else None,
        "decode_bytes": float(every["expert_bytes"][every["phase"] >= DECODE].sum()),
        "read_bytes": float(every["expert_bytes"].sum()), "drafts": rounds.of_routes(every, model.n_expert),
        "prompt": int((tokens[2] == 0).sum()), "turns": len(np.unique(tokens[0])),
        "turn": tokens[0][starts].tolist(), "step": tokens[1][starts].tolist(), "phase": tokens[2][starts].tolist(),
        "size": [model.layers[layer].expert_bytes if layer in model.layers else 0 for layer in layers],
        "bytes": nbytes.tolist(), "ahead": ahead.tolist(),
        "cell": _packed(used, "<u4"), "count": _packed(count[used], "<u4"), "miss": _packed(miss[used], "<u4"),
    }  # fmt: skip


def _io(loaded: Loaded) -> dict[str, Any]:
    import numpy as np

    c = loaded.columns
    rows = len(c["bytes"])
    state, ahead, arrived = c["state"], c["ahead"] == 1, c["arrived_s"]
    begin = float(c["submit_s"].min()) if rows else 0.0
    end = float(np.nanmax(np.append(arrived, c["submit_s"]))) if rows else 0.0
    bins = min(_BINS, max(1, rows // 4))
    step = max((end - begin) / bins, 1e-9)
    there = state == ARRIVED
    at = np.clip(((np.where(there, arrived, c["submit_s"]) - begin) / step).astype(np.int64), 0, bins - 1)
    took = (arrived - c["submit_s"])[there]
    edges = np.logspace(-5, 1.5, 66)
    layers = np.unique(c["layer"]).astype(np.int64).tolist()
    phases = np.unique(c["phase"]).astype(np.int64).tolist() if "phase" in c else []
    by_phase = [
        [phase, int((c["phase"] == phase).sum()), float(c["bytes"][there & (c["phase"] == phase)].sum())]
        for phase in phases
    ]
    by_layer = []
    for layer in layers:
        mine = c["layer"] == layer
        whole = mine & there
        by_layer.append([
            layer, int(mine.sum()), float(c["bytes"][whole].sum()), int((mine & ahead).sum()),
            _mean((arrived - c["submit_s"])[whole]), float(c["bytes"][whole].mean()) if whole.any() else None,
        ])  # fmt: skip
    return {
        "kind": "io", "file": _name(loaded), "model": loaded.header.get("model", ""), "reads": rows,
        "direct": loaded.header.get("direct"), "bytes": float(c["bytes"][there].sum()),
        "ahead_bytes": float(c["bytes"][there & ahead].sum()), "span": end - begin, "bin_s": step,
        "cancelled": int((state == CANCELLED).sum()), "failed": int((state == FAILED).sum()),
        "demand": np.bincount(at[there & ~ahead], c["bytes"][there & ~ahead], bins).tolist(),
        "read_ahead": np.bincount(at[there & ahead], c["bytes"][there & ahead], bins).tolist(),
        "edges": edges.tolist(), "latency": np.histogram(np.clip(took, edges[0], edges[-1]), edges)[0].tolist(),
        "median_s": float(np.median(took)) if len(took) else None,
        "p99_s": float(np.quantile(took, 0.99)) if len(took) else None, "by_layer": by_layer,
        "by_phase": by_phase,
    }  # fmt: skip


def _compute(loaded: Loaded) -> dict[str, Any]:
    import numpy as np

    c = loaded.columns
    spent = {name: np.nan_to_num(c[name]) for name in ("compute_s", "wait_s", "manage_s")}
    decodes, rank = np.unique(c["decode"], return_inverse=True)
    rank = rank.reshape(-1)
    n = len(decodes)
    width = max(1, math.ceil(n / _BINS))
    bins = math.ceil(n / width)
    layers, at = np.unique(c["layer"], return_inverse=True)
    at = at.reshape(-1)
    alone = c["phase"] == 1
    tokens = len(np.unique(c["decode"][alone]))
    share = np.minimum(width, n - np.arange(bins) * width)
    cells = np.bincount(at * bins + rank // width, spent["compute_s"], len(layers) * bins).reshape(len(layers), bins)
    per_op: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    per_node: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    nodes = zip(c["node"], c["op"], c["compute_s"].tolist(), alone.tolist(), strict=True)
    for node, op, took, counted in nodes if loaded.header.get("detail") == "node" else ():
        if counted:
            for found in (per_op[op], per_node[node.rsplit("-", 1)[0], op]):
                found[0] += 1
                found[1] += took
    return {
        "kind": "compute", "file": _name(loaded), "model": loaded.header.get("model", ""),
        "detail": loaded.header.get("detail", "layer"), "decodes": n, "tokens": tokens, "width": width, "bins": bins,
        "layers": layers.astype(int).tolist(),
        "series": {name: (np.bincount(rank // width, value, bins) / share).tolist() for name, value in spent.items()},
        "cells": (cells / share if bins else cells).tolist(),
        "by_layer": {
            name: (np.bincount(at[alone], value[alone], len(layers)) / max(1, tokens)).tolist()
            for name, value in spent.items()
        },
        "ops": [[op, int(k), s] for op, (k, s) in sorted(per_op.items(), key=lambda item: -item[1][1])],
        "nodes": [
            [node, op, int(k), s] for (node, op), (k, s) in sorted(per_node.items(), key=lambda item: -item[1][1])
        ][:500],
    }  # fmt: skip


_PARTS = ("read_wait_s", "manage_s", "compute_s", "between_s")
_COUNTS = ("lookups", "hits", "demand_bytes", "speculative_bytes")


def _runs(loaded: Loaded) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    for record in loaded.records:
        event = record["event"]
        if event == "run" or not runs:
            runs.append({"run": {}, "tokens": [], "summary": {}})
        if event == "token":
            runs[-1]["tokens"].append(record)
        else:
            runs[-1][event] = record
    return [_run(loaded, run, index, len(runs)) for index, run in enumerate(runs)]


def _run(loaded: Loaded, run: dict[str, Any], index: int, of: int) -> dict[str, Any]:
    tokens = run["tokens"]
    width = max(1, math.ceil(len(tokens) / _SERIES))
    groups = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    series: dict[str, list[Any]] = {
        name: [_average(group, name) for group in groups] for name in ("decode_s", *_PARTS, *_COUNTS)
    }
    record, summary = run["run"], run["summary"]
    marks = [name for name in ("traced", "sampled", "lossy", "speculative") if record.get(name)]
    return {
        "kind": "run", "file": _name(loaded) + (f", run {index + 1}" if of > 1 else ""),
        "model": str(record.get("model", "")).rsplit("/", 1)[-1], "arch": record.get("arch"), "marks": marks,
        "versions": record.get("versions") or {}, "machine": record.get("machine") or {},
        "notices": [str(notice) for notice in record.get("notices") or ()], "width": width,
        "count": len(tokens), "index": [group[0].get("index") for group in groups],
        "text": ["".join(str(token.get("text", "")) for token in group)[:200] for group in groups],
        "series": series, "drafts": rounds.of_records(tokens, summary),
        "summary": {k: v for k, v in summary.items() if isinstance(v, (int, float, str, bool)) or v is None},
    }  # fmt: skip


def _average(group: list[dict[str, Any]], name: str) -> float | None:
    known = [v for token in group if isinstance(v := token.get(name), (int, float)) and not isinstance(v, bool)]
    return sum(known) / len(known) if known else None


def _mean(values: NDArray[Any]) -> float | None:
    return float(values.mean()) if len(values) else None


def _packed(values: NDArray[Any], form: str) -> str:
    return base64.b64encode(values.astype(form).tobytes()).decode("ascii")


def _name(loaded: Loaded) -> str:
    return loaded.path.replace("\\", "/").rsplit("/", 1)[-1]
