"""What crosses the seam between core and plugins: frozen facts, records and the Protocols that plugins implement.

Nothing here imports llama.cpp or numpy at run time, so every policy can be written and tested without them.
Shapes and units are part of the contract: a field that ends in ``_bytes`` counts bytes, in ``_s`` seconds.
``None`` in a record means *unmeasured*, never zero.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from pydantic import BaseModel, ConfigDict

from bmoe.drafts import Drafter as Drafter
from bmoe.drafts import DraftHost as DraftHost
from bmoe.drafts import Guessing as Guessing
from bmoe.drafts import Hosted as Hosted
from bmoe.drafts import Level as Level
from bmoe.drafts import Proposal as Proposal
from bmoe.facts import ArchRow as ArchRow
from bmoe.facts import BankFacts as BankFacts
from bmoe.facts import Gating as Gating
from bmoe.facts import ModelFacts as ModelFacts
from bmoe.facts import ProjectionFacts as ProjectionFacts
from bmoe.facts import ShardFacts as ShardFacts
from bmoe.facts import TensorFacts as TensorFacts
from bmoe.facts import Trait as Trait
from bmoe.reads import Fetcher as Fetcher
from bmoe.reads import Read as Read
from bmoe.reads import ReadBatch as ReadBatch
from bmoe.reads import Ticket as Ticket
from bmoe.records import Cause as Cause
from bmoe.records import RunRecord as RunRecord
from bmoe.records import RunSummary as RunSummary
from bmoe.records import TokenRecord as TokenRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# ---- expert identity

ExpertKey: TypeAlias = int
"""One cache entry: ``layer << 24 | bank << 16 | expert``. A packed int hashes five times faster than an object."""


def expert_key(layer: int, expert: int, bank: int = 0) -> ExpertKey:
    """Pack an entry's identity; ``layer`` < 2**16, ``bank`` < 2**8, ``expert`` < 2**16."""
    return layer << 24 | bank << 16 | expert


class KeyParts(NamedTuple):
    """The parts of an :data:`ExpertKey`."""

    layer: int
    bank: int
    expert: int


def key_parts(key: ExpertKey) -> KeyParts:
    """Unpack an :data:`ExpertKey`."""
    return KeyParts(key >> 24, key >> 16 & 0xFF, key & 0xFFFF)


# ---- providers


class Options(BaseModel):
    """Base of a provider's options: unknown keys are refused, ``Field(description=…)`` doubles as help."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class CacheFacts:
    """What a cache policy may know: the budget in bytes and as whole entries, and the entries of one token's cycle."""

    budget_bytes: int
    capacity: int
    cycle: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FetchFacts:
    """What a fetcher must honour: files by shard number, lanes, direct or buffered, the largest batch of reads."""

    paths: tuple[str, ...]
    lanes: int
    direct: bool
    batch: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Handed to every ``Provider.build`` together with the provider's validated options."""

    model: ModelFacts
    cache: CacheFacts
    fetch: FetchFacts


T = TypeVar("T")


def _everywhere() -> str:
    return ""


def _nothing(options: Any, model: ModelFacts) -> int:
    return 0


def _chains(options: Any) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Provider(Generic[T]):
    """A named way to build one plugin object.

    ``build(options, facts)`` is called once per open. ``lossy`` marks a plugin that may change the output,
    ``experimental`` one that needs ``plugins.allow_experimental``. ``needs`` and ``excludes`` name what else must, or
    must not, be chosen, as ``"kind:name"`` or ``"kind:*"`` (kinds: arch, cache, fetch, prefetch, dense, routing,
    importance, draft, sink); the table of impossible combinations is derived from them. ``available()`` says in one
    sentence why this machine cannot run it, or returns "" if it can. ``holds(options, model)`` are the bytes that it
    will hold in memory for good, which an automatic cache budget then leaves; asked of dense placements and drafters.
    ``neutral(model)`` are options with which a lossy plugin changes nothing, ``trials`` options with which it does what
    it is for: gates run it with them. Of drafters alone: ``guesses`` names what guesses tokens for it, ``model`` the
    one at its option ``model``; ``trees(options)`` is whether it proposes trees.
    """

    name: str
    build: Callable[[Any, Facts], T]
    options: type[Options] = Options
    lossy: bool = False
    experimental: bool = False
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    available: Callable[[], str] = _everywhere
    holds: Callable[[Any, ModelFacts], int] = _nothing
    neutral: Callable[[ModelFacts], Mapping[str, Any]] | None = None
    trials: tuple[Mapping[str, Any], ...] = ()
    guesses: Guessing = ""
    trees: Callable[[Any], bool] = _chains
    summary: str = ""


