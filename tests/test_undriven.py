"""What the format of profiles knows but this version does not do is refused in one line, never ignored."""

from __future__ import annotations

import pytest

from bmoe.profile import bundled_profiles, load_profile
from bmoe.undriven import undriven


@pytest.mark.parametrize(
    ("override", "path"),
    [
        ("stream.overlap=expert", "stream.overlap"),
        ("chat.template=x", "chat.template"),
        ("chat.think=false", "chat.think"),
        ("serve.host=x", "serve.host"),
        ("serve.port=1", "serve.port"),
        ("serve.api_key_file=x", "serve.api_key_file"),
        ("serve.limits={a = 1}", "serve.limits"),
    ],
)
def test_it_is_refused_in_one_line_with_its_path_and_a_remedy(override, path):
    (line,) = undriven(load_profile({}, overrides=[override]))

    assert f": {path} = " in line
    assert " is not supported by this version; " in line


def test_each_is_refused_on_its_own_line():
    tables = {"chat": {"think": True, "template": "b"}, "serve": {"port": 1}}

    assert 3 == len(undriven(load_profile(tables)))


def test_defaults_and_empty_sections_ask_for_nothing():
    tables = {"trace": {}, "chat": {}, "serve": {"port": 8080}, "routing": []}

    assert [] == undriven(load_profile(tables))


@pytest.mark.parametrize("name", sorted(bundled_profiles()))
def test_no_bundled_profile_asks_for_it(name):
    assert [] == undriven(load_profile(name))
