"""A head for next-token prediction: computed as its formula says, refused where llama.cpp would end the process."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import bmoe
from bmoe.contracts import ModelFacts
from bmoe.errors import NativeError
from bmoe.layout import read_model
from bmoe.native import carve, memory, mtp
from bmoe.native.model import ContextOptions
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs

from .glm4moe import Formula, chain, rewrite

EXACT = ContextOptions(ctx=256, ubatch=16, kv_type="f32", flash_attention=False)
TEXT = [(i * i * 31 + 7 * i + 5) % 512 for i in range(40)]
NEAR = 1e-3


def facts_of(path: Path) -> ModelFacts:
    return read_model(path, {row.name: row for row in bmoe_archs()})


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="path", scope="module")
def _path(models: TinyModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In float32 and with norms that differ, so that none can stand in for another."""
    path = tmp_path_factory.mktemp("mtp") / "tiny.gguf"
    shutil.copy(models.path("tiny-glm4moe", "F32"), path)
    draw = np.random.default_rng(3)

    def change(name: str, data: np.ndarray) -> None:
        if "norm.weight" in name:
            data[:] = 1 + 0.2 * draw.standard_normal(data.shape)

    return rewrite(path, change)


@pytest.fixture(name="formula", scope="module")
def _formula(path: Path) -> Formula:
    return Formula(path)


@pytest.fixture(name="head", scope="module")
def _opened(path: Path) -> Iterator[mtp.Head]:
    with mtp.Head(facts_of(path), EXACT) as head:
        yield head


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "head" in request.fixturenames:
        request.getfixturevalue("head").clear()


# ---- numbers


def test_logits_of_trunk_and_head_are_those_of_the_formula(head: mtp.Head, formula: Formula) -> None:
    """Over more than two ubatches, so that the state before a ubatch's first token comes from the one before."""
    hidden, expected = formula.trunk(TEXT)
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden[:-1]])
    _, guesses = formula.head(TEXT, before)

    trunk, guessed = head.feed(TEXT)

    assert len(TEXT) > 2 * EXACT.ubatch
    assert np.abs(trunk - expected).max() < NEAR < expected.std()
    assert np.abs(guessed - guesses).max() < NEAR < guesses.std()
    assert np.abs(head.hidden - hidden[-1]).max() < NEAR
    assert np.abs(guesses - expected).max() > 100 * NEAR  # else one could be taken for the other


@pytest.mark.parametrize("length", [1, 16, 17, 33])
def test_chained_drafts_are_those_of_the_formula(head: mtp.Head, formula: Formula, length: int) -> None:
    """A draft feeds the head its own hidden state in place of the trunk's."""
    hidden, _ = formula.trunk(TEXT[:length])
    head.feed(TEXT[:length])

    drafts, logits = head.draft(TEXT[length], 3)

    tokens = TEXT[: length + 1]
    before = np.concatenate([np.zeros_like(hidden[:1]), hidden])
    for step in range(3):
        states, rows = formula.head(tokens, before)
        assert np.abs(logits[step] - rows[-1]).max() < NEAR
        assert drafts[step] == rows[-1].argmax()
        tokens, before = [*tokens, drafts[step]], np.concatenate([before, states[-1:]])


def test_a_draft_and_a_verification_leave_nothing_behind(head: mtp.Head) -> None:
    head.feed(TEXT[:20])
    first, logits = head.draft(TEXT[20], 3)
    verified = head.verify([TEXT[20], *first])
    again, same = head.draft(TEXT[20], 3)
    trunk, guessed = head.feed(TEXT[20:24])

    assert (first, len(head)) == (again, 24)
    assert np.array_equal(logits, same)
    assert np.abs(verified[0] - trunk[0]).max() < NEAR
    assert np.abs(guessed[0] - logits[0]).max() < NEAR


def test_verification_is_the_trunk_on_what_it_is_given(head: mtp.Head, formula: Formula) -> None:
    head.feed(TEXT[:9])

    assert np.abs(head.verify(TEXT[9:13]) - formula.trunk(TEXT[:13])[1][9:]).max() < NEAR


