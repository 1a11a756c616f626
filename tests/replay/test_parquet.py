"""A trace in Parquet replays as the same trace in lines, and shows what the router gave to policies that look."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts
from bmoe.replay.play import play
from bmoe.replay.read_lookups import read_lookups
from bmoe.replay.route_trace import DECODE, PREFILL, LayerBytes, Routed, RouteTrace, TraceError, write_trace
from bmoe.trace.rows import RouteParquet
from bmoe_plugins.caches.lru import Lru

arrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")

EXPERTS = 4
MODEL = ModelFacts(
    path="made-up.gguf", name="made up", arch="made-up", shards=(), n_layer=2, n_expert=EXPERTS, n_used=2, n_embd=1,
    n_vocab=1, n_ctx_train=1, n_nextn=0, dense=(),
    banks=tuple(BankFacts(layer, 0, EXPERTS, 2, (ProjectionFacts("t", "s", 0, 0, 100, "F32"),)) for layer in range(2)),
)  # fmt: skip


class Place:
    """Where a trace goes."""

    def __init__(self, path):
        self.path, self.file = str(path), Path(path).open("wb")  # noqa: SIM115 (closed by who writes)

    def keep(self):
        self.file.close()

    drop = keep


def rows(tokens=30):
    rng = np.random.default_rng(3)
    for token in range(tokens):
        for layer in range(2):
            probs = rng.dirichlet(np.ones(EXPERTS)).astype(np.float32)
            best = np.argsort(-probs)[:2].tolist()
            phase = PREFILL if token < 4 else DECODE
            yield probs, [Routed(0, phase, token, layer, s, e, float("nan"), 0, 100) for s, e in enumerate(best)]


def write(path, given=None):
    out = RouteParquet(Place(path), MODEL)
    for probs, routed in given or rows():
        out.routing(routed, None if probs is None else probs[None], [0])
    out.flush()
    out.close()
    return path


class Noting(Lru):
    wants = frozenset({"probs"})

    def __init__(self):
        super().__init__()
        self.seen = []

    def observe(self, event):
        self.seen.append((event.layer, event.ids.tolist(), None if event.probs is None else event.probs.copy()))


def test_it_is_the_trace_in_lines_and_shows_the_probabilities(tmp_path):
    path = write(tmp_path / "a.parquet")
    lines = [row for _, each in rows() for row in each]
    sizes = {0: LayerBytes(100, 0), 1: LayerBytes(100, 0)}
    write_trace(tmp_path / "a.csv", RouteTrace("made-up.gguf", "made-up", 2, EXPERTS, 2, sizes, lines))
    packed, plain = read_lookups(path), read_lookups(tmp_path / "a.csv")

    assert plain.probs is None
    for name in ("keys", "starts", "counted", "ends_token"):
        assert (getattr(packed, name) == getattr(plain, name)).all()
    assert (packed.tokens, packed.entry_bytes, packed.n_used) == (plain.tokens, plain.entry_bytes, plain.n_used)
    policy = Noting()
    assert play(policy, packed, 500) == play(Lru(), plain, 500)
    assert len(policy.seen) == 60
    for (layer, ids, seen), (probs, routed) in zip(policy.seen, rows(), strict=True):
        assert (layer, ids) == (routed[0].layer, [[row.expert for row in routed]])
        assert (seen == probs[None]).all()


def test_what_the_router_did_not_show_is_none_and_not_made_up(tmp_path):
    given = [(None if i % 3 else probs, routed) for i, (probs, routed) in enumerate(rows())]
    given[3] = (np.full(EXPERTS, np.nan, np.float32), given[3][1])
    policy = Noting()
    play(policy, read_lookups(write(tmp_path / "a.parquet", given)), 500)

    assert [i for i in range(60) if i % 3 == 0 and i != 3] == [
        i for i, (*_, probs) in enumerate(policy.seen) if probs is not None
    ]
    nothing = write(tmp_path / "b.parquet", [(None, routed) for _, routed in rows()])
    assert read_lookups(nothing).probs is None


def column(index, name, values):
    return lambda table: table.set_column(index, name, arrow.array(values(len(table))))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.drop_columns(["slot"]), "has no column 'slot'; record it again"),
        (column(5, "expert", lambda n: [9] * n), "row 0 names expert 9; the model has 2 layers with 4 experts"),
        (column(5, "expert", lambda n: [1] * n), "names expert 1 of layer 0 twice for one token"),
        (column(3, "layer", lambda n: [-1] * n), "row 0 names layer -1; the model has 2 layers with 4 experts"),
        (column(3, "layer", lambda n: ["x"] * n), "has a row that is none; record it again"),
        (column(2, "step", lambda n: [None, *range(1, n)]), "has a row that is none; record it again"),
        (column(1, "phase", lambda n: [0] * n), "has no decode row"),
        (column(9, "probs", lambda n: [[0.5]] * n), "has probabilities of 1 experts, of 4; record it again"),
        (lambda table: table, "is no routing trace in Parquet that was closed; record it again"),
    ],
)
def test_what_is_wrong_with_it_is_one_line(tmp_path, change, said):
    table = parquet.read_table(write(tmp_path / "a.parquet"))
    changed = change(table).replace_schema_metadata({} if "was closed" in said else table.schema.metadata)
    parquet.write_table(changed, tmp_path / "b.parquet")
    with pytest.raises(TraceError) as raised:
        read_lookups(tmp_path / "b.parquet")
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path / 'b.parquet'}: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("keep", [4, 50, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_one_line(tmp_path, keep):
    path = write(tmp_path / "a.parquet")
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(keep * len(data))])
    with pytest.raises(TraceError, match=r"is no routing trace in Parquet that was closed; record it again"):
        read_lookups(path)
