"""Sides are made from profiles and varied values, and wrong ones are refused together, before anything is measured."""

from __future__ import annotations

import pytest

from bmoe.bench.sides import make_sides, parse_vary, refuse_wrong
from bmoe.errors import ProfileError


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("cache.budget_mb=500,1000", "cache.budget_mb", ("500", "1000")),
        ("cache.budget_mb=auto", "cache.budget_mb", ("auto",)),
        ("a.b = 1 , 2 ", "a.b", ("1", "2")),
        ('fetch.roots=["/a,b", "/c"],[]', "fetch.roots", ('["/a,b", "/c"]', "[]")),
        ("a.b={x = 1, y = 2},{}", "a.b", ("{x = 1, y = 2}", "{}")),
        ('a.b="x=1,2",3', "a.b", ('"x=1,2"', "3")),
    ],
)
def test_commas_part_values_but_not_inside_of_them(text, key, values):
    found = parse_vary(text)

    assert (key, values) == (found.key, found.values)


@pytest.mark.parametrize("text", ["cache.budget_mb", "cache.budget_mb=", "=1,2", "a.b=1,,2", "a.b=1,", ""])
def test_what_is_no_list_of_values_is_refused(text):
    with pytest.raises(ProfileError, match="is not KEY=VALUE,VALUE; write --vary"):
        parse_vary(text)


def test_a_value_given_twice_is_refused():
    with pytest.raises(ProfileError, match="--vary a.b=1,2,1: has a value twice"):
        parse_vary("a.b=1,2,1")


def test_profiles_and_all_combinations_of_values_are_sides():
    vary = [parse_vary("a.b=1,2"), parse_vary("c.d=x,y")]
    sides = make_sides(["p", "q"], model="m", overrides=["e.f=0"], vary=vary)

    assert 8 == len(sides)
    assert "p a.b=1 c.d=x" == sides[0].label
    assert ("e.f=0", "a.b=1", "c.d=x") == sides[0].overrides
    assert ("q", "m", ("a.b=2", "c.d=y")) == (sides[-1].profile, sides[-1].model, sides[-1].varied)


def test_labels_say_what_differs_and_never_repeat():
    assert ["demo", "demo (2)"] == [side.label for side in make_sides(["demo", "demo"])]
    assert ["a.b=1", "a.b=2"] == [side.label for side in make_sides(["demo"], vary=[parse_vary("a.b=1,2")])]


def test_more_sides_than_letters_are_refused():
    with pytest.raises(ProfileError, match="27 sides are more than can be compared; give at most 26"):
        make_sides(["demo"], vary=[parse_vary("a.b=" + ",".join(map(str, range(27))))])


def test_the_problems_of_all_sides_are_said_together():
    sides = make_sides(["demo"], vary=[parse_vary("cache.budget_mb=6,-1,x")])
    with pytest.raises(ProfileError) as refused:
        refuse_wrong(sides)

    assert ["side cache.budget_mb=-1", "side cache.budget_mb=x"] == [p.split(": ")[0] for p in refused.value.problems]


def test_a_problem_that_all_share_is_said_once():
    with pytest.raises(ProfileError) as refused:
        refuse_wrong(make_sides(["demo", "demo"], overrides=["cache.budget_mb=-1"]))

    assert 1 == len(refused.value.problems)


def test_a_profile_without_a_model_is_refused():
    with pytest.raises(ProfileError, match=r"model\.path is missing; give the model with --model"):
        refuse_wrong(make_sides(["desktop-over-ram"]))


def test_a_model_that_is_missing_is_the_sides_own_failure(tmp_path):
    refuse_wrong(make_sides(["demo"], model=str(tmp_path / "gone.gguf")))
