"""Chooses the next token: greedy by default, otherwise llama.cpp's own sampler chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bmoe.errors import LogitsError
from bmoe.native import lib
from bmoe.native.model import Context

_RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED: llama.cpp draws one


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Stages in the order they apply; a value that changes nothing leaves its stage out. ``temp`` 0 is greedy."""

    temp: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None


class Sampler:
    """One generation's sampler; its random state starts from the seed."""

    def __init__(self, options: SamplingOptions, n_vocab: int) -> None:
        self._llama = llama = lib.llama()
        self._chain: Any = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        stages = []
        if options.repeat_penalty != 1.0:
            stages.append(llama.llama_sampler_init_penalties(n_vocab, 64, options.repeat_penalty, 0.0, 0.0))
        if options.temp <= 0:
            stages.append(llama.llama_sampler_init_greedy())
        else:
            if options.top_k > 0:
                stages.append(llama.llama_sampler_init_top_k(options.top_k))
            if options.top_p < 1.0:
                stages.append(llama.llama_sampler_init_top_p(options.top_p, 1))
            if options.min_p > 0.0:
                stages.append(llama.llama_sampler_init_min_p(options.min_p, 1))
            stages.append(llama.llama_sampler_init_temp(options.temp))
            seed = _RANDOM_SEED if options.seed is None else options.seed
            stages.append(llama.llama_sampler_init_dist(seed))
        for stage in stages:
            llama.llama_sampler_chain_add(self._chain, stage)
        # a chain over 150,000 candidates costs more than an argmax
        self._greedy = options.temp <= 0 and options.repeat_penalty == 1.0

    def next(self, context: Context, row: int = -1) -> int:
        """The token after that at ``row`` of the last batch, -1 = its last; ties go to the lowest id.

        Raises LogitsError if the logits are not numbers: whatever is chosen of them, the text goes round in circles.
        """
        logits = context.logits(row)
        likeliest = int(logits.argmax())
        if np.isnan(logits[likeliest]):  # argmax finds a NaN before any number
            raise LogitsError(
                f"{context.model.path}: the model's output is not a number (NaN): its weights are damaged, or their "
                "values overflow; download or convert the file again, and try plain llama.cpp on it"
            )
        if self._greedy:
            return likeliest
        return int(self._llama.llama_sampler_sample(self._chain, context.handle, row))

    def close(self) -> None:
        """Free the chain and its stages. May be called twice."""
        if self._chain:
            self._llama.llama_sampler_free(self._chain)
            self._chain = None
