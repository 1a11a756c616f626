"""The benchmarks run, say what they promise to say, and refuse to give a figure that would mean nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from bmoe.synth import write_model

    return str(write_model(tmp_path_factory.mktemp("benchmarks") / "tiny.gguf", "tiny-qwen3moe", quant="Q4_K"))


def run(script, *arguments):
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=dict(os.environ))


@pytest.mark.slow
def test_overhead_gives_the_ratio_of_runs_in_which_every_look_up_was_a_hit(model):
    done = run("overhead.py", "--quick", "--json", "--model", model, "--pairs", "2")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["cpu_ratio"] > 0
    assert (result["hit_rate"], result["threads"], result["pairs"]) == (1.0, 1, 2)


@pytest.mark.slow
def test_flash_bound_gives_time_bandwidth_and_bytes(model):
    done = run("flash_bound.py", "--quick", "--json", "--model", model, "--pairs", "1", "--tokens", "4")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["flash_ratio"] > result["serial_ratio"] > 0
    assert result["mib_per_token"] > 0


@pytest.mark.slow
def test_fetchers_gives_times_for_every_case(model):
    done = run("fetchers.py", "--json", "--model", model, "--rounds", "2", "--reads", "3", "6")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {3, 6} == {row["reads"] for row in rows}
    assert all(0 < row["first_ms"] <= row["last_ms"] and row["cpu_us"] > 0 for row in rows)


@pytest.mark.slow
def test_half_cache_gives_bounds_with_the_cache_off_and_at_half_and_draws_them(model, tmp_path):
    plot = tmp_path / "half.svg"
    done = run(
        "half_cache.py", "--quick", "--json", "--model", model, "--pairs", "2", "--tokens", "4", "--plot", str(plot)
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    off, half = result["cells"]
    assert 0 == off["budget_mb"] < half["budget_mb"]
    assert off["hit_rate"] == 0 < half["hit_rate"]
    for cell in (off, half):
        assert cell["gain"]["low"] <= cell["gain"]["ratio"] <= cell["gain"]["high"]
        assert {"off", "projection"} == set(cell["bound_ratio"])
        assert cell["read_ms"][1] > 0
    assert result["machine"]["cpus"] == os.cpu_count()
    drawn = plot.read_text()
    assert "<svg" in drawn
    assert drawn.count("<use") > 4


@pytest.mark.slow
def test_prefill_gives_the_share_of_the_sequential_bandwidth_of_both_modes(model):
    done = run("prefill.py", "--quick", "--json", "--model", model, "--pairs", "2", "--prompt", "16")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["compute_s"] > 0
    for cell in result["cells"]:
        assert {"projection", "off"} == set(cell["bandwidth_ratio"])
        assert all(low > 0 for low, _, _ in cell["bandwidth_ratio"].values())
        assert all(nbytes > 0 for nbytes in cell["bytes"].values())


@pytest.mark.slow
def test_dense_gives_memory_and_processor_time_of_every_placement(model):
    done = run(
        "dense.py",
        "--quick",
        "--json",
        "--model",
        model,
        "--pairs",
        "1",
        "--tokens",
        "2",
        "--placements",
        "mmap",
        "anon",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert ["mmap", "anon"] == list(result["placements"])
    assert (result["resolved"]["mmap"]["placed_bytes"], result["resolved"]["anon"]["placed_bytes"] > 0) == (0, True)
    assert all(found["token_cpu_s"][1] > 0 for found in result["placements"].values())


@pytest.mark.slow
def test_hot_path_says_what_streaming_takes_of_a_token_or_what_it_lacks(model):
    done = run("hot_path.py", "--quick", "--json", "--model", model, "--pairs", "20", "--tokens", "60")
    if done.returncode and "perf" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["per_token"]["entered"] == 0, "with every expert resident Python is not entered"
    assert result["per_token"]["routings"] == result["layers"]
    assert result["ms_per_token"]["plain"]["ggml"] > 0


@pytest.mark.slow
def test_another_engine_is_run_in_turn_and_its_figures_are_read(model, tmp_path):
    script = tmp_path / "other.py"
    script.write_text(
        "import os, sys\n"
        "assert sys.argv[2] == '--cache' and '--rand' in sys.argv and sys.argv[-2] == '--prompt'\n"
        "assert os.environ['SLOTS' if sys.argv[3] == '0' else 'RECYCLE'] == '1'\n"
        "print('tok/s 2.500 hit 0.800')\n"
    )
    done = run("flash_bound.py", "--json", "--model", model, "--pairs", "2", "--tokens", "6", "--against", str(script))
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert len(cells) == 2
    for cell in cells.values():
        assert cell["second"] == [2.5, 2.5, 2.5]
        assert cell["low"] <= cell["ratio"] <= cell["high"]


@pytest.mark.slow
def test_memory_gives_peaks_against_the_sum_of_their_parts(model):
    done = run("memory.py", "--quick", "--json", "--model", model, "--tokens", "3", "--ubatch", "16")
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)["cells"]
    assert 4 == len(cells)
    for cell in cells:
        assert cell["sum_bytes"] == sum(cell["parts"].values())
        assert {"baseline", "dense", "experts", "context_KV", "context_compute"} <= set(cell["parts"])
        assert {"prefill", "decode"} == set(cell["ratio"])
        assert cell["resident"]["mapped"] > 0


@pytest.mark.slow
def test_mmap_limit_runs_both_in_turn_below_a_limit_and_says_by_what(model):
    from bmoe.testing.limits import memory_limit

    with memory_limit(1 << 30) as limit:
        if limit is None:
            pytest.skip("nobody may limit memory here: no control group that can be made, no systemd")
    # the file is smaller than the interpreter, so that the limit here is one that everything fits in
    done = run("mmap_limit.py", "--json", "--model", model, "--pairs", "2", "--tokens", "3", "--limit", "1024")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["limited_by"] == limit.kind
    assert result["low"] <= result["ratio"] <= result["high"]
    assert [2, 2] == [len(result["runs"][side]) for side in ("bmoe", "llama.cpp")]
    assert result["budget_bytes"] > 0
    assert result["defaults"]["tok_s"] > 0
    assert all(run["charged_peak_bytes"] <= 1 << 30 for runs in result["runs"].values() for run in runs)


def test_replay_counts_the_same_on_both_paths_and_draws_the_times(tmp_path):
    plot = tmp_path / "replay.svg"
    done = run("replay.py", "--lookups", "20000", "--json", "--plot", str(plot))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["lookups"] >= 20000
    assert result["read_s"] > 0
    lru, generic, belady = (result["policies"][name] for name in ("lru", "generic", "belady"))
    assert lru["hits"] == generic["hits"] < belady["hits"]
    assert plot.read_text().startswith("<?xml")


def test_an_interval_holds_its_ratio_and_equal_sides_give_one():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from pairs import compare, interleave
    finally:
        sys.path.remove(str(BENCHMARKS))
    drifting = iter(range(1, 100))
    equal = interleave(lambda: next(drifting), lambda: next(drifting), 10)
    assert equal.low <= 1.0 <= equal.high
    apart = compare([2.0, 2.2, 1.8], [1.0, 1.0, 1.0])
    assert (apart.ratio, apart.pairs) == (2.0, 3)
    assert 1.8 <= apart.low <= apart.high <= 2.2


@pytest.mark.slow
def test_read_ahead_gives_waits_with_and_without_a_prefetcher_and_what_it_wasted(model):
    small = ("--quick", "--pairs", "2", "--tokens", "6", "--share", "0.5")
    done = run("read_ahead.py", *small, "--json", "--model", model)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (cell,) = result["cells"]
    none, right, half, wrong = cell["rows"]
    assert ["none", "100%", "50%", "0%"] == [row["prefetcher"] for row in cell["rows"]]
    assert none["ahead_mib"] == 0
    assert right["wasted_mib"] == 0
    assert right["ahead_mib"] > wrong["ahead_mib"] > 0
    assert half["gain"]["low"] <= half["gain"]["ratio"] <= half["gain"]["high"]


@pytest.mark.slow
def test_fit_holds_predictions_against_runs():
    done = run("fit.py", "--json", "--rounds", "1", "--only", "bmoe-ref, a third cached, 1 thread")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert 1 == row["runs"] >= row["inside"]
    assert 1 < row["widest"] <= 1.6
    assert row["hit_rate"][0] == pytest.approx(row["hit_rate"][1], abs=0.05)


@pytest.mark.slow
def test_near_misses_counts_and_replays(model):
    pytest.importorskip("pyarrow", reason="needs pyarrow")
    texts = Path(__file__).parent.parent / "core/models/heldout.jsonl"
    done = run("near_misses.py", "--json", "--tokens", "300", "--budgets", "3,14", "--texts", str(texts))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["tokens"] >= 300
    assert 0 < result["other"] < result["near"] < result["used"] < 1
    assert all(0 <= small < large <= 1 for small, large in result["hits"].values())


@pytest.mark.slow
def test_heat_compares_the_first_tokens_with_and_without_it():
    done = run("heat.py", "--json", "--prompts", "2", "--prompt-tokens", "4", "--tokens", "10")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["preloaded_mib"] > 0
    assert 0 < row["cold"] < 1
    assert row["warm_read_mib"] < row["cold_read_mib"]


@pytest.mark.slow
def test_prefetchers_gives_speed_waits_and_bytes_of_each_against_none():
    done = run("prefetchers.py", "--budget-mb", "6.4", "--rounds", "2", "--tokens", "12", "--json")
    assert done.returncode == 0, done.stderr
    rows = {row["prefetcher"]: row for row in json.loads(done.stdout)["rows"]}
    assert set(rows) == {"none", "temporal", "stale-gate", "edgemoe", "hot"}
    assert rows["none"]["speed"] == [1.0, 1.0, 1.0]
    assert rows["none"]["ahead_kib"] == 0 < rows["stale-gate"]["ahead_kib"]
    assert all(row["token_ms"] > row["wait_ms"] > 0 < row["hit_rate"] < 1 for row in rows.values())


@pytest.mark.slow
def test_head_gives_costs_and_agreement_and_its_cut_reads_nothing():
    done = run("head.py", "--json", "--budget-mb", "6.4", "--rounds", "2", "--tokens", "8")
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert (cell["costs"]["cut"]["bytes"], cell["costs"]["cut"]["count"]) == (0, 2)
    assert min(cell["costs"][name]["bytes"] for name in ("whole", "guess", "token")) > 0
    assert cell["agreement"][0]["tried"] == 2 * 7
