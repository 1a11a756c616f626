"""What a heat file holds comes back as it was, fades, is refused where it is not ours, and is never lost."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bmoe.contracts import BankFacts, ModelFacts, ProjectionFacts, expert_key
from bmoe.heat import HALF_LIFE, Heat, HeatError, add_heat, read_heat

MODEL = ModelFacts(
    path="m.gguf", name="m", arch="made-up", shards=(), n_layer=3, n_expert=4, n_used=2, n_embd=1, n_vocab=1,
    n_ctx_train=1, n_nextn=0, dense=(),
    banks=tuple(
        BankFacts(layer, bank, 4, 2, (ProjectionFacts(f"t{layer}{bank}", "s", 0, 7 * layer, 100 + layer, "F32"),))
        for layer, bank in ((0, 0), (1, 0), (1, 1))
    ),
)  # fmt: skip
KEYS = [expert_key(b.layer, expert, b.bank) for b in MODEL.banks for expert in range(4)]
USES = st.dictionaries(st.sampled_from(KEYS), st.integers(0, 10_000))
RUNS = st.lists(st.tuples(st.integers(1, 20_000), USES), min_size=1, max_size=5)
SAME = settings(
    max_examples=60, derandomize=True, database=None, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@SAME
@given(RUNS)
def test_runs_add_up_and_older_ones_fade(tmp_path, runs):
    path = str(tmp_path / "h.json")
    if os.path.exists(path):
        os.unlink(path)
    for tokens, uses in runs:
        add_heat(path, MODEL, tokens, uses)
    found = read_heat(path, MODEL)

    later = 0
    total, counts = 0.0, dict.fromkeys(KEYS, 0.0)
    for tokens, uses in reversed(runs):
        total += tokens * 0.5 ** (later / HALF_LIFE)
        for key, count in uses.items():
            counts[key] += count * 0.5 ** (later / HALF_LIFE)
        later += tokens
    assert found.tokens == pytest.approx(total, abs=0.01)
    assert dict(found.counts) == pytest.approx(counts, abs=0.01)
    assert os.listdir(tmp_path) == ["h.json"]


def test_chances_are_shares_of_the_tokens_the_most_first():
    heat = Heat(10.0, {1: 5.0, 2: 20.0, 3: 0.0, 4: 1.0})

    assert [(2, 1.0), (1, 0.5), (4, 0.1)] == list(heat.chances().items())
    assert {} == Heat().chances()


@pytest.fixture(name="written")
def _written(tmp_path):
    path = tmp_path / "h.json"
    add_heat(str(path), MODEL, 10, dict.fromkeys(KEYS, 3))
    return path


def change(**values):
    return lambda table: {**table, **values}


def row(**values):
    return lambda table: {**table, "banks": [{**table["banks"][0], **values}, *table["banks"][1:]]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (change(format="other"), "is no heat file; give another"),
        (lambda table: [table], "is no heat file; give another"),
        (change(schema=2), "has schema 2, and this version of bmoe knows 1; give another file"),
        (change(schema=True), "has schema True, and this version of bmoe knows 1"),
        (change(fingerprint="0" * 64, model="n"), "is of another model (n), not of m.gguf; give another file"),
        (change(fingerprint=None), "is of another model (m, in another form), not of m.gguf; give another file"),
        (change(banks=[]), "is damaged (banks); remove it, or give another file"),
        (change(banks=None), "is damaged (banks)"),
        (change(tokens=-1), "is damaged (tokens)"),
        (change(tokens=None), "is damaged (tokens)"),
        (change(tokens=10**400), "is damaged (tokens)"),
        (row(counts=[1, 2, 3]), "is damaged (banks[0].counts)"),
        (row(counts=[1, 2, 3, "4"]), "is damaged (banks[0].counts)"),
        (row(counts=[1, 2, 3, True]), "is damaged (banks[0].counts)"),
        (row(counts=[1, 2, 3, -0.5]), "is damaged (banks[0].counts)"),
        (row(entry_bytes=99), "is damaged (banks[0])"),
        (row(layer=2), "is damaged (banks[0])"),
    ],
)
def test_what_is_not_ours_is_one_line_and_stays(written, change, said):
    written.write_text(json.dumps(change(json.loads(written.read_text()))))
    before = written.read_bytes()
    for use in (lambda: read_heat(str(written), MODEL), lambda: add_heat(str(written), MODEL, 5, {})):
        with pytest.raises(HeatError) as raised:
            use()
        assert str(raised.value).startswith(f"{written}: {said}")
        assert "\n" not in str(raised.value)
    assert before == written.read_bytes()
    assert ["h.json"] == os.listdir(written.parent)


def test_a_model_in_another_form_is_another_model(written):
    for other in (
        replace(MODEL, name="n"),
        replace(MODEL, banks=MODEL.banks[:2]),
        replace(MODEL, banks=(replace(MODEL.banks[0], n_used=1), *MODEL.banks[1:])),
        replace(MODEL, chat_template="x"),
    ):
        with pytest.raises(HeatError, match="is of another model"):
            read_heat(str(written), other)
    moved = replace(MODEL, path="elsewhere/n.gguf")
    assert read_heat(str(written), moved) == read_heat(str(written), MODEL)


@SAME
@given(st.data())
def test_whatever_is_in_it_is_read_or_refused(written, data):
    """Cut anywhere, with bytes changed, or any JSON at all: no other exception, and the file is as it was."""
    text = written.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "bytes", "json", "nested"]))
    if kind == "cut":
        text = text[: data.draw(st.integers(0, len(text) - 1))]
    elif kind == "bytes":
        changed = bytearray(text)
        for _ in range(data.draw(st.integers(1, 8))):
            changed[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
        text = bytes(changed)
    elif kind == "json":
        anything = st.recursive(
            st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        )
        key = data.draw(st.sampled_from([*json.loads(text), "more"]))
        text = json.dumps({**json.loads(text), key: data.draw(anything)}).encode()
    else:
        text = b"[" * 100_000
    path = written.with_name("other.json")
    path.write_bytes(text)
    said, heat = f"{path}: ", Heat()
    try:
        heat = read_heat(str(path), MODEL)
    except HeatError as error:
        said = str(error)
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    assert heat.tokens >= 0
    assert all(count >= 0 for count in heat.counts.values())
    assert text == path.read_bytes()


def test_runs_that_end_at_once_all_count(tmp_path):
    path = str(tmp_path / "h.json")
    threads = [threading.Thread(target=add_heat, args=(path, MODEL, 1, {KEYS[0]: 1})) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    found = read_heat(path, MODEL)
    assert (found.tokens, found.counts[KEYS[0]]) == pytest.approx((24, 24), rel=0.01)
    assert ["h.json"] == os.listdir(tmp_path)


def test_a_link_stays_a_link_to_the_file(tmp_path, written):
    link = tmp_path / "link.json"
    link.symlink_to(written)
    add_heat(str(link), MODEL, 10, {})

    assert link.is_symlink()
    assert read_heat(str(written), MODEL).tokens > 15


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(HeatError, match="cannot be written"):
        add_heat(str(tmp_path / "none" / "h.json"), MODEL, 1, {})
