"""Sub-commands, help and usage errors, in this process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bmoe.cli import COMMANDS
from bmoe.cli import run as main_command
from bmoe.cli.gates import Subject, gate_file
from bmoe.cli.profile import first_comment, toml_lines
from bmoe.profile import bundled_profiles, load_profile
from bmoe.tables import parse_toml

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
HELP = [[], ["profile"], ["profile", "check"], ["profile", "show"], ["profile", "list"]]
HELP += [[name] for name in COMMANDS if name != "profile"]


class TestHelp:
    @pytest.mark.parametrize("command", HELP, ids=lambda command: " ".join(command) or "bmoe")
    def test_every_command_shows_an_example(self, bmoe, command):
        code, out, err = bmoe(*command, "--help")

        assert (0, "") == (code, err)
        assert re.search(r"^example:\n  bmoe ", out, re.MULTILINE)

    def test_the_main_help_lists_every_command(self, bmoe):
        _, out, _ = bmoe("--help")

        assert [name for name in COMMANDS if not re.search(rf"^  {name}  ", out, re.MULTILINE)] == []

    @pytest.mark.parametrize("command", HELP, ids=lambda command: " ".join(command) or "bmoe")
    def test_the_reference_has_every_command_with_its_options(self, bmoe, command):
        _, out, _ = bmoe(*command, "--help")
        title = " ".join(["bmoe", *command])
        page = REFERENCE.read_text("utf-8")
        section = re.search(rf"^## `{title}[^\n]*\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
        assert section is not None, title

        listed = out.partition("\noptions:\n")[2].partition("\nexample:")[0]
        options = set(re.findall(r"--[a-z-]+", listed)) - {"--help"}
        assert sorted(option for option in options if f"`{option}" not in section[1]) == []


class TestUsage:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ([], "no profile: name one with --profile (a file, or one of demo, "),
            (["--profile", "demo"], "no prompt: give one with -p TEXT, or -p - for standard input; example: bmoe "),
            (["--profile", "demo", "-p", "x", "-n", "0"], "-n 0: at least 1 token"),
            (
                ["--profile", "demo", "-p", "x", "-n", "many"],
                "-n many: is not a whole number; example:",
            ),
            (["--promt", "x"], "unknown option --promt; did you mean --prompt?"),
            (["--prof", "demo"], "unknown option --prof; did you mean --profile?"),
            (
                ["--profile", "demo", "-p", "-x"],
                "-p needs a value (one that starts with - is written --option=VALUE); example:",
            ),
            (["--json", "plugins"], 'unexpected argument "plugins" (a command comes first: bmoe COMMAND …)'),
            (["plugin"], '"plugin" is not a command; did you mean plugins?'),
            (["chat"], '"chat" is not a command'),
            (["Once upon a time"], '"Once upon a time" is not a command'),
            (["profile"], "profile needs one of check, show, list, make; example: bmoe profile check"),
            (["profile", "chekc"], '"chekc" is not a command of profile; did you mean check?'),
            (["profile", "show"], "the following arguments are required: NAME|PATH; example: bmoe profile show"),
            (["synth", "x.gguf", "--like", "qwen3-30b"], '"qwen3-30b" is not a shape; did you mean qwen3-30b-a3b?'),
            (
                ["synth", "x.gguf", "--like", "tiny-qwen3moe", "--quant", "Q4K"],
                '"Q4K" is not a quantisation; did you mean Q4_K?',
            ),
            (["gates", "cache:lur"], '"cache:lur" is not a plugin; did you mean cache:lru?'),
        ],
        ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else "",
    )
    def test_a_wrong_command_line_is_one_line_and_2(self, bmoe, arguments, expected):
        code, out, err = bmoe(*arguments)

        assert (2, "") == (code, out)
        assert err.startswith(f"bmoe: {expected}"), err
        assert 1 == err.count("\n")

    def test_every_problem_of_a_profile_has_a_line(self, bmoe):
        code, _, err = bmoe("profile", "check", "demo", "--set", "cache.polcy=lru", "--set", "fetch.lanes=99")
        lines = err.splitlines()

        assert (2, 2) == (code, len(lines))
        assert all(line.startswith("bmoe: --set: ") for line in lines)

    def test_an_unknown_log_level_is_refused(self, bmoe, monkeypatch):
        monkeypatch.setenv("BMOE_LOG", "verbos")
        code, _, err = bmoe("archs")

        assert (2, 'bmoe: BMOE_LOG: "verbos" is not a log level (debug, info, warning, error)\n') == (code, err)

    def test_the_version_names_what_a_bug_report_needs(self, bmoe):
        code, out, _ = bmoe("--version")

        assert 0 == code
        assert re.fullmatch(r"bmoe \S+ \(llama-cpp-python [^,]+, Python \d+\.\d+\.\d+\S*\)\n", out)

    @pytest.mark.parametrize("command", [["archs"], ["plugins"], ["profile", "list"], ["--help"]], ids=" ".join)
    def test_a_reader_that_leaves_is_no_error(self, command):
        arguments = [sys.executable, "-m", "bmoe.cli", *command]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()
            err = process.stderr.read()

        assert (0, b"") == (process.returncode, err)


class TestProfile:
    @pytest.mark.parametrize("name", sorted(bundled_profiles()))
    def test_bundled_profiles_have_no_problem(self, bmoe, name):
        code, out, err = bmoe("profile", "check", name)

        assert (0, "") == (code, err)
        with_model = "no problem found with " if name == "demo" else "no problem found; give --model"
        assert out.startswith(f"{name}.toml: {with_model}")

    @pytest.mark.parametrize("name", sorted(bundled_profiles()))
    def test_what_is_shown_loads_as_the_same_profile(self, bmoe, name):
        _, out, _ = bmoe("profile", "show", name, "--set", 'sink=[{plugin="jsonl",options={path="a\\"b"}}]')
        again = load_profile(parse_toml(out, "shown"))

        shown = load_profile(name, overrides=['sink=[{plugin="jsonl",options={path="a\\"b"}}]'])
        assert shown.model_dump() == again.model_dump()

    def test_values_that_need_care_survive(self):
        values = {"cache": {"options": {"a b": [1, 2.5, True], "deep": {"x": "ünï\n\x7f"}}, "heat": None, "ceil": 1e20}}
        expected = {"cache": {k: v for k, v in values["cache"].items() if v is not None}}

        assert expected == parse_toml("\n".join(toml_lines(values)), "shown")

    def test_show_as_json_includes_overrides(self, bmoe):
        _, out, _ = bmoe("profile", "show", "demo", "--set", "cache.budget_mb=48", "--json")

        assert 48 == json.loads(out)["profile"]["cache"]["budget_mb"]

    def test_list_describes_each_by_its_first_comment(self, bmoe):
        _, out, _ = bmoe("profile", "list", "--json")

        assert sorted(bundled_profiles()) == [p["name"] for p in json.loads(out)["profiles"]]
        assert all(p["description"] for p in json.loads(out)["profiles"])

    def test_a_profile_without_a_comment_has_no_description(self, tmp_path):
        (tmp_path / "p.toml").write_text("[cache]\n# not this\n")

        assert "" == first_comment(tmp_path / "p.toml")

    def test_check_finds_an_unknown_plugin_without_a_model(self, bmoe):
        code, _, err = bmoe("profile", "check", "demo", "--set", "cache.policy=lur")

        assert 2 == code
        assert 'cache.policy = "lur"' in err
        assert "lru" in err

    def test_check_finds_a_wrong_option_without_a_model(self, bmoe):
        code, _, err = bmoe("profile", "check", "demo", "--set", 'sink=[{plugin="jsonl",options={pth="x"}}]')

        assert 2 == code
        assert "sink.0.options.pth" in err

    def test_check_finds_wrong_keys_names_options_and_plugins_in_one_pass(self, bmoe, tmp_path):
        settings = ("cache.polcy=lru", "fetch.plugin=preed", 'sink=[{plugin="jsonl",options={pth="x"}}]')
        settings += ('plugins.enable=["nobody"]',)
        arguments = [part for setting in settings for part in ("--set", setting)]
        code, _, err = bmoe("profile", "check", "demo", "--model", str(tmp_path / "none.gguf"), *arguments)

        assert (2, 4) == (code, err.count("\n"))
        for text in ("cache.polcy", "fetch.plugin", "sink.0.options.pth", '"nobody"'):
            assert 1 == err.count(text), text

    def test_check_reads_the_header_of_a_model(self, bmoe, tmp_path):
        model = tmp_path / "m.gguf"
        assert 0 == bmoe("synth", str(model), "--like", "tiny-qwen3moe", "--layers", "1")[0]
        code, out, _ = bmoe("profile", "check", "demo", "--model", str(model))
        report = json.loads(bmoe("profile", "check", "demo", "--model", str(model), "--json")[1])

        assert 0 == code
        assert f"demo.toml: no problem found with {model}" == out.splitlines()[0]
        assert "qwen3moe" == report["resolved"]["arch"]

    def test_check_of_a_model_that_is_none_is_1(self, bmoe, tmp_path):
        (tmp_path / "m.gguf").write_text("<!DOCTYPE html>")
        code, _, err = bmoe("profile", "check", "demo", "--model", str(tmp_path / "m.gguf"))

        assert 1 == code
        assert 1 == err.count("\n")


class TestListings:
    def test_plugins_as_json_have_options_and_origin(self, bmoe):
        _, out, _ = bmoe("plugins", "--json")
        found = {(p["kind"], p["name"]): p for p in json.loads(out)["plugins"]}

        assert "bmoe_plugins.sinks.jsonl" == found["sink", "jsonl"]["origin"]
        assert {"path", "flush"} == set(found["sink", "jsonl"]["options"])
        assert "file that lines are appended to" == found["sink", "jsonl"]["options"]["path"]["description"]

    def test_plugins_as_a_table_have_one_line_each(self, bmoe):
        _, out, _ = bmoe("plugins")
        lines = out.splitlines()
        names = [p["name"] for p in json.loads(bmoe("plugins", "--json")[1])["plugins"]]

        assert ["name", *names] == [line.split()[1] for line in lines[: len(names) + 1]]

    @pytest.mark.parametrize("command", ["plugins", "archs"])
    def test_a_plugin_that_is_not_installed_is_refused_by_the_option(self, bmoe, command):
        code, _, err = bmoe(command, "--enable", "nobody")

        assert 2 == code
        assert err.startswith('bmoe: --enable names "nobody", which is not installed; ')

    def test_archs_name_their_tensors_in_graph_order(self, bmoe):
        _, out, _ = bmoe("archs", "--json")
        found = {row["name"]: row for row in json.loads(out)["archs"]}

        assert [["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"]] == found["qwen3moe"]["experts"]


class TestSynth:
    def test_the_file_is_written_and_named(self, bmoe, tmp_path):
        path = tmp_path / "t.gguf"
        code, out, _ = bmoe("synth", str(path), "--like", "tiny-qwen3moe", "--layers", "1", "--quant", "q8_0")

        assert (0, b"GGUF") == (code, path.read_bytes()[:4])
        assert out.startswith(f"{path}: ")

    def test_an_existing_file_is_kept_unless_told_otherwise(self, bmoe, tmp_path):
        path = tmp_path / "t.gguf"
        path.write_text("mine")
        arguments = ("synth", str(path), "--like", "tiny-qwen3moe", "--layers", "1")

        assert (2, 1) == (bmoe(*arguments)[0], bmoe(*arguments)[2].count("--overwrite"))
        assert "mine" == path.read_text()
        assert 0 == bmoe(*arguments, "--overwrite")[0]


class TestGates:
    def test_in_tree_gates_pass_and_print_what_a_test_would_record(self):
        done = _gates("cache:lru", "-k", "deterministic")

        assert 0 == done.returncode, done.stdout + done.stderr
        assert "cache:lru: CachePolicyGates\n" in done.stdout
        assert re.search(r"^lru: golden = \{'locality': \d+, 'scan': \d+, 'zipf': \d+\}$", done.stdout, re.MULTILINE)

    def test_an_installed_plugin_that_breaks_its_contract_fails(self, tmp_path):
        _distribution(tmp_path, "umbra", _INERT_SINK)
        done = _gates("--plugin", "umbra", "umbra.nothing", path=tmp_path)

        assert 1 == done.returncode
        assert "nothing was written anywhere" in done.stdout

    def test_what_an_installed_plugin_provides_is_listed_with_the_gates_of_its_kind(self, tmp_path):
        _distribution(tmp_path, "umbra", _INERT_SINK)
        done = _gates("--plugin", "umbra", "--list", path=tmp_path)

        assert ["sink:umbra.nothing", "SinkGates"] == done.stdout.splitlines()[1].split()

    def test_without_pytest_the_remedy_is_named(self, bmoe, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        code, _, err = bmoe("gates", "sink:jsonl")

        assert (2, 'bmoe: gates need pytest, which is not installed; pip install "bmoe[dev]"\n') == (code, err)

    def test_a_filter_that_matches_nothing_is_refused(self):
        done = _gates("sink:jsonl", "-k", "no_such_gate")

        assert 2 == done.returncode
        assert 'bmoe: no gate matches -k "no_such_gate"' in done.stderr

    def test_the_test_file_has_a_class_for_each_plugin_and_gate(self):
        source = gate_file([Subject("cache", "umbra.hot-set", "umbra", ("CachePolicyGates",))])

        assert "class TestCacheUmbraHotSetCachePolicyGates(CachePolicyGates):" in source
        assert "    plugin, provider = 'umbra', 'umbra.hot-set'" in source


_INERT_SINK = """
from bmoe import hookimpl
from bmoe.contracts import Options, Provider

class Nothing:
    def open(self, run, /): pass
    def token(self, record, /): pass
    def close(self, summary, /): pass

@hookimpl
def bmoe_sinks():
    return [Provider("umbra.nothing", lambda options, facts: Nothing(), Options)]
"""


def _distribution(folder, name, source):
    """An installed distribution, as pip would leave it, in ``folder``."""
    (folder / f"{name}.py").write_text(source)
    info = folder / f"bmoe_{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: bmoe-{name}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[bmoe.plugins]\n{name} = {name}\n")


def _gates(*arguments, path=None):
    """The command in a process of its own, whose pytest is another one than this."""
    env = {**os.environ, **({"PYTHONPATH": os.pathsep.join([str(path), *_paths()])} if path else {})}
    command = [sys.executable, "-m", "bmoe.cli", "gates", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)


def _paths():
    return [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]


def test_the_parser_never_abbreviates():
    """A new option can then never change what an old command line means."""
    assert main_command.parser().allow_abbrev is False
