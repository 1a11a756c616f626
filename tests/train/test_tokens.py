"""Vocabulary listing, the stream of windows and the baselines that the model must beat."""

from __future__ import annotations

import json

import jinja2
import numpy as np
import pytest
from train_reference import baselines, chats, tokens


@pytest.fixture
def stream_file(tmp_path):
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 40, 200)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    path = tmp_path / "train.npz"
    np.savez(
        path, tokens=rng.integers(0, 500, starts[-1]).astype(np.uint16), starts=starts, sources=np.array(["a"] * 200)
    )
    return path


def test_a_window_depends_on_its_number_alone(stream_file):
    first, second = tokens.Stream(stream_file, 16, 3), tokens.Stream(stream_file, 16, 3)
    numbers = [first.per_epoch + 2, 0, 5, 2 * first.per_epoch + 1]
    expected = {n: first.window(n).copy() for n in numbers}
    for n in reversed(numbers):
        assert (second.window(n) == expected[n]).all()


def test_an_epoch_shows_every_token_once_in_its_own_order(stream_file):
    stream = tokens.Stream(stream_file, 16, 3)
    epochs = [[stream.window(e * stream.per_epoch + i)[:-1].copy() for i in range(stream.per_epoch)] for e in (0, 1)]
    n = 16 * stream.per_epoch
    counts = [np.bincount(np.concatenate(e), minlength=500) for e in epochs]
    whole = np.bincount(stream.tokens, minlength=500)
    assert all((whole - c >= 0).all() and c.sum() == n for c in counts)
    assert not (np.concatenate(epochs[0]) == np.concatenate(epochs[1])).all()


def test_batches_overlap_by_the_token_that_is_predicted(stream_file):
    batch = tokens.Stream(stream_file, 16, 3).batch(0, 4)
    assert batch.shape == (4, 17)
    assert (batch[:-1, -1] == batch[1:, 0]).all()


def test_the_listing_has_tokens_by_id_and_merges_by_rank(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"b": 1, "a": 0, "ab": 2}, "merges": [["a", "b"], "ab a"]}}))
    assert tokens.listing(path) == (["a", "b", "ab"], ["a b", "ab a"])


def test_the_template_renders_what_the_chats_were_trained_as():
    turns = [("Who?", "He."), ("When?", "Now.")]
    messages = [{"role": "system", "content": "Be brief."}]
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    template = jinja2.Template(tokens.TEMPLATE, keep_trailing_newline=True)
    assert template.render(messages=messages) == chats.render(turns, "Be brief.")
    opened = template.render(messages=messages[:2], add_generation_prompt=True)
    assert chats.render(turns, "Be brief.").startswith(opened)


def test_the_trigram_is_a_distribution_in_every_context():
    rng = np.random.default_rng(1)
    trigram = baselines.Trigram(rng.integers(0, 30, 2000).astype(np.uint16), 40)
    for before, last in ((3, 7), (35, 7), (35, 36)):  # seen, half seen and never seen
        p = trigram.probability(np.full(40, before), np.full(40, last), np.arange(40))
        assert (p > 0).all()
        assert p.sum() == pytest.approx(1)


def test_the_trigram_learns_a_cycle_that_the_unigram_cannot():
    cycle = np.tile(np.arange(8), 200).astype(np.uint16)
    assert baselines.unigram(cycle, cycle[:80], 8) == pytest.approx(8, rel=0.01)
    assert baselines.Trigram(cycle, 8).perplexity([cycle[:80]]) < 1.5
    assert baselines.uniform(8) == 8


def test_the_vocabulary_keeps_specials_whole_and_any_bytes(tmp_path):
    pytest.importorskip("tokenizers", reason="needs the optional group `train`")
    tokenizer = tokens.train_vocabulary(["the cat sat on the mat, 12 times"] * 50, tmp_path / "t.json", 300)
    text = "<|user|>\nthe caté\t12<|end|>\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids[0] == tokens.SPECIALS.index("<|user|>")
    assert tokens.SPECIALS.index("<|end|>") in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    listed, merges = tokens.listing(tmp_path / "t.json")
    assert listed[: len(tokens.SPECIALS)] == list(tokens.SPECIALS)
    assert len(listed) == len(tokens.SPECIALS) + 256 + len(merges)
