"""``bmoe replay``: rows and table, plugins by name, one line for whatever is wrong, and what was there stays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bmoe.replay import sweep as sweep_module
from bmoe.replay.contender import Contender
from bmoe.replay.read_lookups import read_lookups
from bmoe.replay.sweep import SweepError, sweep

TRACE = Path(__file__).parents[1] / "replay" / "gptoss-excerpt.route.csv"
MIB = 1 << 20

PLUGIN = """
from bmoe import Options, Provider, hookimpl
from bmoe_plugins.caches.lru import Lru


class Shy(Options):
    skip: int = 0


class Mru(Lru):
    def __init__(self, skip):
        super().__init__()
        self.skip = skip

    def victim(self, pinned):
        free = [key for key in reversed(self._order) if key not in pinned]
        return free[min(self.skip, len(free) - 1)] if free else None


class Failing(Lru):
    def victim(self, pinned):
        raise RuntimeError("no idea")


class Blind(Lru):
    wants = frozenset({"probs"})


class Curious(Blind):
    def observe(self, event):
        pass


class Nosy(Curious):
    wants = frozenset({"activation"})


def broken(options, facts):
    return 1 / 0


@hookimpl
def bmoe_caches():
    return [
        Provider("shy.mru", lambda options, facts: Mru(options.skip), options=Shy),
        Provider("shy.failing", lambda options, facts: Failing()),
        Provider("shy.curious", lambda options, facts: Curious()),
        Provider("shy.nosy", lambda options, facts: Nosy()),
        Provider("shy.blind", lambda options, facts: Blind()),
        Provider("shy.broken", broken),
    ]
