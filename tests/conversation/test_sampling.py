"""Seeds, filters, ties and penalties decide what is sampled."""

from __future__ import annotations

import pytest

from bmoe.native.sampler import Sampler, SamplingOptions

from .runs import PROMPT, SOME, Open, run


def sampled(opened: Open, *overrides: str) -> list[int]:
    with opened(SOME, *overrides).conversation() as conversation:
        return [token.id for token in conversation.generate(PROMPT, 16)]


def test_a_seed_decides_what_is_sampled(opened: Open) -> None:
    hot = ("sampling.temp=5.0", "sampling.top_k=0", "sampling.top_p=1.0", "sampling.min_p=0.0")
    seven = sampled(opened, *hot, "sampling.seed=7")

    assert seven == sampled(opened, *hot, "sampling.seed=7")
    assert seven != sampled(opened, *hot, "sampling.seed=8")
    assert seven != sampled(opened)


def test_a_second_generation_starts_from_the_seed_again(opened: Open) -> None:
    with opened(SOME, "sampling.temp=3.0", "sampling.seed=1").conversation() as conversation:
        assert run(conversation, PROMPT, 10) == run(conversation, PROMPT, 10)


@pytest.mark.parametrize(
    "knob", [("sampling.top_k=1",), ("sampling.top_p=0.000001",), ("sampling.top_k=0", "sampling.min_p=1.0")]
)
def test_each_filter_alone_can_make_sampling_greedy(opened: Open, knob: tuple[str, ...]) -> None:
    greedy = sampled(opened)
    wide = {"sampling.top_k": "0", "sampling.top_p": "1.0", "sampling.min_p": "0.0"}
    wide |= dict(entry.split("=") for entry in knob)

    assert greedy == sampled(opened, "sampling.temp=2.0", "sampling.seed=3", *(f"{k}={v}" for k, v in wide.items()))


def test_greedy_ties_go_to_the_lowest_id(opened: Open) -> None:
    with opened(SOME).conversation() as conversation:
        stream = conversation.generate(PROMPT, 2)
        best = next(stream).id
        logits = conversation._context.logits()
        low = 3 if best != 3 else 4
        logits[low] = logits[best] = logits.max()
        sampler = Sampler(SamplingOptions(), 512)

        assert low == sampler.next(conversation._context)
        sampler.close()
        sampler.close()


def test_a_penalty_changes_greedy_choices(opened: Open) -> None:
    plain = sampled(opened)
    assert len(set(plain)) < len(plain), "the model repeats itself, or this test shows nothing"

    penalised = sampled(opened, "sampling.repeat_penalty=100.0")

    assert len(set(penalised)) > len(set(plain))