# ---- cache policies


class CachePolicy(Protocol):
    """Ranks entries; never sees addresses, files or threads. One owner thread. All arguments are positional."""

    below_cycle: bool
    """Whether hits are possible with a budget below one token's cycle."""

    def touch(self, keys: Sequence[ExpertKey], /) -> None:
        """Entries used by one layer in one ubatch, once per layer and ubatch, hits and misses alike.

        Distinct keys in the order of their last use (router rank for one token). A key that is not resident is
        admitted right afterwards.
        """

    def admit(self, key: ExpertKey, cold: bool, /) -> None:
        """``key`` became resident; ``cold`` if it was read on speculation and not yet used."""

    def victim(self, pinned: Collection[ExpertKey], /) -> ExpertKey | None:
        """Name the resident entry to give up, never one of ``pinned``; ``None`` if there is none. Changes nothing."""

    def forget(self, key: ExpertKey, /) -> None:
        """``key`` is no longer resident, evicted or invalid."""


@runtime_checkable
class Remembering(Protocol):
    """Optional side of caches and prefetchers: is told, before anything is touched, what earlier runs used."""

    def remember(self, chances: Mapping[ExpertKey, float], /) -> None:
        """How often a token used each entry, 0 to 1, of those that any did; the most used are read next."""


@dataclass(frozen=True, slots=True)
class RoutingEvent:
    """What a plugin with ``wants`` observes after a routing: read-only views, valid during the call.

    ``ids`` is int32 [n_tokens, n_used] in router-rank order. The others, float32, are present if wanted and if the
    graph has them: ``probs`` [n_tokens, n_expert] what the router gave to every expert, summing to 1 where it is a
    softmax; ``scores`` of the same shape what the experts were ranked by, with -inf for those of groups that were ruled
    out; ``activation`` [n_tokens, n_embd] the router's input. ``wants`` names them; ``topk`` is the ids. ``own`` is the
    model's own choice, of the shape of ``ids``, where a routing policy changed it, else None.
    """

    layer: int
    bank: int
    batch: BatchContext
    ids: NDArray[np.int32]
    probs: NDArray[np.float32] | None = None
    scores: NDArray[np.float32] | None = None
    activation: NDArray[np.float32] | None = None
    own: NDArray[np.int32] | None = None


@runtime_checkable
class Observer(Protocol):
    """Optional side of caches and prefetchers: ``wants`` names graph nodes, ``observe`` is called once per routing."""

    wants: frozenset[str]

    def observe(self, event: RoutingEvent, /) -> None:
        """See one routing; may not change it."""


# ---- batches and routing

