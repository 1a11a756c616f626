"""What a profile that asks for a prefetcher gets: room in the budget, a reason why there is none, or a refusal."""

from __future__ import annotations

from .test_plan import plan, refused


def test_a_prefetcher_gets_room_of_the_budget_or_a_reason_why_there_is_none():
    ahead = ("prefetch.policy=temporal",)

    made = plan("cache.budget_mb=20", *ahead)
    assert ("temporal", 0) == (made.prefetch.name, plan("cache.budget_mb=20").budget.room)
    assert 0 < made.budget.room <= made.budget.bytes // 4
    assert made.budget.room == made.resolved()["cache"]["room_bytes"]
    assert made.budget.capacity < plan("cache.budget_mb=20").budget.capacity

    (line,) = refused("cache.budget_mb=0", *ahead)
    assert line.startswith('--set: prefetch.policy = "temporal" needs a cache to read into; raise cache')
    whole = plan("cache.budget_mb=100000", *ahead)
    assert any("every expert stays in memory" in notice for notice in whole.notices)
    assert whole.budget.room == 0


def test_a_prefetcher_has_no_part_where_nothing_is_streamed():
    made = plan("prefetch.policy=temporal", "stream.enabled=false")

    assert (0, False) == (made.budget.room, made.streaming)
