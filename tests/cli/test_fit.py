"""``bmoe fit`` and ``bmoe profile make``: an answer for every model, a line for every mistake, nothing overwritten."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from bmoe.cli import main
from bmoe.cli.fit import size_of
from bmoe.profile import load_profile
from bmoe.resolve import check
from bmoe.synth import write_model

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
pytestmark = pytest.mark.slow  # every answer is measured, twice


ONE = ("--set", "model.threads=1")
"""What is measured with more threads takes long where cores are busy."""


@pytest.fixture(name="model", scope="module")
def _model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model") / "small.gguf", "tiny-qwen3moe", locality=0.5)


@pytest.fixture(name="call")
def _call(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def call(*arguments):
        code = main([*map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture(name="ask")
def _ask(call):
    def ask(*arguments):
        code, out, err = call("fit", *arguments, *ONE, "--json")
        assert (0, "") == (code, err)
        return json.loads(out)

    return ask


def lines(out: str) -> dict[str, str]:
    return {line[:19].strip(): line[19:].strip() for line in out.partition("\n\n")[0].splitlines()}


def test_a_model_that_fits_runs_resident(ask, model):
    told = ask(model)

    assert (1, True, "resident", None) == (told["schema"], told["runs"], told["profile"], told["reason"])
    assert (None, 0.0, None) == (told["budget_bytes"], told["bytes_per_token"], told["drive"])
    assert 0 < told["tok_s_low"] < told["tok_s_high"] <= 1.6 * told["tok_s_low"]


def test_a_screen_for_a_person(call, model):
    code, out, err = call("fit", model, "--set", "cache.budget_mb=1.5", "--set", "model.threads=1")
    told = lines(out)

    assert (0, "") == (code, err)
    assert "yes" == told["runs here"]
    assert told["profile"].startswith("desktop-over-ram: ") or told["profile"].startswith("phone-")
    assert re.fullmatch(r"[\d.e+]+ to [\d.e+]+ tok/s", told["speed"])
    assert re.match(r"\d+\.\d\d GB/s in experts of ", told["drive"])
    assert "its weights are random" in out
    assert re.search(r"^what would help +times as fast$", out, re.MULTILINE)


def test_what_helps_is_sorted_and_helps(ask, model):
    gains = [each["gain"] for each in ask(model, "--set", "cache.budget_mb=1.5")["advice"]]

    assert gains
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.05


def test_memory_that_is_too_small_is_an_answer(ask, call, model):
    told = ask("bmoe-ref", "--memory", "8MB")

    assert (False, None, None) == (told["runs"], told["profile"], told["tok_s_low"])
    assert re.fullmatch(r"needs \d+ MiB of memory, 7 are free|.*KV.*", told["reason"])
    _, out, _ = call("fit", "bmoe-ref", "--memory", "8MB")
    assert lines(out)["runs here"].startswith("no: ")


def test_more_memory_means_more_hits_and_fewer_bytes(ask):
    told = [ask("bmoe-ref", "--set", f"cache.budget_mb={mib}") for mib in (0, 4, 8, 16)]

    assert sorted(t["hit_rate"]["expected"] for t in told) == [t["hit_rate"]["expected"] for t in told]
    assert sorted((t["bytes_per_token"] for t in told), reverse=True) == [t["bytes_per_token"] for t in told]


def test_a_given_hit_rate_is_believed(ask, model):
    told = ask(model, "--set", "cache.budget_mb=1.5", "--hit-rate", "0.5")

    assert (0.5, "as given") == (told["hit_rate"]["expected"], told["hit_rate"]["why"])


def test_after_a_run_what_was_measured_stands_beside_it(call, ask, model):
    given = ("--set", "cache.budget_mb=1.5", *ONE, "--run", "-n", "8")
    told = ask(model, *given)["measured"]

    assert 8 == told["tokens"]
    assert told["tok_s"] > 0
    assert 0 <= told["hit_rate"] <= 1
    assert told["predicted_for_this"]["tok_s_low"] > 0
    _, out, _ = call("fit", model, *given)
    table = out.rpartition("\n\n")[2].splitlines()
    assert ["", "tok/s", "hit rate", "MiB/token"] == re.split(r"  +", table[0].rstrip()) or "tok/s" in table[0]
    assert ["predicted", "predicted,", "measured"] == [row.split()[0] for row in table[1:]]


def test_the_drive_can_be_another(ask, model, tmp_path):
    told = ask(model, "--set", "cache.budget_mb=1.5", "--drive", tmp_path)

    assert told["drive"]["path"].startswith(str(tmp_path))
    assert [] == [path for path in tmp_path.iterdir() if path.name != "cache"], "nothing is left there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "lots"], "--memory lots: is no size; write it like 12GB"),
        (["--memory", "0GB"], "--memory 0GB: is no size"),
        (["--memory", "5"], "--memory 5: is 5 bytes, which no machine has"),
        (["--memory", "9" * 400 + "GB"], "is no size"),
        (["--hit-rate", "1.5"], "--hit-rate 1.5: is not between 0 and 1"),
        (["--hit-rate", "nan"], "--hit-rate nan: is not between 0 and 1"),
        (["-n", "4"], "-n 4: only --run decodes tokens"),
        (["--run", "-n", "0"], "-n 0: at least one has to be asked for"),
        (["--profile", "destkop-over-ram"], "desktop-over-ram"),
        (["--set", "cache.budget=1"], "cache.budget"),
        (["--set", "model.threads=none"], "model.threads"),
    ],
)
def test_a_mistake_is_one_line(call, model, arguments, said):
    code, out, err = call("fit", model, *arguments)

    assert (2, "") == (code, out)
    assert said in err
    assert 1 == len(err.splitlines())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.gguf"], "missing.gguf: no such file"),
        (["file:///etc/passwd"], "is no address of a file"),
        (["bmoe-ref", "--set", "cache.budget_mb=6", "--drive", "nowhere"], "nowhere: is neither a file nor a folder"),
    ],
)
def test_what_cannot_be_read_is_one_line(call, arguments, said):
    code, out, err = call("fit", *arguments)

    assert (1, "") == (code, out)
    assert said in err
    assert 1 == len(err.splitlines())


def test_a_model_on_a_server_is_not_run(call):
    code, _, err = call("fit", "https://example.org/m.gguf", "--run")

    assert 2 == code
    assert "download it and name the file" in err


@pytest.mark.parametrize(
    ("text", "nbytes"), [("12GB", 12 * 10**9), ("8192MiB", 8 << 30), ("1.5g", 1_500_000_000), ("2000000", 2_000_000)]
)
def test_sizes(text, nbytes):
    assert nbytes == size_of(text)


# ---- profile make


@pytest.mark.parametrize("memory", [[], ["--memory", "1GB"]])
def test_a_made_profile_can_be_checked_and_is_not_lossy(call, model, tmp_path, memory):
    out = tmp_path / "made.toml"
    code, said, err = call("profile", "make", model, "-o", out, *memory, *ONE)

    assert (0, f"{out}: written, for bmoe --profile {out}\n", "") == (code, said, err)
    assert 0 == call("profile", "check", out)[0]
    _, plan = check(out)
    assert plan is not None
    assert not plan.lossy
    table = tomllib.loads(out.read_text())
    assert not {"routing", "loss", "draft"} & set(table)
    assert out.read_text().startswith("# For synthetic tiny-qwen3moe (")
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["made.toml"]


def test_reasons_are_comments_above_their_keys(call, tmp_path):
    path = write_model(tmp_path / "m.gguf", "tiny-qwen3moe")
    _, text, _ = call("profile", "make", path, "--memory", "90MB", "--set", "stream.enabled=true", *ONE)
    above = dict(zip(text.splitlines()[1:], text.splitlines(), strict=False))
    keys = [line for line in above if line.startswith("budget_mb = ")]

    assert keys
    assert all(above[key].startswith("# ") for key in keys)


def test_what_the_person_fixed_is_in_it(call, model, tmp_path):
    out = tmp_path / "made.toml"
    call("profile", "make", model, "-o", out, "--set", "model.threads=3", "--set", "cache.budget_mb=1.4")
    profile = load_profile(out)

    assert (3, 1.4) == (profile.model.threads, profile.cache.budget_mb)


def test_a_file_that_is_there_is_kept_unless_forced(call, model, tmp_path):
    out = tmp_path / "mine.toml"
    out.write_text("# mine\n")
    code, _, err = call("profile", "make", model, "-o", out)

    assert (2, "# mine\n") == (code, out.read_text())
    assert "is there already; name another, or replace it with --force" in err
    assert 0 == call("profile", "make", model, "-o", out, "--force", *ONE)[0]
    assert "# mine" not in out.read_text()


@pytest.mark.parametrize("kind", ["folder", "link", "nowhere"])
def test_what_is_no_file_is_never_replaced(call, model, tmp_path, kind):
    out = {"folder": tmp_path, "link": tmp_path / "link", "nowhere": tmp_path / "no" / "p.toml"}[kind]
    if kind == "link":
        out.symlink_to(tmp_path / "target")
    code, _, err = call("profile", "make", model, "-o", out, "--force")

    assert 2 == code
    assert err.startswith(f"bmoe: -o {out}: ")
    assert not (tmp_path / "target").exists()


def test_no_profile_for_a_model_that_does_not_run(call, tmp_path):
    out = tmp_path / "made.toml"
    code, _, err = call("profile", "make", "bmoe-ref", "--memory", "8MB", "-o", out)

    assert 1 == code
    assert err.startswith("bmoe: bmoe-ref: does not run here: ")
    assert not out.exists()


def test_a_profile_names_no_address(call):
    code, _, err = call("profile", "make", "https://example.org/m.gguf")

    assert 2 == code
    assert "download the model first" in err


def test_a_bundled_model_is_named(call):
    _, text, _ = call("profile", "make", "bmoe-ref", *ONE)

    assert "bmoe-ref" == tomllib.loads(text)["model"]["path"]


def test_a_path_becomes_whole(call, model, monkeypatch):
    monkeypatch.chdir(model.parent)
    _, text, _ = call("profile", "make", model.name, *ONE)

    assert os.path.isabs(tomllib.loads(text)["model"]["path"])
