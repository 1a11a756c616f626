"""A profile loads with defaults and overrides, or reports every problem at once in lines that name the remedy."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from pathlib import Path
from typing import get_origin

import pytest
from pydantic import BaseModel

from bmoe.errors import ProfileError
from bmoe.profile import Profile, bundled_profiles, load_profile


def problems(profile, **arguments):
    with pytest.raises(ProfileError) as caught:
        load_profile(profile, **arguments)
    assert all(len(line.splitlines()) == 1 for line in caught.value.problems)
    assert not any("pydantic" in line or "Extra inputs" in line for line in caught.value.problems)
    return caught.value.problems


def written(folder, text, name="mine.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_an_empty_profile_has_every_default():
    profile = load_profile({})

    assert ("auto", 2048, 512, "f16", "auto", False) == (
        profile.model.threads,
        profile.model.ctx,
        profile.model.ubatch,
        profile.model.kv_type,
        profile.model.flash_attention,
        profile.model.repack,
    )
    assert (True, "auto") == (profile.stream.enabled, profile.stream.overlap)
    assert ("auto", "auto", 1536, 0) == (
        profile.cache.policy,
        profile.cache.budget_mb,
        profile.cache.floor_mb,
        profile.cache.ceil_mb,
    )
    assert ("auto", 4, True) == (profile.fetch.plugin, profile.fetch.lanes, profile.fetch.direct)
    assert profile.sampling.temp == 0
    assert (None, None, None, (), ()) == (
        profile.prefetch,
        profile.draft,
        profile.loss,
        profile.routing,
        profile.sink,
    )


@pytest.mark.parametrize("name", ["phone-near-ram", "phone-far-past-ram", "desktop-over-ram", "resident", "demo"])
def test_bundled_profiles_load_by_name(name):
    assert f"{name}.toml" == load_profile(name).source
    assert name in bundled_profiles()


def test_resident_is_plain_llama_cpp_with_its_own_defaults():
    resident = load_profile("resident")

    assert (False, True) == (resident.stream.enabled, resident.model.repack)


def test_a_path_comes_before_a_bundled_name_and_a_folder_is_no_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resident").mkdir()
    written(tmp_path, "[model]\nctx = 77\n", "demo")

    assert load_profile("demo").model.ctx == 77
    assert load_profile("resident").model.repack


def test_an_unknown_name_lists_the_bundled_ones_with_did_you_mean():
    (line,) = problems("phone-near-rom")

    assert 'did you mean "phone-near-ram"? (demo, desktop-over-ram, phone-far-past-ram' in line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[model]\nctx = \n", "mine.toml: line 2, column 7: Invalid value; correct the TOML there"),
        ("[model", "line 1, column 7: "),
        (b"\xff\xfe[model]", "is not UTF-8 (byte 0xff at offset 0); save it as UTF-8 text"),
        ("a = " + "9" * 5000, "cannot be parsed"),
        ("a = " + "[" * 9000, "mine.toml: "),
        ("a = 0x" + "f" * 5000, "is too large for TOML"),
        (b"GGUF" * 400_000, "name a TOML file, not a model"),
    ],
    ids=["value", "end", "encoding", "digits", "brackets", "bits", "size"],
)
def test_text_that_is_no_toml_is_one_line_naming_file_and_place(tmp_path, monkeypatch, text, expected):
    monkeypatch.chdir(tmp_path)
    written(tmp_path, text)

    lines = problems("mine.toml")

    assert lines[0].startswith("mine.toml: ")
    assert any(expected in line for line in lines)


def test_a_byte_order_mark_is_no_error(tmp_path):
    assert load_profile(written(tmp_path, b"\xef\xbb\xbf[model]\nctx = 9\n")).model.ctx == 9


def test_paths_that_cannot_be_read_are_one_line(tmp_path):
    written(tmp_path, "")

    assert "is a directory" in problems(str(tmp_path))[0]
    assert "neither a file nor a bundled profile" in problems(tmp_path / "absent.toml")[0]
    assert "neither a file nor a bundled profile" in problems("")[0]
    assert "neither a file nor a bundled profile" in problems("a\0b")[0]
    assert "neither a file nor a bundled profile" in problems("x" * 5000)[0]
    assert "neither a file nor a bundled profile" in problems(tmp_path / "mine.toml" / "deeper.toml")[0]


def test_a_file_without_permission_says_so(tmp_path, monkeypatch):
    path = written(tmp_path, "")

    def refuse(self, *_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)

    assert f"{path}: cannot be read (Permission denied); check the path and its permissions" == problems(path)[0]


def test_all_problems_are_reported_at_once_each_with_its_path_value_and_remedy():
    lines = problems(
        {
            "modle": {},
            "policy": "lru",
            "model": {"thread": 4, "ctx": 0, "threads": "many", "kv_type": "q8", "flash_attention": 1, "path": 3},
            "cache": {"polcy": "lru", "budget_mb": -1},
            "fetch": {"lanes": 9, "budget_mb": 4},
            "routing": {"plugin": "x"},
            "sink": [{}],
            "prefetch": 3,
            "stream": {"enabled": "yes"},
            "sampling": {"temp": -0.1, "top_p": 0, "min_p": 1.5, "seed": True},
            "plugins": {"enable": "umbra"},
        }
    )

    expected = {
        'modle = {} is not a section of a profile; did you mean "model"?',
        'policy = "lru" is not a section of a profile; it belongs to [cache]',
        'model.thread = 4 is not a key of [model]; did you mean "threads"?',
        "model.ctx = 0 is out of range; give a whole number from 1 to 2147483647",
        'model.threads = "many" is not a whole number; give a whole number from 1 to 4096 or "auto"',
        'model.kv_type = "q8" is not a choice here; did you mean "q8_0"? (bf16, f16, f32, q8_0)',
        "model.flash_attention = 1 is not a choice here; choose one of auto or true, false",
        "model.path = 3 is not text; put it in quotes",
        'cache.polcy = "lru" is not a key of [cache]; did you mean "policy"?',
        'cache.budget_mb = -1 is out of range; give a number from 0 to 1073741824 or "auto"',
        "fetch.lanes = 9 is out of range; give a whole number from 1 to 8",
        "fetch.budget_mb = 4 is not a key of [fetch]; it belongs to [cache]",
        'routing = {plugin = "x"} is not a list; write each as [[routing]]',
        "sink.0.plugin is missing; give the sink",
        "prefetch = 3 is not a table; write [prefetch] and its keys below it",
        'stream.enabled = "yes" is not true or false; write true or false without quotes',
        "sampling.temp = -0.1 is out of range; give a number from 0 to 100",
        "sampling.top_p = 0 is out of range; give a number above 0 and up to 1",
        "sampling.min_p = 1.5 is out of range; give a number from 0 to 1",
        "sampling.seed = true is not a whole number; give a whole number from 0 to 4294967295",
        'plugins.enable = "umbra" is not a list; write it in [ ]',
    }
    assert len(expected) == len(lines)
    for text in expected:
        assert [line for line in lines if line.startswith(f"profile: {text}")], (text, lines)


@pytest.mark.parametrize(
    "data",
    [
        {"sampling": {"temp": math.nan}},
        {"fetch": {"options": {"deep": [1.0, {"x": math.inf}]}}},
        {"cache": {"budget_mb": -math.inf}},
    ],
)
def test_numbers_that_are_not_finite_are_refused_wherever_they_are(data):
    (line,) = problems(data)

    assert "is not finite; give a finite number" in line


def test_what_json_cannot_say_is_refused(tmp_path):
    path = written(tmp_path, "[cache]\noptions = { since = 2024-01-01 }\n")

    assert "cache.options.since = 2024-01-01 is neither text, number, true or false" in problems(path)[0]


def test_a_value_is_refused_once_even_if_two_things_are_wrong_with_it(tmp_path):
    path = written(tmp_path, "[chat]\ntemplate = 2024-01-01\n[sampling]\ntemp = inf\n")

    assert 2 == len(problems(path))


def test_bytes_that_are_no_text_are_refused():
    assert "holds bytes that are no UTF-8 text" in problems({}, model="m\udcff.gguf")[0]
    assert "holds bytes that are no UTF-8 text" in problems({}, overrides=["cache.options.x=\udcff"])[0]


def test_an_explicit_budget_above_the_ceiling_is_refused():
    (line,) = problems({"cache": {"budget_mb": 100, "ceil_mb": 50}})

    assert line == "profile: cache.budget_mb = 100 is above cache.ceil_mb = 50; change one of them"


def test_an_override_is_a_toml_value_and_else_text():
    profile = load_profile(
        "demo",
        overrides=[
            "model.ctx=77",
            "fetch.direct=false",
            "cache.policy=lru",
            'cache.options={k = 3, names = ["a"]}',
            "sampling.temp=0.5",
            "chat.template=a = b # c",
            "dense.options.text=1\nb = 2",
        ],
    )

    assert (77, False, "lru", 0.5) == (
        profile.model.ctx,
        profile.fetch.direct,
        profile.cache.policy,
        profile.sampling.temp,
    )
    assert {"k": 3, "names": ["a"]} == profile.cache.options
    assert profile.chat.template == "a = b # c"
    assert {"text": "1\nb = 2"} == profile.dense.options


def test_lists_are_overridden_by_index_and_grow_by_the_next_one():
    profile = load_profile(
        {"routing": [{"plugin": "a"}]},
        overrides=[
            "routing.0.options.k=6",
            "routing.1.plugin=b",
            "plugins.enable.0=umbra",
            "plugins.enable.1=other",
            "sink.0.plugin=jsonl",
        ],
    )

    assert [("a", {"k": 6}), ("b", {})] == [(r.plugin, r.options) for r in profile.routing]
    assert ("umbra", "other") == profile.plugins.enable
    assert ["jsonl"] == [s.plugin for s in profile.sink]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.ctx", '--set "model.ctx": has no value; write --set a.b.c=VALUE'),
        ("=3", '--set "=3": "" is not a TOML path; write --set a.b.c=VALUE'),
        ("a..b=3", '--set "a..b=3": "a..b" is not a TOML path; write --set a.b.c=VALUE'),
        ("a\nb=3", "is not a TOML path"),
        ("routing.1.plugin=x", "--set: routing.1.plugin: routing has 0 entries; the next index is 0"),
        ("routing.first.plugin=x", "--set: routing.first.plugin: routing is a list; use an index such as routing.0"),
        ("model.ctx.x=3", "--set: model.ctx.x: model.ctx = 7 is not a table; set model.ctx itself"),
        ("sampling.temp=nan", "--set: sampling.temp = nan is not finite; give a finite number"),
        ("chat.template=2024-01-01", "--set: chat.template = 2024-01-01 is neither text"),
        ("model.ctx=0", "--set: model.ctx = 0 is out of range; give a whole number from 1"),
        ("modle.ctx=0", "--set: modle.ctx"),
    ],
)
def test_a_bad_override_is_a_problem_that_names_it(override, expected):
    lines = problems({"model": {"ctx": 7}, "routing": []}, overrides=[override])

    assert any(line.startswith(expected) or expected in line for line in lines) or override.startswith("modle"), lines
    if override.startswith("modle"):
        assert 'modle = {ctx = 0} is not a section of a profile; did you mean "model"?' in lines[0]


def test_bad_overrides_are_reported_together_with_the_problems_of_the_file():
    lines = problems({"model": {"ctx": 0}}, overrides=["junk", "fetch.lanes=0"])

    assert 3 == len(lines)


def test_relative_paths_belong_to_the_profile_that_says_them(tmp_path, monkeypatch):
    folder = tmp_path / "profiles"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    path = written(folder, '[model]\npath = "m.gguf"\n[plugins]\narchs = ["rows.toml"]\n')

    assert str(folder / "m.gguf") == load_profile(path).model.path
    assert (str(folder / "rows.toml"),) == load_profile(path).plugins.archs
    assert load_profile(path, model="m.gguf").model.path == "m.gguf"
    assert load_profile(path, overrides=["model.path=other.gguf"]).model.path == "other.gguf"
    assert load_profile({"model": {"path": "m.gguf"}}).model.path == "m.gguf"


def test_messages_say_whether_a_value_came_from_the_file_or_an_argument(tmp_path):
    profile = load_profile(written(tmp_path, "[model]\nctx = 5\n"), model="m", overrides=["cache.budget_mb=1"])

    assert "--model: model.path" == profile.where("model.path")
    assert "--set: cache.budget_mb" == profile.where("cache.budget_mb")
    assert profile.where("model.ctx") == f"{tmp_path}/mine.toml: model.ctx"


def test_a_home_folder_in_a_path_is_refused_because_only_shells_expand_it():
    assert "starts with ~" in problems({"model": {"path": "~/m.gguf"}})[0]


def test_a_dumped_profile_loads_again_to_the_same_profile():
    profile = load_profile("demo", overrides=["draft.drafter=x", "sampling.seed=7", "sink.0.plugin=jsonl"])

    assert profile.model_dump() == load_profile(profile.model_dump(mode="json")).model_dump()


def test_a_profile_never_changes_after_loading():
    profile = load_profile({})

    with pytest.raises(ValueError, match="frozen"):
        profile.model.ctx = 3


def keys(model=Profile, prefix=""):
    found = []
    for name, info in model.model_fields.items():
        inner = _models(info.annotation)
        if inner:
            found += keys(inner[0], f"{prefix}{name}.")
        else:
            found.append(f"{prefix}{name}")
    return found


def _models(annotation):
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for arg in getattr(annotation, "__args__", ()) for m in _models(arg)]


def test_the_reference_documents_every_key_and_no_other(root):
    text = (root / "docs" / "reference" / "profile.md").read_text(encoding="utf-8")

    assert sorted(keys()) == sorted(re.findall(r"^\| `([a-z_.]+)` \|", text, re.MULTILINE))


def test_the_reference_states_the_true_defaults(root):
    text = (root / "docs" / "reference" / "profile.md").read_text(encoding="utf-8")
    profile = load_profile({}).model_dump(mode="json")
    shown = {None: "none", True: "true", False: "false"}
    for key, default in re.findall(r"^\| `([a-z_.]+)` \| [^|]* \| ([^|]*) \|", text, re.MULTILINE):
        section, name = key.split(".")
        if isinstance(profile[section], dict):
            value = profile[section][name]
            flag = value is None or isinstance(value, bool)
            expected = shown[value] if flag else f'"{value}"' if isinstance(value, str) else f"{value}"
            assert expected.removesuffix(".0") == default.removesuffix(".0"), key


def test_the_plugin_frame_imports_neither_llama_cpp_nor_numpy():
    """Profiles, registry, plans, plugins and cache policies work on a machine without both."""
    code = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("llama_cpp", "numpy", "gguf"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Blocker())
import bmoe, bmoe.contracts, bmoe.profile, bmoe.registry, bmoe.plugins, bmoe.plan, bmoe.bind, bmoe.machine
import bmoe_plugins.caches.lru, bmoe_plugins.caches.none
from bmoe import Provider, hookimpl, load_profile
load_profile("demo")
assert not {"llama_cpp", "numpy"} & set(sys.modules)
print("light")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert ("light", "") == (run.stdout.strip(), run.stderr)
