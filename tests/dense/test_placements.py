"""Placements under the conditions that a gate does not make: odd files, drives that fail, limits, many opens."""

from __future__ import annotations

import errno
import os
import resource
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bmoe.errors import BmoeError, NativeError
from bmoe.machine import Machine
from bmoe.native import memory, residency
from bmoe.planner import make_plan
from bmoe.plugins import load_plugins
from bmoe.profile import load_profile
from bmoe.registry import load_registry
from bmoe.resolve import resolve
from bmoe.synth import SHAPES
from bmoe.testing.dense import accessible
from bmoe.testing.faults import Faults
from bmoe.testing.models import TinyModels
from bmoe.testing.shards import split_model

from .runs import generate, in_a_process, opened, run

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits and mappings are looked up in /proc")
COPYING = ("anon", "locked")


@pytest.fixture(name="faults")
def _faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


def failed(model: str | Path, placement: str, *overrides: str) -> str:
    with pytest.raises(BmoeError) as caught:
        opened(model, placement, "fetch.direct=false", *overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- odd models


@pytest.mark.parametrize("placement", ["warm", "anon", "repack"])
def test_a_head_that_is_the_embedding_leaves_the_mapping_with_it(models: TinyModels, placement: str):
    path = models.path(replace(SHAPES["tiny-qwen3moe"], name="tied", tied=True))

    with opened(path, placement) as engine:
        assert generate(engine) == run(path, "mmap")
        if placement == "anon":
            assert engine.placement is not None
            assert "token_embd.weight" in engine.placement.moved


@LINUX
@pytest.mark.parametrize("like", ["tiny-glm4moe", "tiny-gpt-oss", "tiny-qwen3next"])
def test_what_the_graph_does_not_show_stays_mapped(models: TinyModels, like: str):
    """Such as the dense weights of a head for next-token prediction."""
    if like not in SHAPES:
        pytest.fail(f"{like} is no shape")
    path = models.path(like)
    with opened(path, "anon") as engine:
        assert engine.placement is not None
        base = engine.model.bases[0]
        for tensor in engine.facts.dense:
            first, last = base + tensor.offset, base + tensor.offset + tensor.nbytes
            if tensor.name in engine.placement.moved:
                whole = (memory.round_up(first), memory.round_down(last))
                assert accessible([whole] if whole[0] < whole[1] else []) == []
        assert generate(engine) == run(path, "mmap")


def test_a_repacked_run_equals_the_resident_one_and_never_repacks_what_is_looked_up(models: TinyModels):
    shape = replace(SHAPES["tiny-qwen3moe"], name="q4", dense="Q4_0", output="Q4_0", embedding="Q4_0")
    path = models.path(shape)

    with opened(path, "repack") as engine:
        if not engine.repacked:
            pytest.skip("this processor has no kernel for Q4_0")
        assert "token_embd.weight" not in engine.repacked
        assert "output.weight" in engine.repacked
        assert generate(engine) == run(path, "repack", "stream.enabled=false")
        assert engine.record.resolved["dense"]["repacked_bytes"] > 0


def test_a_repacked_tied_head_is_left_alone(models: TinyModels):
    shape = replace(SHAPES["tiny-qwen3moe"], name="q4-tied", dense="Q4_0", embedding="Q4_0", tied=True)

    with opened(models.path(shape), "repack") as engine:
        assert "token_embd.weight" not in engine.repacked
        assert generate(engine) == run(models.path(shape), "repack", "stream.enabled=false")


def test_where_nothing_can_be_repacked_a_notice_says_so(model: str, mapped: str):
    with opened(model, "repack") as engine:
        assert engine.repacked == frozenset()
        (notice,) = engine.record.notices
        assert notice.startswith('dense.placement = "repack" rearranges nothing')
        assert generate(engine) == mapped


def test_a_split_model_is_copied_from_every_file(models: TinyModels, tmp_path: Path, mapped: str):
    """One file has no experts, and one nothing else."""

    def place(name: str) -> int:
        return 1 if "_exps" in name else 2 if "attn" in name else 0

    first = split_model(models.path(), tmp_path, place, 3)[0]
    with opened(first, "anon") as engine:
        assert engine.placement is not None
        assert {t.shard for t in engine.facts.dense if t.name in engine.placement.moved} == {0, 2}
        assert engine.released_bytes >= 0.9 * engine.facts.dense_bytes
        assert generate(engine) == mapped


def test_two_engines_of_one_file_release_their_own_mapping_only(model: str, mapped: str):
    with opened(model, "mmap") as first, opened(model, "anon") as second, opened(model, "anon") as third:
        third.close()
        assert generate(second) == mapped
        assert generate(first) == mapped


@LINUX
def test_a_file_that_is_cut_short_afterwards_does_not_end_the_process(model: str, mapped: str, tmp_path: Path):
    """Nothing of it is mapped any more; a prompt that needs an expert from it would be a read error."""
    path = tmp_path / "model.gguf"
    path.write_bytes(Path(model).read_bytes())
    lines = in_a_process(f"""
import os
with opened({str(path)!r}, "anon", "cache.budget_mb=64") as engine:
    expected = generate(engine)
    os.truncate({str(path)!r}, 4096)
    print(generate(engine) == expected)
""")

    assert lines == ["True"]


# ---- what fails


@pytest.mark.parametrize("placement", ["warm", *COPYING])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_read_that_fails_ends_the_open_in_one_line(model: str, mapped: str, faults: Faults, placement: str, nth: int):
    before = memory.count_mappings()
    with faults.once(nth, -errno.EIO):
        told = failed(model, placement)

    assert faults.met
    assert "(EIO); check the drive" in told
    assert model in told
    assert faults.in_flight == 0
    assert memory.count_mappings() <= before + 8, "a mapping was left"
    assert run(model, placement) == mapped


@pytest.mark.parametrize("placement", ["warm", *COPYING])
def test_a_file_cut_short_while_it_is_copied_is_an_error(model: str, mapped: str, faults: Faults, placement: str):
    with faults.once(1, 4096):
        told = failed(model, placement)

    assert faults.met
    assert "was it truncated?" in told
    assert run(model, placement) == mapped


def test_a_refusal_half_way_through_locking_ends_the_open(model: str, mapped: str, monkeypatch: pytest.MonkeyPatch):
    for in_place in ("true", "false"):
        calls = iter([0, -1])

        def refuse(address: int, nbytes: int, calls=calls) -> int:
            return next(calls)

        with monkeypatch.context() as patch:
            patch.setattr(residency._libc, "mlock", refuse)
            with pytest.raises(NativeError, match="mlock of .* bytes refused") as caught:
                opened(model, "locked", f"dense.options.copy_weights={in_place}")
        assert next(calls, None) is None
        assert "ulimit -l, systemd LimitMEMLOCK=" in str(caught.value)
    assert run(model, "locked") == mapped


DROPPED = """
import os, resource
opened({model!r}, "locked").close()  # what is imported later may be out of reach without privileges
def limited(limit):
    child = os.fork()
    if child == 0:
        try:
            hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit or hard, hard))
            if os.geteuid() == 0:
                os.setgroups([]); os.setgid(65534); os.setuid(65534)
            with opened({model!r}, "locked") as engine:
                generate(engine)
                locked = open("/proc/self/status").read().partition("VmLck:")[2].split()[0]
                print("locked", int(locked) * 1024 >= engine.placement.placed_bytes, flush=True)
        except BaseException as error:
            print(type(error).__name__, error, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
limited(65536)
limited(0)
"""


@LINUX
def test_a_limit_on_locked_memory_is_explained_before_the_load(model: str, tmp_path: Path):
    """Without privileges; with a limit that is high enough the weights are locked."""
    path = tmp_path / "model.gguf"
    path.write_bytes(Path(model).read_bytes())
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    path.chmod(0o644)
    if any(not parent.stat().st_mode & 0o001 for parent in tmp_path.parents):
        pytest.skip("others may not enter the folder for temporary files")

    refused, locked = in_a_process(DROPPED.format(model=str(path)))

    assert refused.startswith("NativeError dense weights need ")
    assert "(RLIMIT_MEMLOCK) is 65536; raise it (ulimit -l, systemd LimitMEMLOCK=)" in refused
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard == resource.RLIM_INFINITY or hard > 4 << 20:
        assert locked == "locked True"


@LINUX
def test_memory_that_is_not_granted_for_the_copies_is_one_line_and_leaves_nothing(models: TinyModels):
    """Too little address space for the copies, though enough for the model's mapping."""
    shape = replace(SHAPES["tiny-qwen3moe"], name="large-vocabulary", n_vocab=65536)
    lines = in_a_process(f"""
import resource
from bmoe.native import memory
with opened({str(models.path(shape))!r}, "mmap") as engine:
    size = engine.facts.file_bytes
    expected = generate(engine)
before = memory.count_mappings()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
reserve = memory.reserve
def tight(nbytes, **kind):
    if kind.get("huge") and nbytes > 32 << 20:
        used = int(open("/proc/self/statm").read().split()[0]) * memory.PAGE
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
    return reserve(nbytes, **kind)
memory.reserve = tight
try:
    opened({str(models.path(shape))!r}, "anon")
except Exception as error:
    print(type(error).__name__, error)
memory.reserve = reserve
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
print(memory.count_mappings() <= before + 8)
with opened({str(models.path(shape))!r}, "anon") as engine:
    print(generate(engine) == expected)
""")

    assert lines[0].startswith("NativeError cannot reserve ")
    assert lines[0].endswith("raise the limit (ulimit -v)")
    assert lines[1:] == ["True", "True"]


@LINUX
@pytest.mark.parametrize("placement", ["anon", "locked", "repack", "warm"])
def test_fifty_opens_leave_no_mapping_and_no_descriptor(model: str, placement: str):
    def count() -> tuple[int, int]:
        return memory.count_mappings(), len(os.listdir("/proc/self/fd"))

    for _ in range(5):
        opened(model, placement).close()
    mappings, files = count()
    for _ in range(50):
        opened(model, placement).close()

    after = count()
    assert after[1] == files
    assert after[0] <= mappings + 10, "mappings grow with every open"


# ---- what it reports


@LINUX
def test_the_copies_are_not_held_twice(models: TinyModels):
    """The peak of an open with copies is that of one without, give or take: the mapping is not brought in as well."""
    shape = replace(SHAPES["tiny-qwen3moe"], name="large-vocabulary", n_vocab=65536)
    path = str(models.path(shape))
    peaks = {}
    for placement in ("mmap", "anon"):
        program = f"engine = opened({path!r}, {placement!r}); print(engine.open_peak_rss_bytes); engine.close()"
        peaks[placement] = int(in_a_process(program)[0])
    dense = resolve({"model": {"path": path}, "cache": {"budget_mb": 0}}).facts.dense_bytes
    assert dense > 64 << 20, "too small to tell"

    assert peaks["anon"] < peaks["mmap"] + 0.25 * dense


def test_the_record_says_what_was_placed_and_released(model: str):
    with opened(model, "anon") as engine:
        dense = engine.record.resolved["dense"]

    assert dense["name"] == "anon"
    assert dense["placed_bytes"] >= engine.facts.dense_bytes
    assert dense["resident_bytes"] == dense["placed_bytes"]
    assert dense["released_bytes"] >= engine.facts.dense_bytes - 2 * memory.PAGE
    with opened(model, "warm") as engine:
        dense = engine.record.resolved["dense"]
    assert (dense["placed_bytes"], dense["released_bytes"]) == (0, 0)
    assert dense["resident_bytes"] >= engine.facts.dense_bytes


@pytest.mark.parametrize("placement", COPYING)
def test_an_automatic_budget_leaves_room_for_the_copies(models: TinyModels, placement: str):
    model = str(models.path(replace(SHAPES["tiny-qwen3moe"], name="more-experts", n_expert=32)))
    machine = Machine(2, memory.PAGE, (1536 << 20) + (20 << 20), "Linux", "6", "x86_64", None)

    def budget(placement: str) -> int:
        profile = load_profile({"model": {"ctx": 64}, "dense": {"placement": placement}}, model=model)
        catalog = load_plugins(profile, load_registry())
        return make_plan(profile, catalog, resolve(profile).facts, machine).budget.bytes

    size = resolve({"model": {"path": model}, "cache": {"budget_mb": 0}}).facts.dense_bytes
    assert size <= budget("mmap") - budget(placement) <= size + 16 * memory.PAGE
    assert budget(placement) > 0
