"""The summary for a person: what was not measured is left out."""

from __future__ import annotations

import dataclasses

from bmoe.cli.summary import drafts, reads, speed, wiring
from bmoe.testing.sinks import SUMMARY

MEASURED = dataclasses.replace(
    SUMMARY, tokens=3, tok_s=2.5, hit_rate=0.5, bytes_per_token=1024.0 * 1024, io_wait_s=0.5, decode_s=1.0,
    direct_io=True, peak_rss_bytes=1 << 20,
)  # fmt: skip


def test_what_was_measured_is_said():
    assert "2.50 tok/s" in list(speed(MEASURED))
    assert ["24.0 MiB of experts read", "1.00 MiB/token", "hit rate 50.0 %", "read wait 50 %", "direct I/O"] == list(
        reads(MEASURED)
    )
    assert "peak memory 1 MiB" in list(wiring(MEASURED))


def test_after_a_single_token_nothing_of_decode_is_measured_and_nothing_said():
    alone = dataclasses.replace(
        MEASURED, tokens=1, tok_s=None, hit_rate=None, bytes_per_token=None, io_wait_s=None, decode_s=0.0
    )

    assert ["24.0 MiB of experts read", "direct I/O"] == list(reads(alone))
    assert ["1 token", "ended by"] == [part[:8].strip() for part in list(speed(alone))[::2]]


def test_memory_that_was_not_measured_is_not_said():
    unmeasured = dataclasses.replace(MEASURED, peak_rss_bytes=None)

    assert not any("?" in part or "memory" in part for part in wiring(unmeasured))


def test_what_drafts_came_to_is_said_where_there_is_a_drafter():
    drafted = dataclasses.replace(
        MEASURED, drafted=40, accepted=30, accepted_length=4.0, acceptance=(0.9, 0.8, 0.55, None),
        bytes_per_output_token=1.5 * 1024 * 1024, draft_off_rounds=1,
    )  # fmt: skip

    assert [
        "drafts: 4.0 tokens per round", "75 % accepted (0.90, 0.80, 0.55)", "1.50 MiB/token with drafting",
        "off for 1 round",
    ] == list(drafts(drafted))  # fmt: skip
    assert [] == list(drafts(MEASURED))


def test_a_drafter_of_which_nothing_was_verified_is_no_rate():
    off = dataclasses.replace(MEASURED, drafted=0, accepted=0, draft_off_rounds=3)

    assert ["drafts: none was verified", "off for 3 rounds"] == list(drafts(off))
