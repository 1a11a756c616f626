"""What a profile may say and mean: the pydantic model of the TOML file, defaults, ranges, and loading with overrides.

Nothing here knows plugins, models or machines: those questions are :mod:`bmoe.plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr

from bmoe.bundled import bundled_models
from bmoe.errors import ProfileError
from bmoe.origin import Origin, order_of
from bmoe.problems import Problem, one_line, suggest, toml_value
from bmoe.salvage import salvage, take_away
from bmoe.tables import Problems, Table, apply_override, parse_override, plain_table, plain_value, read_toml
from bmoe.values import FilePath, Flag, OptionTable, Text, choice, number

_INT32 = 2**31 - 1
_MOST_MIB = 2**30


class Section(BaseModel):
    """Base of every table of a profile: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """Which model, and how llama.cpp computes it."""

    path: FilePath | None = Field(
        default=None, description="gguf file, of a split model the first; or the name of a bundled model"
    )
    threads: Annotated[int | Literal["auto"], number(1, 4096, whole=True, auto=True)] = Field(
        default="auto", description="compute threads"
    )
    ctx: Annotated[int, number(1, _INT32, whole=True)] = Field(default=2048, description="context length in tokens")
    ubatch: Annotated[int, number(1, _INT32, whole=True)] = Field(
        default=512, description="prompt tokens computed at a time"
    )
    kv_type: Annotated[Literal["f32", "f16", "bf16", "q8_0"], choice("f32", "f16", "bf16", "q8_0")] = Field(
        default="f16", description="element type of the KV cache"
    )
    flash_attention: Annotated[bool | Literal["auto"], choice("auto", True, False)] = Field(
        default="auto", description="llama.cpp's flash attention"
    )
    repack: Flag = Field(default=False, description="llama.cpp's weight repacking; only without streaming")


class StreamSection(Section):
    """Whether experts are streamed, and what reads overlap with."""

    enabled: Flag = Field(default=True, description="read routed experts on demand; false = plain llama.cpp")
    overlap: Annotated[
        Literal["auto", "off", "projection", "expert"], choice("auto", "off", "projection", "expert")
    ] = Field(default="auto", description="what the reads of a layer overlap with")


class CacheSection(Section):
    """Which experts stay in memory, and how many bytes of them."""

    policy: Text = Field(default="auto", description="cache policy")
    budget_mb: Annotated[int | float | Literal["auto"], number(0, _MOST_MIB, auto=True)] = Field(
        default="auto", description="MiB for cached experts; 0 = cache off"
    )
    floor_mb: Annotated[float, number(0, _MOST_MIB)] = Field(
        default=1536, description="MiB an automatic budget leaves free"
    )
    ceil_mb: Annotated[float, number(0, _MOST_MIB)] = Field(
        default=0, description="MiB an automatic budget never exceeds; 0 = no limit"
    )
    watch: Annotated[Literal["off", "warn", "shrink"], choice("off", "warn", "shrink")] = Field(
        default="warn", description="what is done when memory is short"
    )
    heat: FilePath | None = Field(default=None, description="file that keeps use counts between runs")
    options: OptionTable = Field(default={}, description="options of the policy")


class FetchSection(Section):
    """How expert bytes are read."""

    plugin: Text = Field(default="auto", description="fetcher")
    lanes: Annotated[int, number(1, 8, whole=True)] = Field(default=4, description="threads of the fetcher pread")
    direct: Flag = Field(default=True, description="bypass the page cache where the file allows it")
    roots: tuple[FilePath, ...] = Field(default=(), description="folders that hold copies of the shards")
    options: OptionTable = Field(default={}, description="options of the fetcher")


class DenseSection(Section):
    """Where the weights outside the routed experts live."""

    placement: Text = Field(default="mmap", description="dense placement")
    options: OptionTable = Field(default={}, description="options of the placement")


class PrefetchSection(Section):
    """Speculative reads."""

    policy: Text = Field(description="prefetcher")
    options: OptionTable = Field(default={}, description="options of the prefetcher")


class DraftSection(Section):
    """Speculative decoding."""

    drafter: Text = Field(description="drafter")
    max_draft: Annotated[int, number(1, 64, whole=True)] = Field(
        default=4, description="drafted tokens per round, at most"
    )
    governor: Annotated[Literal["auto", "fixed"], choice("auto", "fixed")] = Field(
        default="auto", description="whether the draft length adapts"
    )
    options: OptionTable = Field(default={}, description="options of the drafter")


class RoutingSection(Section):
    """One knob on the routing; applied in the order of the profile."""

    plugin: Text = Field(description="routing policy")
    options: OptionTable = Field(default={}, description="options of the routing policy")


class LossSection(Section):
    """How much all routing knobs together may give up."""

    budget: Annotated[float, number(0, 1, above=True)] = Field(description="share of router mass a token may lose")


