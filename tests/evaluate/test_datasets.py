"""Data sets: what each format takes, and one line for everything that it does not."""

from __future__ import annotations

import hashlib
from decimal import Decimal
from pathlib import Path

import pytest

from bmoe.evaluate.datasets import Choice, DatasetError, Problem, Text, read_dataset

CHOICE = {"question": "q", "choices": ["a", "b", "c"], "answer": 1}


def refusal(path, *arguments) -> str:
    with pytest.raises(DatasetError) as caught:
        read_dataset(path, *arguments)
    assert "\n" not in str(caught.value)
    assert 2 == caught.value.exit_code
    return str(caught.value).removeprefix(f"{path}: ")


def test_the_keys_of_the_first_line_tell_the_format(write):
    texts = read_dataset(write({"text": "one"}, {"text": "two", "id": "x"}))
    choices = read_dataset(write({**CHOICE, "id": 7}))
    problems = read_dataset(write({"question": "q", "answer": "so\n#### 1,200"}))

    assert ("text", (Text(1, "1", "one"), Text(2, "x", "two"))) == (texts.format, texts.items)
    assert ("choice", (Choice(1, "7", "q", ("a", "b", "c"), 1),)) == (choices.format, choices.items)
    assert ("gsm8k", (Problem(1, "1", "q", Decimal(1200)),)) == (problems.format, problems.items)


@pytest.mark.parametrize(("answer", "index"), [(0, 0), (2, 2), ("A", 0), ("c", 2)])
def test_an_answer_is_an_index_or_a_letter(write, answer, index):
    assert index == read_dataset(write({**CHOICE, "answer": answer})).items[0].answer


@pytest.mark.parametrize("answer", [3, -1, True, 1.0, None, "D", "1", "b c", ["A"]])
def test_any_other_answer_is_refused(write, answer):
    said = refusal(write({**CHOICE, "answer": answer}))

    assert said.startswith('line 1: "answer" is ')
    assert said.endswith("; it has to be an index 0 to 2 or a letter A to C")


@pytest.mark.parametrize(("answer", "value"), [(18, "18"), (7.5, "7.5"), ("18", "18"), ("$1,000", "1000"), (-3, "-3")])
def test_a_problem_may_have_just_a_number(write, answer, value):
    assert Decimal(value) == read_dataset(write({"question": "q", "answer": answer})).items[0].answer


@pytest.mark.parametrize("answer", ["about 18", "#### none", "none", True, None, [1], float("inf")])
def test_a_problem_without_a_number_is_refused(write, answer):
    said = refusal(write({"question": "q", "answer": 1}, {"question": "q", "answer": answer}))

    assert said.startswith('line 2: "answer" is ')
    assert said.endswith("; it has to end in #### and a number, or be a number")


def test_blank_lines_are_no_items_but_count_as_lines(write):
    found = read_dataset(write("", {"text": "one"}, "  ", {"text": "two"}))

    assert [2, 4] == [item.line for item in found.items]


def test_a_limit_ends_the_reading(write):
    found = read_dataset(write({"text": "one"}, {"text": "two"}, "no JSON"), None, 2)

    assert 2 == len(found.items)


def test_the_hash_is_that_of_the_whole_file(write):
    path = write({"text": "one"}, {"text": "two"})

    assert hashlib.sha256(Path(path).read_bytes()).hexdigest() == read_dataset(path, None, 1).sha256


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    (tmp_path / "marked").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n')

    assert (Text(1, "1", "one"),) == read_dataset(tmp_path / "marked").items


class TestRefusals:
    def test_no_file(self, tmp_path):
        assert "no such file; check the path" == refusal(tmp_path / "none.jsonl")

    def test_a_directory(self, tmp_path):
        assert refusal(tmp_path).startswith("is a directory")

    @pytest.mark.parametrize("lines", [(), ("", "  ")], ids=["empty", "blank"])
    @pytest.mark.parametrize("format_", [None, "text"])
    def test_nothing_in_it(self, write, lines, format_):
        assert refusal(write(*lines), format_).startswith("holds no item; give at least one line of JSON (text: text;")

    def test_no_json(self, write):
        said = refusal(write({"text": "one"}, '{"text": "tw'))

        assert said.startswith("line 2: is not JSON (Unterminated string starting at at column 10)")

    @pytest.mark.parametrize(("line", "kind"), [("[1, 2]", "a list of 2"), ("3", "a number"), ("null", "null")])
    def test_no_object(self, write, line, kind):
        assert f"line 1: is not a JSON object but {kind}; every line is one JSON object" == refusal(write(line))

    def test_no_utf_8(self, tmp_path):
        (tmp_path / "latin").write_bytes(b'{"text": "one"}\n{"text": "caf\xe9"}\n')

        assert refusal(tmp_path / "latin").startswith("line 2: is not UTF-8 (byte 0xe9)")

    def test_half_a_surrogate_pair(self, write):
        assert 'line 1: "text" has half of a surrogate pair, which is no text' == refusal(write('{"text": "\\ud83d"}'))

    def test_a_missing_key_is_named(self, write):
        said = refusal(write(CHOICE, {"question": "q", "choices": ["a", "b"], "anwser": 0}))

        assert (
            'line 2: has no "answer" but the keys question, choices, anwser; choice needs question, choices, answer; '
            'did you mean the key "anwser"?'
        ) == said

    def test_another_format_is_suggested(self, write):
        said = refusal(write({"question": "q", "answer": "#### 1"}), "choice")

        assert said.endswith("choice needs question, choices, answer; did you mean --format gsm8k?")

    def test_keys_of_no_format_are_listed(self, write):
        said = refusal(write({"prompt": "p"}))

        assert said.startswith("line 1: has the keys prompt, which fits no format (text: text; choice: question,")

    @pytest.mark.parametrize(("text", "kind"), [("", "empty text"), (" \n", "empty text"), (3, "a number")])
    def test_text_that_is_none(self, write, text, kind):
        assert f'line 1: "text" is {kind}; it has to be text that is not empty' == refusal(write({"text": text}))

    @pytest.mark.parametrize("choices", ["ab", ["a"], ["a", ""], ["a", 2], {}])
    def test_choices_that_are_none(self, write, choices):
        assert refusal(write({**CHOICE, "choices": choices})).startswith('line 1: "choices" is ')