"""


COMMAND = "replay"


@pytest.fixture(name="shy")
def _shy(tmp_path, monkeypatch):
    """An installed plugin."""
    info = tmp_path / "site" / "bmoe_shy-0.1.dist-info"
    info.mkdir(parents=True)
    (info.parent / "shy.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bmoe-shy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[bmoe.plugins]\nshy = shy\n")
    monkeypatch.syspath_prepend(str(info.parent))
    yield
    sys.modules.pop("shy", None)


def rows(bmoe, *arguments):
    code, out, err = bmoe(*arguments, "--json")
    assert (0, "") == (code, err)
    return json.loads(out)


def test_json_is_one_list_with_a_row_for_every_trace_policy_and_budget(bmoe):
    found = rows(bmoe, TRACE, "--policy", "lru", "--budget-mb", "500,1000.5")

    assert {"trace", "policy", "budget_mb", "hit_rate", "mib_per_token", "gap_closed", "schema"} <= set(found[0])
    assert [("lru", 500), ("lru", 1000.5), ("belady", 500), ("belady", 1000.5)] == [
        (row["policy"], row["budget_mb"]) for row in found
    ]
    assert {str(TRACE)} == {row["trace"] for row in found}
    assert [True, False, True, False] == [row["below_cycle"] for row in found]
    assert [0.0, 0.0, 1.0, 1.0] == [row["gap_closed"] for row in found]
    for row in found:
        read = (1 - row["hit_rate"]) * row["lookups"] * 13219200 / row["tokens"] / MIB
        assert read == pytest.approx(row["mib_per_token"])


def test_what_is_undefined_is_null(bmoe, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(TRACE.read_text().replace("\n0,1,85,", "\n0,1,-1,").replace("\n0,1,86,", "\n0,1,-1,"))
    assert "\n0,1,-1," in path.read_text()
    (lru, belady) = rows(bmoe, path, "--budget-mb", "100000")

    assert [None, None, None] == [lru["mib_per_token"], lru["tokens"], lru["gap_closed"]]
    assert lru["hit_rate"] == belady["hit_rate"] > 0


def test_the_table_says_the_cycle_the_experts_and_what_is_below(bmoe):
    code, out, err = bmoe(TRACE, "--policy", "lru,optimum", "--budget-mb", "500,2000")

    assert (0, "") == (code, err)
    head, _, columns, *lines = out.splitlines()
    assert "3 decode tokens, 2 of 128 experts per token, token cycle 907.7 MiB" in head
    assert ["trace", "policy", "budget MiB", "hit rate %", "MiB/token", "gap closed %"] == [
        part.strip() for part in columns.split("  ") if part.strip()
    ]
    assert [line.endswith("below the token cycle") for line in lines] == [True, False] * 3


def test_a_budget_of_nothing_and_the_policy_none_keep_nothing(bmoe):
    found = rows(bmoe, TRACE, "--policy", "lru,none,belady", "--budget-mb", "0,2000")

    assert [0.0, 0.0] == [row["hit_rate"] for row in found if row["policy"] == "none"]
    assert [0.0, 0.0, 0.0] == [row["hit_rate"] for row in found if row["budget_mb"] == 0]


def test_an_installed_plugin_plays_with_its_options(bmoe, shy):
    given = (TRACE, "--enable", "shy", "--policy", "shy.mru,shy.mru:skip=3", "--policy", "lru", "--budget-mb", "1500")
    found = {row["policy"]: row for row in rows(bmoe, *given)}

    assert ["shy.mru", "shy.mru:skip=3", "lru", "belady"] == list(found)
    assert found["shy.mru"]["hit_rate"] != found["shy.mru:skip=3"]["hit_rate"]
    gap = (found["shy.mru"]["hit_rate"] - found["lru"]["hit_rate"]) / (
        found["belady"]["hit_rate"] - found["lru"]["hit_rate"]
    )
    assert gap == pytest.approx(found["shy.mru"]["gap_closed"])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("shy.mru:skip=many", '--policy shy.mru:skip = "many"'),
        ("shy.mru:skop=1", "--policy shy.mru:skop = 1"),
        ("shy.mru:3", "--policy shy.mru:3: '3' is no option; write NAME:KEY=VALUE"),
        ("shy.failing", "--policy shy.failing: fails in a replay (RuntimeError: no idea); correct the plugin"),
        ("shy.curious", f"--policy shy.curious: observes probs, which {TRACE} lacks; record a trace with them: "),
        ("shy.nosy", "--policy shy.nosy: observes activation, which a routing trace lacks; choose another"),
        ("shy.blind", "--policy shy.blind: wants to observe and has no observe(); correct the plugin"),
        ("shy.broken", "--policy shy.broken: cannot be built (ZeroDivisionError"),
        ("shy.lost", '--policy shy.lost: "shy.lost" is no cache policy; '),
    ],
)
def test_a_plugin_that_cannot_play_is_one_line(bmoe, shy, policy, expected):
    code, out, err = bmoe(TRACE, "--enable", "shy", "--policy", policy, "--budget-mb", "1500")

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {expected}")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--budget-mb", "many"], "--budget-mb many: 'many' is no size; give MiB from 0 to"),
        (["--budget-mb", "500,"], "--budget-mb 500,: '' is no size"),
        (["--budget-mb", "nan"], "--budget-mb nan: 'nan' is no size"),
        (["--budget-mb=-1"], "--budget-mb -1: '-1' is no size"),
        (["--budget-mb", "1e99"], "--budget-mb 1e99: '1e99' is no size"),
        ([], "the following arguments are required: --budget-mb"),
        (["--budget-mb", "1", "--policy", "lur"], '--policy lur: "lur" is no cache policy; did you mean "lru"?'),
        (["--budget-mb", "1", "--policy", ""], '--policy : "" is no cache policy; choose one of'),
        (["--budget-mb", "1", "--policy", "belady:a=1"], "--policy belady:a=1: belady has no options; leave them out"),
        (["--budget-mb", "1", "--policy", "lru:a=1"], "--policy lru:a = 1 "),
        (["--budget-mb", "1", "--policy", "acme.x"], '--policy acme.x: "acme.x" is no cache policy; if an installed'),
        (["--budget-mb", "1", "--enable", "nobody"], '--enable names "nobody", which is not installed'),
        (["--budget-mb", "1", "--jobs", "0"], "--jobs 0: is out of range; give at least 1"),
        (["--budget-mb", "1", "--backend", "slurm"], '"slurm" is not a backend (dask, ray)'),
        (["--budget-mb", "1", "--cluster", "tcp://x:1"], "--cluster tcp://x:1: goes with a backend; add --backend"),
        (["--budget-mb", "1", "--plot", "x.exe"], "--plot x.exe: its ending says no kind of picture; end it in .png"),
        (["--budget-mb", "1", "--plot", "no/x.png"], "--plot no/x.png: the folder no is not there"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_argument_is_one_line_that_names_the_option_and_2(bmoe, arguments, expected):
    code, out, err = bmoe(TRACE, *arguments)

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {expected}")


@pytest.mark.parametrize("content", [None, b"", b"\x7fELF\xff\xfe", b"hello\n", TRACE.read_bytes()[:-12]])
def test_what_is_no_whole_trace_is_one_line(bmoe, tmp_path, content):
    path = tmp_path / "t.csv"
    if content is not None:
        path.write_bytes(content)
    code, out, err = bmoe(TRACE, path, "--budget-mb", "1")

    assert (2, "", 1) == (code, out, err.count("\n"))
    assert err.startswith(f"bmoe: {path}: ")


def test_a_model_that_is_none_is_one_line(bmoe, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_text("no")
    code, out, err = bmoe(TRACE, "--budget-mb", "1", "--model", path)

    assert (1, "", 1) == (code, out, err.count("\n"))


def test_a_model_gives_sizes_and_its_own_number_of_experts(bmoe, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(
        "# route_trace v1\n# model=ref arch=a n_layer=2 n_expert=8 n_expert_used=1\n"
        "turn,phase,step,layer,slot,expert,weight,residency,expert_bytes\n0,1,0,1,0,3,nan,0,0\n0,1,1,1,0,3,nan,1,0\n"
    )
    code, out, _ = bmoe(path, "--budget-mb", "1", "--model", "bmoe-ref")

    assert 0 == code
    assert "1 of 8 experts per token (the model's own: " in out


# ---- pictures


def test_a_plot_has_axes_with_units_and_leaves_nothing_beside_it(bmoe, tmp_path):
    pytest.importorskip("matplotlib", reason="needs bmoe[plots]")
    plot = tmp_path / "hits.svg"
    code, _, err = bmoe(TRACE, "--policy", "lru,optimum", "--budget-mb", "500,2000,4000", "--plot", plot)

    assert (0, "") == (code, err)
    assert [plot] == list(tmp_path.iterdir())
    assert plot.read_text().startswith("<?xml")
    from bmoe.replay.chart import draw

    results = sweep([read_lookups(TRACE)], [Contender("lru", "lru")], [500 * MIB, 2000 * MIB])
    above, below = draw(results).axes
    assert ["hit rate of decode (%)", "experts read (MiB per token)"] == [above.get_ylabel(), below.get_ylabel()]
    assert "cache budget (MiB)" == below.get_xlabel()
    assert [500.0, 2000.0] == list(above.lines[0].get_xdata())
    assert [100 * (r.played.hit_rate or 0) for r in results] == list(above.lines[0].get_ydata())


def test_a_plot_replaces_nothing_unasked_and_no_link_at_all(bmoe, tmp_path):
    pytest.importorskip("matplotlib", reason="needs bmoe[plots]")
    plot, link = tmp_path / "hits.png", tmp_path / "link.png"
    plot.write_text("mine")
    link.symlink_to(plot)
    for given in (["--plot", plot], ["--plot", link, "--overwrite"]):
        code, _, err = bmoe(TRACE, "--budget-mb", "500", *given)
        assert (2, 1) == (code, err.count("\n"))
        assert "is there already" in err
        assert "mine" == plot.read_text()
    assert 0 == bmoe(TRACE, "--budget-mb", "500", "--plot", plot, "--overwrite")[0]
    assert plot.read_bytes().startswith(b"\x89PNG")


# ---- spreading


def test_without_joblib_one_process_does_and_more_are_one_line(bmoe, monkeypatch):
    monkeypatch.setattr(sweep_module.importlib.util, "find_spec", lambda name: None)
    assert 2 == len(rows(bmoe, TRACE, "--budget-mb", "500"))
    for given, said in ((["--jobs", "2"], "--jobs 2"), (["--backend", "dask"], "--backend dask")):
        code, out, err = bmoe(TRACE, "--budget-mb", "500", *given)
        assert (2, "") == (code, out)
        assert err == f'bmoe: {said}: needs joblib, which is not installed; pip install "bmoe[sweeps]"\n'


@pytest.mark.parametrize(("backend", "module"), [("dask", "distributed"), ("ray", "ray")])
def test_a_backend_that_is_not_installed_is_one_line(monkeypatch, backend, module):
    pytest.importorskip("joblib", reason="needs bmoe[sweeps]")
    found = sweep_module.importlib.util.find_spec
    monkeypatch.setattr(sweep_module.importlib.util, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(SweepError, match=f"--backend {backend}: needs {module}, which is not installed; pip install"):
        sweep([read_lookups(TRACE)], [Contender("lru", "lru")], [MIB], backend=backend)


def test_two_processes_count_what_one_does():
    pytest.importorskip("joblib", reason="needs bmoe[sweeps]")
    given = [read_lookups(TRACE)], [Contender("lru", "lru"), Contender("none", "none")], [500 * MIB, 1500 * MIB]

    assert figures(sweep(*given)) == figures(sweep(*given, jobs=2))


def test_a_dask_cluster_counts_what_one_process_does():
    pytest.importorskip("joblib", reason="needs bmoe[sweeps]")
    distributed = pytest.importorskip("distributed", reason="needs dask[distributed], a cluster of the user's own")
    given = [read_lookups(TRACE)], [Contender("lru", "lru"), Contender("belady", "belady")], [500 * MIB, 1500 * MIB]
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        found = sweep(*given, backend="dask", cluster=cluster.scheduler_address)

    assert figures(sweep(*given)) == figures(found)


def figures(results):
    return [(r.contender.label, r.budget_bytes, r.played, r.mib_per_token, r.gap_closed) for r in results]
