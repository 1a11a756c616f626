"""What a run says about itself: one record per token, one of the run, one of its end.

Shapes and units are part of the contract: a field that ends in ``_bytes`` counts bytes, in ``_s`` seconds, in ``_us``
microseconds. ``None`` means *unmeasured*, never zero. What each field says is in docs/reference/telemetry.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that made a run slow: ``name`` is ``drive``, ``budget``, ``processor`` or ``memory``.

    ``share`` is the part of the decodes' time that it had a part in, 0 to 1, as far as that can be told; ``seen`` and
    ``remedy`` are words.
    """

    name: str
    share: float
    seen: str
    remedy: str


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """One generated token and the decode that it was sampled from. None = unmeasured.

    Times in seconds: ``decode_s`` the whole llama_decode call; inside it ``read_wait_s`` waiting for reads and
    ``manage_s`` staging and eviction; ``between_s`` from the end of the previous decode to the start of this one.
    Counts are of this decode alone; for the first token that decode is the prompt's. ``hit_rate`` is that of all
    decodes after the prompt's so far, ``window_hit_rate`` of the last 32 of them.

    Of a round of draft and verification the first token has the figures of the whole round and the others cost nothing:
    ``drafted`` tokens were verified and ``accepted`` of them; the routers ``demanded`` so many entries, of which
    ``lookups`` were left by routing policies; drafting took ``draft_s`` and read ``draft_bytes``, and
    ``rejected_bytes`` of those demanded were read for rejected tokens alone.
    """

    index: int
    token_id: int
    text: str
    decode_s: float | None = None
    read_wait_s: float | None = None
    manage_s: float | None = None
    between_s: float | None = None
    lookups: int | None = None
    hits: int | None = None
    hit_rate: float | None = None
    window_hit_rate: float | None = None
    demand_bytes: int | None = None
    speculative_bytes: int | None = None
    wasted_bytes: int | None = None
    evictions: int | None = None
    rereads: int | None = None
    majflt: int | None = None
    minflt: int | None = None
    nivcsw: int | None = None
    rss_bytes: int | None = None
    rss_anon_bytes: int | None = None
    rss_file_bytes: int | None = None
    rss_shmem_bytes: int | None = None
    swap_bytes: int | None = None
    psi_some_us: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    dropped: int | None = None
    substituted: int | None = None
    lost_mass: float | None = None
    demanded: int | None = None
    draft_s: float | None = None
    draft_bytes: int | None = None
    rejected_bytes: int | None = None

    @property
    def compute_s(self) -> float | None:
        """The residual: ``decode_s`` less what was measured inside it."""
        if self.decode_s is None or self.read_wait_s is None or self.manage_s is None:
            return None
        return max(0.0, self.decode_s - self.read_wait_s - self.manage_s)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What ran: versions, machine and the full resolved profile, with the marks that limit what may be concluded."""

    run_id: str
    model: str
    arch: str
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    profile: Mapping[str, Any]
    resolved: Mapping[str, Any]
    traced: bool = False
    sampled: bool = False
    lossy: bool = False
    speculative: bool = False
    notices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The end of a run. Rates, hits and bytes per token are of decode; the prompt's are named ``prefill``.

    ``tok_s`` is tokens over ``decode_s``, the sum of the decode calls that they came from, and ``draft_s``.
    ``prompt_tokens`` were decoded: fewer than given if it was cancelled before. ``stop`` is why it ended: ``length``,
    ``context`` (no room for more), ``eog``, ``cancelled`` or ``error``. ``bytes_read`` includes ``prefill_bytes``;
    ``slot_bytes`` is reserved for shared slots when the cache is off. ``open_peak_rss_bytes`` is the process's peak up
    to the end of opening, ``peak_rss_bytes`` since then; ``cache_resizes`` counts since then too; ``preloaded_bytes``
    were read at open for the cache, by a heat file, and are in no other figure. ``causes`` are what made it slow, the
    costliest first; empty if nothing did, None if too little was seen. ``lost_mass`` is of decode, ``worst_lost_mass``
    that of the token that lost most, the prompt's included. The ``ahead`` fields are of what a prefetcher suggested,
    None without one: ``ahead_off_tokens`` were decoded while it was switched off, ``ahead_note`` says why it is at the
    end. Those after them are None without a drafter: ``accepted_length`` is the mean number of tokens from a decode
    that verified a draft, the model's own included, ``acceptance`` by position in a draft the share of tokens accepted
    where those before were; ``bytes_per_output_token`` and ``s_per_output_token`` count verification and drafting;
    ``draft_off_rounds`` were without a draft because it did not pay.
    """

    tokens: int
    prompt_tokens: int
    tok_s: float | None
    open_s: float | None
    prefill_s: float
    decode_s: float
    hit_rate: float | None
    lookups: int
    hits: int
    evictions: int
    rereads: int
    bytes_read: int
    prefill_bytes: int
    bytes_per_token: float | None
    io_wait_s: float | None
    manage_s: float | None
    cpu_s: float | None
    open_read_bytes: int | None
    open_peak_rss_bytes: int | None
    peak_rss_bytes: int | None
    dense_bytes: int
    slot_bytes: int
    cache_budget_bytes: int
    cache_held_bytes: int
    direct_io: bool | None
    seam: str
    lossy: bool
    stop: str
    logits_sha256: str | None = None
    cache_resizes: int = 0
    preloaded_bytes: int = 0
    causes: tuple[Cause, ...] | None = None
    dropped: int | None = None
    substituted: int | None = None
    lost_mass: float | None = None
    worst_lost_mass: float | None = None
    ahead_bytes: int | None = None
    ahead_used_bytes: int | None = None
    ahead_wasted_bytes: int | None = None
    ahead_off_tokens: int | None = None
    ahead_note: str | None = None
    drafted: int | None = None
    accepted: int | None = None
    accepted_length: float | None = None
    acceptance: tuple[float | None, ...] | None = None
    draft_s: float | None = None
    draft_bytes: int | None = None
    rejected_bytes: int | None = None
    bytes_per_output_token: float | None = None
    s_per_output_token: float | None = None
    draft_off_rounds: int | None = None
