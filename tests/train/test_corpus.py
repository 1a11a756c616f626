"""The corpus: what is read from the packages' formats, that answers are right, and that nothing held out leaks."""

from __future__ import annotations

import json
import re
import struct
from random import Random

import pytest
from train_reference import arithmetic, chats, corpus, docstrings, plot, scripture, sources, stories, wordnet

VERBS = """\
  1 This software and database is being provided to you
00001740 29 v 02 breathe 0 take_a_breath 0 002 @ 00005041 v 0000 ! 00004227 v 0102 02 + 02 00 + 08 00 | draw air in; \
"I can breathe"; "The patient is respiring"
00004227 29 v 02 exhale 0 breathe_out 0 001 ! 00001740 v 0201 01 + 02 00 | expel air; "Exhale when you lift the weight"
00009999 29 v 01 suspire 4 000 01 + 02 00 | breathe as poets do
"""


@pytest.fixture
def senses(tmp_path):
    (tmp_path / "data.verb").write_text(VERBS)
    for name in ("noun", "adj", "adv"):
        (tmp_path / f"data.{name}").write_text("")
    (tmp_path / "cntlist.rev").write_text("breathe%2:29:00:: 1 5\nexhale%2:29:00:: 1 2\n")
    return wordnet.read_senses(tmp_path)


def test_senses_that_semcor_counts_are_read_with_words_gloss_and_relations(senses):
    assert set(senses) == {"v00001740", "v00004227"}
    sense = senses["v00001740"]
    assert sense.words == ("breathe", "take a breath")
    assert (sense.part, sense.count, sense.definition) == ("verb", 5, "draw air in")
    assert sense.examples == ("I can breathe", "The patient is respiring")
    assert sense.parents == ("v00005041",)
    assert sense.opposites == ((0, "v00004227", 1),)


def test_a_chat_names_the_opposite_that_wordnet_names(senses):
    asked = dict(chats.questions(senses["v00001740"], senses, Random(0)))
    assert asked['What is the opposite of "breathe"?'] == 'The opposite of "breathe" is "breathe out".'
    assert asked['What is another word for "breathe"?'] == 'Another word for "breathe" is "take a breath".'
    assert asked['What does the verb "breathe" mean?'] == 'The verb "breathe" means to draw air in.'


def test_an_entry_has_definition_words_and_examples(senses):
    entry = chats.entry(senses["v00001740"])
    assert entry == (
        "breathe (verb): draw air in. Also: take a breath. For example: I can breathe. For example: The patient is "
        "respiring."
    )


def test_scripture_is_unpacked_window_by_window_and_split_at_chapters(tmp_path):
    windows = [b"Title.\nGe1:1 In the beginning\nGe1:2 And the", b" earth was\nGe2:1 Thus the heavens\n"]
    packed = [_lzw(w) for w in windows]
    head = b"EC02Compressed Data File".ljust(0x54, b"\0") + struct.pack(">II", 65536, len(packed))
    start = len(head) + 4 * len(packed)
    places = struct.pack(">II", start, start + len(packed[0]))
    path = tmp_path / "bible.data"
    path.write_bytes(head + places + b"".join(packed))
    text = scripture.read_text(path)
    assert text == (windows[0] + windows[1]).decode()
    assert list(scripture.passages(text)) == [
        ("Ge 1:1", "In the beginning And the earth was"),
        ("Ge 2:1", "Thus the heavens"),
    ]


def _lzw(data: bytes) -> bytes:
    """Return literal codes of nine bits, as compress writes them: enough for 255 bytes and fewer."""
    bits = "".join(f"{b:09b}"[::-1] for b in data)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def test_long_passages_end_at_the_limit():
    text = "\n".join(f"Ge1:{i} " + "word " * 20 for i in range(1, 30))
    found = list(scripture.passages(text, limit=300))
    assert len(found) > 5
    assert all(len(words) <= 320 for _, words in found)


def test_docstrings_give_sentences_not_code(tmp_path):
    (tmp_path / "m.py").write_text(
        'def f():\n    """Return the number of things that were counted before.\n\n    >>> f()\n    3\n    """\n'
    )
    (tmp_path / "broken.py").write_text("def (\n")
    assert [t for _, t in docstrings.paragraphs(tmp_path)] == ["Return the number of things that were counted before."]


@pytest.mark.parametrize("kind", list(arithmetic.KINDS))
def test_every_step_of_a_solution_is_right_and_ends_in_the_answer(kind):
    for seed in range(200):
        problem = arithmetic.KINDS[kind](Random(seed))
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", problem.solution)
        assert steps
        for a, sign, b, result in steps:
            left, right = int(a), int(b)
            value = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[sign]
            assert value == int(result)
        assert int(steps[-1][3]) == problem.answer >= 0
        assert problem.solution.endswith(f"The answer is {problem.answer}.")


def test_the_same_seed_gives_the_same_texts_and_another_gives_others():
    first = [arithmetic.problem(1, i) for i in range(20)]
    assert first == [arithmetic.problem(1, i) for i in range(20)]
    assert first != [arithmetic.problem(2, i) for i in range(20)]
    assert stories.story(1, 5) == stories.story(1, 5) != stories.story(1, 6)


def test_stories_leave_no_placeholder():
    assert not any("{" in stories.story(1, i) for i in range(300))


def test_chats_of_a_held_out_sense_are_held_out_with_it(tmp_path, monkeypatch):
    found = [corpus.Document("senses", f"v{i}", f"entry {i}") for i in range(400)]
    found += [corpus.Document("chats", f"v{i}", f"chat {i}") for i in range(400)]
    monkeypatch.setattr(corpus, "documents", lambda folder, seed: iter(found))
    train, heldout = corpus.write_corpus(tmp_path, 1)
    keys = [{d.key for d in corpus.read_documents(heldout) if d.source == s} for s in ("senses", "chats")]
    assert keys[0] == keys[1]
    assert 0 < len(keys[0]) < 40
    texts = [json.loads(line)["text"] for path in (train, heldout) for line in path.read_text().splitlines()]
    assert sorted(texts) == sorted(d.text for d in found)


def test_every_package_is_pinned_and_has_its_licence():
    for package in sources.PACKAGES:
        assert re.fullmatch(r"[0-9a-f]{64}", package.sha256)
        assert package.version
        assert package.licence
        assert package.used


def test_a_package_of_another_digest_is_refused(tmp_path):
    package = sources.PACKAGES[0]
    folder = tmp_path / "debs"
    folder.mkdir()
    (folder / f"{package.name}_{package.version.replace(':', '%3a')}_all.deb").write_bytes(b"not it")
    with pytest.raises(sources.SourceError, match="sha256"):
        sources.fetch(tmp_path)


def test_the_usage_picture_has_a_square_per_expert_and_names_the_least_used():
    svg = plot.usage_svg([[1.0, 0.25, 1.75], [1.0, 1.0, 1.0]], ["block 1", "MTP head"])
    assert svg.count("<title>") == 6
    assert "min 0.25" in svg
    assert "MTP head" in svg
    assert svg.startswith("<svg")
