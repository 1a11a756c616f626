"""Nothing that a person or a program can pass as a profile makes the loader fail with anything but a ProfileError."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bmoe.errors import BmoeError, ProfileError
from bmoe.profile import Profile, load_profile
from bmoe.resolve import check

SECTIONS = st.sampled_from([*Profile.model_fields, "modle", "", "a b"])
# Lone surrogates included, as a command line with odd bytes has them.
ANYTHING = st.text(st.characters(), max_size=8)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), ANYTHING, st.binary(), st.dates(), st.just("auto")
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=6), st.integers()), inner, max_size=3),
    ),
    max_leaves=12,
)
SETTINGS = """path threads ctx kv_type enabled policy budget_mb ceil_mb lanes roots options plugin placement drafter
budget temp top_p seed enable archs limits template"""
KEYS = st.sampled_from([key for line in SETTINGS.splitlines() for key in line.split(" ")])
TABLES = st.dictionaries(KEYS, VALUES, max_size=4)


def accepted_or_refused(*arguments, **named):
    """Whatever goes in, a profile or a ProfileError with printable lines comes out."""
    lines = ["accepted"]
    try:
        load_profile(*arguments, **named)
    except ProfileError as refused:
        lines = refused.problems
    assert lines
    assert [] == [line for line in lines if not line.isprintable()]


@given(st.dictionaries(SECTIONS, st.one_of(TABLES, st.lists(TABLES, max_size=2), VALUES), max_size=5))
def test_no_table_crashes_the_loader(data):
    accepted_or_refused(data)


@given(st.dictionaries(SECTIONS, st.one_of(TABLES, st.lists(TABLES, max_size=2), VALUES), max_size=5))
def test_what_is_left_of_any_table_can_be_checked_further(data):
    """Whatever was taken away, the check goes on, and still says all that the loader said."""
    said = set()
    try:
        load_profile(data)
    except ProfileError as refused:
        said = set(refused.problems)
    lines = []
    try:
        check(data)
    except BmoeError as refused:
        lines = str(refused).splitlines()

    assert said <= set(lines)
    assert len(lines) == len(set(lines))


@given(st.one_of(st.binary(max_size=200), st.text(alphabet="[]{}=.,\"'#\n abe10-_:", max_size=60).map(str.encode)))
def test_no_bytes_crash_the_loader(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("garbage") / "p.toml"
    path.write_bytes(raw)
    accepted_or_refused(path)


@given(
    st.lists(
        st.one_of(
            st.text(max_size=30),
            ANYTHING,
            st.builds("{}={}".format, st.text(alphabet="a.0\"' \nmodel", max_size=20), st.text(max_size=20)),
            st.builds(
                "{}.{}={}".format,
                SECTIONS,
                st.one_of(KEYS, st.sampled_from(["0", "0.plugin", "1", "9" * 30])),
                st.text(),
            ),
        ),
        max_size=4,
    )
)
def test_no_override_crashes_the_loader(overrides):
    accepted_or_refused("demo", overrides=overrides)


@given(st.one_of(st.text(max_size=40), ANYTHING))
def test_no_profile_name_or_model_path_crashes_the_loader(text):
    accepted_or_refused({}, model=text)
    accepted_or_refused("demo", model=text)
    accepted_or_refused(f"no-such-folder/{text}")
