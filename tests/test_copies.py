"""Copies of shards on other drives are found, checked and used in balance; a wrong one is named with its remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts, ShardFacts
from bmoe.copies import find_copies

SIZES = (50_000, 40_000, 30_000, 20_000)


def model(folder: Path, sizes: tuple[int, ...] = SIZES) -> ModelFacts:
    folder.mkdir(exist_ok=True)
    shards, banks = [], []
    for index, size in enumerate(sizes):
        path = folder / f"m-{index}.gguf"
        path.write_bytes(bytes((index + at) % 251 for at in range(size)))
        shards.append(ShardFacts(str(path), size))
        projection = ProjectionFacts(f"t{index}", "gate", index, 0, size // 4, "q4_0")
        banks.append(BankFacts(index, 0, 4, 2, (projection,)))
    return ModelFacts(shards[0].path, "m", "qwen3moe", tuple(shards), 4, 4, 2, 8, 8, 8, 0, tuple(banks), ())


def copy(facts: ModelFacts, root: Path, *which: int) -> Path:
    root.mkdir(exist_ok=True)
    for index in which or range(len(facts.shards)):
        path = Path(facts.shards[index].path)
        (root / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture(name="drives")
def _drives(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Folders by name that count as drives of their own."""
    numbers: dict[str, int] = {}
    real = os.stat

    def stat(path: object, *arguments: object, **options: object) -> object:
        facts = real(path, *arguments, **options)  # type: ignore[call-overload]
        number = numbers.get(os.path.basename(os.path.dirname(str(path))))
        if number is None:
            return facts
        return os.stat_result((*facts[:2], number, *facts[3:10]))

    monkeypatch.setattr(os, "stat", stat)
    return numbers


def test_two_drives_read_about_the_same_number_of_bytes(tmp_path, drives):
    facts = model(tmp_path / "home")
    drives.update(home=1, second=2)
    found = find_copies(facts, [copy(facts, tmp_path / "second")])

    load: dict[str, int] = {"home": 0, "second": 0}
    for shard, path in zip(facts.shards, found.paths, strict=True):
        assert os.path.basename(shard.path) == os.path.basename(path)
        load[os.path.basename(os.path.dirname(path))] += shard.nbytes
    assert ([], []) == (found.problems, found.notices)
    assert load == {"home": 70_000, "second": 70_000}


def test_a_folder_may_hold_some_of_the_shards(tmp_path, drives):
    facts = model(tmp_path / "home")
    drives.update(home=1, second=2)
    found = find_copies(facts, [copy(facts, tmp_path / "second", 1)])

    assert [] == found.problems
    assert [f"{tmp_path / 'second'} holds 1 of 4 shards"] == found.notices
    assert ["home", "second", "home", "home"] == [Path(path).parent.name for path in found.paths]


def test_the_same_drive_does_not_count_twice(tmp_path, drives):
    facts = model(tmp_path / "home")
    drives.update(home=1, second=1, third=2, fourth=2)
    roots = [copy(facts, tmp_path / name) for name in ("second", "third", "fourth")]
    found = find_copies(facts, roots)

    assert {"home", "third"} == {Path(path).parent.name for path in found.paths}
    assert 8 == len(found.notices)
    assert all("on the same drive as another copy" in notice for notice in found.notices)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: os.truncate(path, 39_999), "it has 39999 bytes instead of 40000"),
        (lambda path: path.write_bytes(b"x" + path.read_bytes()[1:]), "it has other bytes after 0"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), "it has other bytes after"),
    ],
    ids=["size", "header", "tail"],
)
def test_what_is_no_copy_is_named_and_not_read(tmp_path, drives, change, said):
    facts = model(tmp_path / "home")
    drives.update(home=1, second=2)
    root = copy(facts, tmp_path / "second")
    change(root / "m-1.gguf")
    found = find_copies(facts, [root])

    ((index, line),) = found.problems
    assert 0 == index
    assert line.startswith(f"{root / 'm-1.gguf'} is no copy of {facts.shards[1].path}: {said}")
    assert line.endswith("; copy it again, or remove it")
    assert facts.shards[1].path == found.paths[1]


def test_a_folder_that_is_missing_or_empty_is_named(tmp_path):
    facts = model(tmp_path / "home")
    (tmp_path / "empty").mkdir()
    found = find_copies(facts, [tmp_path / "none", tmp_path / "empty"])

    assert [0, 1] == [index for index, _ in found.problems]
    assert "is not a folder; create it, or leave it out" in found.problems[0][1]
    assert "holds no copy of m-0.gguf, m-1.gguf, …; copy shards there" in found.problems[1][1]
    assert tuple(shard.path for shard in facts.shards) == found.paths
