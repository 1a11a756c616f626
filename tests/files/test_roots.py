"""Shards are read from their copies where those lie on other drives, and the model says the same."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import bmoe
from bmoe.errors import ProfileError
from bmoe.synth import SHAPES, write_model
from bmoe.testing.shards import split_model

PROFILE = {"model": {"threads": 1, "ctx": 64, "ubatch": 16}, "cache": {"budget_mb": 0}}
SMALL = replace(SHAPES["tiny-qwen3moe"], name="small", n_embd=64, n_ff_exp=96, n_vocab=512, quant="Q8_0")


@pytest.fixture(name="shards")
def _shards(tmp_path: Path) -> list[Path]:
    """Four shards in folder "home"; "second" counts as a drive of its own."""
    whole = write_model(tmp_path / "whole.gguf", SMALL)
    (tmp_path / "home").mkdir()
    (tmp_path / "second").mkdir()
    seen: dict[str, int] = {}
    return list(split_model(whole, tmp_path / "home", lambda name: seen.setdefault(name, len(seen)) % 4, 4))


@pytest.fixture(name="_drives", autouse=True)
def _drives(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: object, *arguments: object, **options: object) -> object:
        facts = real(path, *arguments, **options)  # type: ignore[call-overload]
        second = os.path.basename(os.path.dirname(str(path))) == "second"
        return os.stat_result((*facts[:2], facts.st_dev + 1, *facts[3:10])) if second else facts

    monkeypatch.setattr(os, "stat", stat)


def run(shards: list[Path], *overrides: str) -> tuple[str | None, dict[str, object], tuple[str, ...]]:
    with bmoe.open(PROFILE, str(shards[0]), overrides) as engine, engine.conversation() as conversation:
        list(conversation.generate([5, 300, 301, 7], 4, hash_logits=True))
        assert conversation.summary is not None
        return conversation.summary.logits_sha256, dict(engine.record.resolved["fetch"]), engine.record.notices


@pytest.mark.parametrize("fetcher", ["pread", "auto"])
def test_copies_are_read_and_change_nothing(shards: list[Path], fetcher: str, tmp_path: Path) -> None:
    expected, alone, _ = run(shards)
    for shard in shards:
        shutil.copy(shard, tmp_path / "second" / shard.name)
    got, resolved, _ = run(shards, f'fetch.roots=["{tmp_path / "second"}"]', f"fetch.plugin={fetcher}")

    assert expected == got
    assert [str(shard) for shard in shards] == alone["paths"]
    folders = [Path(path).parent.name for path in resolved["paths"]]  # type: ignore[attr-defined]
    assert 2 == folders.count("second")
    assert [shard.name for shard in shards] == [Path(path).name for path in resolved["paths"]]  # type: ignore[attr-defined]


def test_a_wrong_copy_refuses_the_profile_in_one_line(shards: list[Path], tmp_path: Path) -> None:
    shutil.copy(shards[1], tmp_path / "second" / shards[1].name)
    os.truncate(tmp_path / "second" / shards[1].name, 100)

    with pytest.raises(ProfileError) as caught:
        run(shards, f'fetch.roots=["{tmp_path / "second"}", "{tmp_path / "none"}"]')

    first, second = str(caught.value).splitlines()
    assert "fetch.roots.0" in first
    assert f"{shards[1].name} is no copy of" in first
    assert "it has 100 bytes instead of" in first
    assert "fetch.roots.1" in second
    assert "is not a folder" in second


def test_a_folder_with_some_shards_is_used_with_a_notice(shards: list[Path], tmp_path: Path) -> None:
    shutil.copy(shards[2], tmp_path / "second" / shards[2].name)
    expected, _, _ = run(shards)
    got, resolved, notices = run(shards, f'fetch.roots=["{tmp_path / "second"}"]')

    assert expected == got
    assert any("holds 1 of 4 shards" in notice for notice in notices)
    assert 1 == sum(Path(path).parent.name == "second" for path in resolved["paths"])  # type: ignore[attr-defined]
