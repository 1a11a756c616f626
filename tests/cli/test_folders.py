"""The command line keeps what it may lose in the user's cache folder, or nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from bmoe.cli.folders import fetch_memory


@pytest.mark.parametrize(
    ("cache", "home", "expected"),
    [
        ("/c", "/h", "/c/bmoe/fetch.json"),
        ("", "/h", "/h/.cache/bmoe/fetch.json"),
        ("relative", "/h", "/h/.cache/bmoe/fetch.json"),
        ("", "", None),
    ],
)
def test_the_folder_of_the_environment_is_used(monkeypatch, cache, home, expected):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", home)

    assert (None if expected is None else Path(expected)) == fetch_memory()