class SinkSection(Section):
    """One receiver of telemetry records."""

    plugin: Text = Field(description="sink")
    options: OptionTable = Field(default={}, description="options of the sink")


class TraceSection(Section):
    """Files that traces are written to."""

    route: FilePath | None = Field(default=None, description="file for the routing of every token")
    io: FilePath | None = Field(default=None, description="file for every read")
    compute: FilePath | None = Field(default=None, description="file for compute times")
    detail: Annotated[Literal["layer", "node"], choice("layer", "node")] = Field(
        default="layer", description="what compute times are taken of"
    )


class ChatSection(Section):
    """How a chat becomes a prompt."""

    template: Text | None = Field(default=None, description="chat template, instead of the model's own")
    think: Flag | None = Field(default=None, description="whether a reasoning model reasons")


class SamplingSection(Section):
    """How the next token is chosen; greedy by default."""

    temp: Annotated[float, number(0, 100)] = Field(default=0.0, description="temperature; 0 = greedy")
    top_k: Annotated[int, number(0, _INT32, whole=True)] = Field(
        default=40, description="most probable tokens kept; 0 = all"
    )
    top_p: Annotated[float, number(0, 1, above=True)] = Field(default=0.95, description="probability mass kept")
    min_p: Annotated[float, number(0, 1)] = Field(
        default=0.05, description="least probability relative to the best token"
    )
    repeat_penalty: Annotated[float, number(0, 100, above=True)] = Field(
        default=1.0, description="divides the logits of recent tokens; 1 = off"
    )
    seed: Annotated[int, number(0, 2**32 - 1, whole=True)] | None = Field(
        default=None, description="seed of the sampler; absent = a fresh one"
    )


class ServeSection(Section):
    """Where the server listens."""

    host: Text = Field(default="127.0.0.1", description="address to listen on")
    port: Annotated[int, number(0, 65535, whole=True)] = Field(
        default=8080, description="port to listen on; 0 = any free one"
    )
    api_key_file: FilePath | None = Field(default=None, description="file with the API key")
    limits: OptionTable = Field(default={}, description="limits of requests")


class PluginsSection(Section):
    """What may be loaded besides the plugins of bmoe itself."""

    enable: tuple[Text, ...] = Field(default=(), description="installed plugins to load, by name")
    allow_experimental: Flag = Field(default=False, description="allow plugins marked experimental")
    archs: tuple[FilePath, ...] = Field(default=(), description="TOML files with architecture rows")


class Profile(Section):
    """A whole profile, validated; ``prefetch``, ``draft`` and ``loss`` are None when absent."""

    model: ModelSection = ModelSection()
    stream: StreamSection = StreamSection()
    cache: CacheSection = CacheSection()
    fetch: FetchSection = FetchSection()
    dense: DenseSection = DenseSection()
    prefetch: PrefetchSection | None = None
    draft: DraftSection | None = None
    routing: tuple[RoutingSection, ...] = ()
    loss: LossSection | None = None
    sink: tuple[SinkSection, ...] = ()
    trace: TraceSection = TraceSection()
    chat: ChatSection = ChatSection()
    sampling: SamplingSection = SamplingSection()
    serve: ServeSection = ServeSection()
    plugins: PluginsSection = PluginsSection()

    _origin: Origin = PrivateAttr(default_factory=Origin)

    @property
    def origin(self) -> Origin:
        """Where this profile's values come from."""
        return self._origin

    def set_origin(self, origin: Origin) -> None:
        """Say where they come from; for the loader."""
        self._origin = origin

    @property
    def source(self) -> str:
        """What messages call this profile: its path as given, or the name of a bundled one."""
        return self._origin.source

    @property
    def refused(self) -> list[Problem]:
        """What :func:`read_profile` found wrong; empty for a profile that :func:`load_profile` returned."""
        return [Problem(path, line) for path, line in self._origin.refused.items()]

    def where(self, path: str | tuple[str, ...]) -> str:
        """``FILE: a.b.c`` for a message; ``--set`` or ``--model`` in place of the file if the value came from there."""
        return self._origin.where(_parts(path))

    def in_doubt(self, path: str | tuple[str, ...]) -> bool:
        """Whether what was said at ``path`` was refused, so that nothing can be concluded from its default."""
        return self._origin.in_doubt(_parts(path))

    def in_order(self, problems: Iterable[Problem]) -> list[str]:
        """The lines of ``problems`` in the order of this profile, each once."""
        return self._origin.in_order(problems)


_PATH_KEYS = (
    ("model", "path"),
    ("cache", "heat"),
    ("fetch", "roots"),
    ("trace", "route"),
    ("trace", "io"),
    ("trace", "compute"),
    ("serve", "api_key_file"),
    ("plugins", "archs"),
)