Phase: TypeAlias = Literal["prefill", "decode", "draft", "verify"]


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What the tokens of one ubatch are. Per-token tuples have the length n_tokens.

    ``positions`` and ``seq_ids`` as given to llama.cpp; in a candidate tree ``depth`` counts from the root (0),
    ``parent`` is the index of the parent token in this batch (-1 for roots) and ``path_probability`` the product of
    draft probabilities from the root. ``group`` numbers the verify round, ``ubatch`` the part of a prompt, from 0,
    ``request_id`` tells prompts apart, ``is_output`` marks tokens whose logits are asked for. ``importance`` are the
    scores of a prompt's tokens, if a routing policy asked for them: 1 = the most important one of the prompt.
    """

    phase: Phase
    positions: tuple[int, ...]
    seq_ids: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()
    parent: tuple[int, ...] = ()
    path_probability: tuple[float, ...] = ()
    group: int = 0
    ubatch: int = 0
    is_output: tuple[bool, ...] = ()
    importance: tuple[float, ...] = ()
    request_id: str = ""


@dataclass(slots=True)
class Routing:
    """One routing of one bank, and what routing policies change of it in place. Rows are tokens, best slot first.

    ``ids`` int32 [n_tokens, n_used] is the model's own choice. An expert that is put into a slot gets its true weight;
    one that stays keeps its slot. ``dead`` bool of that shape marks slots that take no part, for which the others make
    up; ``mute`` slots that take no part while the weights of the others stay. Afterwards the slots of a token are put
    into the router's order, and what only slots without a part would need is not read.

    Read-only: ``shares`` float32 [n_tokens, n_used], what part of a token each slot of the model's own choice has,
    summing to 1; ``probs``, ``scores`` and, if wanted, ``activation`` as in :class:`RoutingEvent`; ``ranking`` int32
    [n_tokens, n_expert], all experts of a token, best first; ``resident`` bool [n_expert], which are in memory now.
    """

    layer: int
    bank: int
    n_expert: int
    batch: BatchContext
    ids: NDArray[np.int32]
    dead: NDArray[np.bool_]
    mute: NDArray[np.bool_]
    shares: NDArray[np.float32]
    probs: NDArray[np.float32]
    scores: NDArray[np.float32]
    ranking: NDArray[np.int32]
    resident: NDArray[np.bool_]
    activation: NDArray[np.float32] | None = None


class RoutingPolicy(Protocol):
    """A knob on the routing. ``phases`` are the kinds of batches that it is asked about, ``wants`` what it looks at.

    With a ``[loss]`` budget a change is a proposal, which is taken slot by slot as far as the budget goes.
    """

    phases: frozenset[str]
    wants: frozenset[str]

    def apply(self, routing: Routing, /) -> None:
        """Change ``routing`` in place, or leave it. A token keeps at least one slot."""


class Prefetcher(Protocol):
    """Suggests entries that will be needed; advisory, so that it can never change the output.

    Both calls come from the thread that decodes, in the time of a token: after every routing, once its own reads were
    submitted, ``observe`` and then ``suggest``; while a long prompt is read layer by layer, ``observe`` alone; neither
    for tokens for which it is switched off, or compared with none, so that routings may be missing in between.
    Optional: ``retain(layer, /)``, asked after ``suggest``, names entries that should not be evicted for guesses;
    ``note`` says, in words, why it has given up for good; ``close()`` ends what it started.
    """

    wants: frozenset[str]

    def observe(self, event: RoutingEvent, /) -> None:
        """See one routing."""

    def suggest(self, layer: int, /) -> Sequence[ExpertKey]:
        """Entries worth reading after the demand reads of ``layer`` were issued, best first.

        Those of ``layer`` itself, and those that are in memory or on their way, are passed over. The others are read as
        far as there is room, when the device has nothing else to do; what was not begun when its layer is routed is
        dropped.
        """


# ---- dense weights


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A bound tensor that is no routed expert: where it is in memory and in the files."""

    name: str
    address: int
    nbytes: int
    shard: int
    offset: int


@dataclass(frozen=True, slots=True)
class Placement:
    """What a dense placement did: bytes it owns, bytes resident (None = unmeasured), and tensors that moved.

    ``moved`` maps a tensor's name to its new address; that memory lives until the placement is closed. Pages of the
    model's mapping that hold nothing but what moved are released. ``notices`` say what is not as it was asked for.
    """

    placed_bytes: int
    resident_bytes: int | None
    moved: Mapping[str, int] = field(default_factory=dict)
    notices: tuple[str, ...] = ()


class DensePlacement(Protocol):
    """Decides where the weights outside the routed experts live.

    One that takes weights from the files and not from memory says so with a true attribute ``copies``: opening then
    leaves them unread. :class:`Repacking` is another optional side.
    """

    def place(self, tensors: Sequence[DenseTensor], /) -> Placement:
        """Place all tensors; called once per open, before the first decode."""

    def close(self) -> None:
        """Release what ``place`` allocated; called after the model is gone."""


@runtime_checkable
class Repacking(Protocol):
    """Optional side of dense placements: weights that llama.cpp rearranges for this processor while it loads."""

    def repacks(self, tensors: Sequence[TensorFacts], /) -> Sequence[str]:
        """Names of the tensors that can be; asked before the load, of streamed and resident runs alike.

        Of these, the ones that the graph only multiplies by are rearranged, and ``place`` does not see them.
        """


# ---- prompts


class Importance(Protocol):
    """Scores prompt tokens for routing policies, which name a scorer in their option ``importance``."""

    def score(self, prompt: Sequence[int], text: str, spans: Sequence[tuple[int, int]], /) -> Sequence[float]:
        """One score of at least 0 per token of ``prompt``; what is greater matters more.

        ``spans[i]`` is where token i lies in ``text``, in characters, half-open; empty if it stands for no text, such
        as a token of a template. ``math.inf`` for a token that has to be taken in full.
        """


# ---- telemetry


class Sink(Protocol):
    """Receives records; bound in advance, never on the path of a decode."""

    def open(self, run: RunRecord, /) -> None:
        """A run starts."""

    def token(self, record: TokenRecord, /) -> None:
        """A token was generated."""

    def close(self, summary: RunSummary | None, /) -> None:
        """The run ended; ``None`` if it failed before there was anything to sum up."""