def test_a_cleared_head_begins_anew(head: mtp.Head) -> None:
    once = head.feed(TEXT[:5])
    head.clear()
    assert (len(head), head.hidden.any()) == (0, False)
    twice = head.feed(TEXT[:5])

    assert all(np.array_equal(a, b) for a, b in zip(once, twice, strict=True))


# ---- refused before llama.cpp can end the process


def refusal(facts: ModelFacts) -> str:
    with pytest.raises(NativeError) as caught:
        mtp.Head(facts, EXACT)
    return str(caught.value)


def test_a_model_without_a_head_is_refused(path: Path) -> None:
    said = refusal(replace(facts_of(path), n_nextn=0, nextn_banks=()))

    assert f"{path}: the model has no layer for next-token prediction (glm4moe.nextn_predict_layers)" in said


def test_two_heads_are_refused(path: Path) -> None:
    assert "has 2 layers for next-token prediction" in refusal(replace(facts_of(path), n_nextn=2))


def test_an_architecture_whose_head_was_never_checked_is_refused(models: TinyModels) -> None:
    assert "no head of architecture 'qwen3moe' can be driven yet (only of glm4moe)" in refusal(facts_of(models.path()))


@pytest.mark.parametrize("part", ["nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "ffn_gate_inp"])
def test_a_head_without_one_of_its_tensors_is_refused(path: Path, tmp_path: Path, part: str) -> None:
    """Files that declare the head but were converted without it exist."""
    other = tmp_path / "other.gguf"
    name = f"blk.4.{part}.weight".encode()
    other.write_bytes(path.read_bytes().replace(name, name.replace(b"blk.4", b"was.4")))

    assert f"{other}: the head for next-token prediction lacks {name.decode()}" in refusal(facts_of(other))


def test_a_head_without_experts_is_refused(path: Path, tmp_path: Path) -> None:
    data = path.read_bytes()
    for part in (b"gate", b"up", b"down"):
        data = data.replace(b"blk.4.ffn_" + part + b"_exps", b"was.4.ffn_" + part + b"_exps")
    other = tmp_path / "other.gguf"
    other.write_bytes(data)

    assert "lacks blk.4.ffn_gate_exps.weight" in refusal(facts_of(other))


def test_hidden_states_of_another_shape_are_refused(head: mtp.Head) -> None:
    """The batch has only an address; llama.cpp would read past its end."""
    with pytest.raises(NativeError, match=r"hidden states of the shape \(1, 127\), not \(1, 128\)"):
        head._decode(head._head, [1], 0, np.zeros((1, 127), np.float32))


@pytest.mark.parametrize("tokens", [17, 200])
def test_more_drafts_than_a_ubatch_are_refused(head: mtp.Head, tokens: int) -> None:
    with pytest.raises(NativeError, match=f"{tokens} tokens cannot be verified in a ubatch of 16"):
        head.verify([1] * tokens)


def test_a_full_context_is_an_error_and_drafting_goes_on(head: mtp.Head) -> None:
    head.feed([1] * 255)
    with pytest.raises(NativeError, match=r"no room in the KV cache; raise ctx \(position 256\)"):
        head.draft(1, 3)
    with pytest.raises(NativeError, match="no room in the KV cache"):
        head.feed([1, 1])
    assert len(head.draft(1, 1)[0]) == 1
    head.feed([1])
    assert len(head) == 256


def test_a_token_outside_the_vocabulary_is_an_error(head: mtp.Head) -> None:
    with pytest.raises(NativeError, match="llama_decode returned -1"):
        head.feed([512])
    for token in (512, -1):
        with pytest.raises(NativeError, match=r"a token id outside 0\.\.511"):
            head.draft(token, 1)


def test_a_closed_head_says_so(path: Path) -> None:
    head = mtp.Head(facts_of(path), EXACT)
    head.close()
    head.close()

    with pytest.raises(NativeError, match="this head is closed"):
        head.feed([1])


def test_a_missing_module_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mtp.extension.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp_ext", None)

    assert "llama_cpp.llama_cpp_ext cannot be loaded" in refusal(facts_of(path))


@pytest.mark.parametrize("symbol", ["llama_set_embeddings_nextn", "llama_get_embeddings_nextn"])
def test_a_missing_symbol_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, symbol: str) -> None:
    mtp.extension.cache_clear()
    real = mtp.extension()
    mtp.extension.cache_clear()
    kept = {name: getattr(real, name) for name in vars(real) if name != symbol}
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp_ext", types.SimpleNamespace(**kept))

    assert f"has no {symbol}; install a tested llama-cpp-python" in refusal(facts_of(path))


def test_one_file_uses_symbols_that_are_not_public(root: Path) -> None:
    files = [path for folder in ("core", "plugins") for path in (root / folder).rglob("*.py")]

    assert [p.relative_to(root).as_posix() for p in files if "llama_cpp_ext" in p.read_text("utf-8")] == [
        "core/native/mtp.py"
    ]


# ---- a head that is not loaded


@pytest.mark.parametrize("late", [False, True])
def test_streaming_leaves_no_mapping_of_a_head_behind(
    models: TinyModels, tmp_path: Path, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp unmaps what it does not load; what bmoe maps there afterwards would stay, over anybody's memory."""
    path = tmp_path / "own.gguf"
    shutil.copy(models.path("tiny-glm4moe"), path)
    (ranges,) = carve.expert_ranges(facts_of(path))
    if late:
        monkeypatch.setattr(carve.Carver, "_watch", lambda carver: None)
    for _ in range(5):
        with bmoe.open({"model": {"threads": 1, "ctx": 64, "ubatch": 16}}, str(path)) as engine:
            assert engine.model.report.forbidden_bytes == sum(last - first for first, last in ranges)
            assert max(p.offset for bank in engine.facts.nextn_banks for p in bank.projections) < ranges[-1][1]
            (base,) = memory.file_mappings(path.stat().st_ino, str(path))
            assert len(list(engine.conversation().generate([5, 6, 7], 3))) == 3
        assert memory.file_mappings(path.stat().st_ino, str(path)) == set()
    assert base


# ---- acceptance


@pytest.fixture(name="script", scope="module")
def _script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts/measure_mtp.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(name="accepted")
def _accepted(
    script: ModuleType, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """The command on a model whose next token is known."""

    def run(text: str, head_sees: str, *more: str) -> dict[str, Any]:
        path = tmp_path / "chain.gguf"
        shutil.copy(models.path("tiny-glm4moe", "F32"), path)
        chain(path, head_sees=head_sees)
        (tmp_path / "text.txt").write_text(text)
        assert script.main([str(path), str(tmp_path / "text.txt"), "--threads", "1", "--json", *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return run


def test_a_head_that_knows_the_next_token_is_always_accepted(accepted: Callable[..., dict[str, Any]]) -> None:
    """Positions, hidden states and verification belong together, from one window to the next."""
    found = accepted("pack my box with five dozen jugs", "token", "--positions", "4", "--ctx", "32")

    assert found["contexts"] == 30  # each of the two windows begins with a token that has none before it
    assert [(row["n"], row["acceptance"], row["reach"]) for row in found["positions"]] == [(30, 1.0, 1.0)] * 4
    assert found["tokens_per_cycle"] == 5


def test_a_head_that_knows_the_state_before_is_right_where_the_text_repeats(
    accepted: Callable[..., dict[str, Any]],
) -> None:
    """It guesses what follows the token before: right at position 1 if that is the same token, wrong further on."""
    text = "aabcccdeeeeff"
    repeats = sum(a == b for a, b in pairwise(text))

    found = accepted(text, "state")

    assert (found["contexts"], repeats) == (12, 7)
    assert [(row["n"], row["accepted"]) for row in found["positions"]] == [(12, 7), (7, 0), (0, 0)]
    assert [row["acceptance"] for row in found["positions"]] == [7 / 12, 0.0, None]


def test_no_more_contexts_are_measured_than_were_asked_for(accepted: Callable[..., dict[str, Any]]) -> None:
    assert accepted("pack my box", "token", "--limit", "4")["contexts"] == 4


def test_the_command_refuses_in_one_line(
    script: ModuleType, models: TinyModels, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("text")
    assert script.main([str(models.path()), str(tmp_path / "text.txt")]) == 1

    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "no head of architecture 'qwen3moe'" in said
    assert said.count("\n") == 1