def bundled_profiles() -> dict[str, Path]:
    """The profiles that come with bmoe, by name."""
    folder = Path(str(files("bmoe") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_profile(
    profile: str | Path | Mapping[str, Any] | Profile, *, model: str | None = None, overrides: Sequence[str] = ()
) -> Profile:
    """Load, override and validate a profile.

    ``profile`` is a path first, then the name of a bundled profile, or a table or a profile that is already in
    memory. ``model`` replaces ``model.path``; ``overrides`` are ``a.b.c=VALUE`` texts, applied in order after it. A
    relative path is relative to the profile's folder where the profile says it, else to the current directory.

    Raises :class:`~bmoe.errors.ProfileError` with every problem, one line each.
    """
    loaded = read_profile(profile, model=model, overrides=overrides)
    if loaded.refused:
        raise ProfileError(loaded.in_order(loaded.refused))
    return loaded


def read_profile(
    profile: str | Path | Mapping[str, Any] | Profile, *, model: str | None = None, overrides: Sequence[str] = ()
) -> Profile:
    """As :func:`load_profile`, but what is wrong is taken away and remembered, so that the rest can be checked too.

    Raises :class:`~bmoe.errors.ProfileError` only if there is no table at all.
    """
    folder: Path | None = None
    raw: Mapping[str, Any]
    before = profile.origin if isinstance(profile, Profile) else Origin()
    if isinstance(profile, Profile):
        source, raw = profile.source, profile.model_dump(mode="json")
    elif isinstance(profile, Mapping):
        source, raw = "profile", profile
    else:
        path, source = _find(profile)
        folder, raw = path.parent, read_toml(path, source)
    given, problems = dict(before.given), dict(before.refused)
    data = plain_table(raw, source, problems)
    if folder is not None:
        _anchor(data, folder)
    order = order_of(data)
    doubts = before.doubts | {take_away(data, path) for path in problems}
    if model is not None:
        _override(data, ("model", "path"), model, "--model", given, problems)
    for text in overrides:
        try:
            at, value = parse_override(text)
        except ProfileError as exc:
            problems["--set", text] = str(exc)
        else:
            _override(data, at, value, "--set", given, problems)
    for at in order_of(data):
        order.setdefault(at, len(order))
    origin = Origin(source, given, order)
    loaded, doubts = salvage(Profile, data, origin.where, problems, doubts)
    problems.update(_together(loaded, origin.where))
    loaded.set_origin(replace(origin, refused=problems, doubts=doubts.union(problems)))
    return loaded


def _override(
    data: Table, at: tuple[str, ...], value: Any, label: str, given: dict[tuple[str, ...], str], problems: Problems
) -> None:
    wrong: Problems = {}
    plain_value(value, at, label, wrong)
    if not wrong:
        try:
            apply_override(data, at, value)
        except ProfileError as exc:
            wrong[at] = str(exc)
        else:
            given[at] = label
    problems.update(wrong)


def _together(profile: Profile, where: Callable[[tuple[str, ...]], str]) -> Problems:
    """What two keys say against each other."""
    budget, ceiling = profile.cache.budget_mb, profile.cache.ceil_mb
    if budget == "auto" or not 0 < ceiling < budget:
        return {}
    path = ("cache", "budget_mb")
    said = f"{where(path)} = {toml_value(budget)} is above cache.ceil_mb"
    return {path: f"{said} = {ceiling:.15g}; change one of them"}


def _parts(path: str | tuple[str, ...]) -> tuple[str, ...]:
    return tuple(path.split(".")) if isinstance(path, str) else path


def _anchor(data: Table, folder: Path) -> None:
    for section, key in _PATH_KEYS:
        table = data.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(value, str):
            bundled = bundled_models().get(value) if (section, key) == ("model", "path") else None
            missing = bundled is not None and not (folder / value).exists()
            table[key] = str(bundled) if missing else _anchored(value, folder)
        elif isinstance(table, dict) and isinstance(value, list):
            table[key] = [_anchored(item, folder) if isinstance(item, str) else item for item in value]


def _anchored(value: str, folder: Path) -> str:
    # An empty or ~ path must stay as written, so that validation can refuse it.
    return value if not value or value.startswith("~") else str(folder / value)


def _find(profile: str | Path) -> tuple[Path, str]:
    """The file of a profile and its display name: a path first, then a bundled name (a folder is no profile)."""
    bundled = bundled_profiles()
    text = str(profile)
    path = Path(profile)
    try:
        exists, folder = bool(text) and path.exists(), path.is_dir()
    except (OSError, ValueError):
        exists = folder = False
    if isinstance(profile, str) and text in bundled and (folder or not exists):
        return bundled[text], f"{text}.toml"
    if exists:
        return path, one_line(text)
    raise ProfileError(f"{toml_value(text)} is neither a file nor a bundled profile; {suggest(text, bundled)}")
