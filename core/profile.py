"""What a profile may say and mean: the pydantic model of the TOML file, defaults, ranges, and loading with overrides.

Nothing here knows plugins, models or machines: those questions are :mod:`bmoe.plan`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from bmoe.errors import ProfileError
from bmoe.problems import dotted, explain, one_line, suggest, toml_value
from bmoe.tables import Table, apply_override, parse_override, plain_table, plain_value, read_toml
from bmoe.values import FilePath, Flag, OptionTable, Text, choice, number

_INT32 = 2**31 - 1
_MOST_MIB = 2**30


class Section(BaseModel):
    """Base of every table of a profile: unknown keys are refused, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSection(Section):
    """Which model, and how llama.cpp computes it."""

    path: FilePath | None = Field(default=None, description="gguf file, of a split model the first")
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
    heat: FilePath | None = Field(default=None, description="file that keeps use counts between runs")
    options: OptionTable = Field(default={}, description="options of the policy")


class FetchSection(Section):
    """How expert bytes are read."""

    plugin: Text = Field(default="auto", description="fetcher")
    lanes: Annotated[int, number(1, 8, whole=True)] = Field(default=4, description="reads in flight")
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

    budget: Annotated[float, number(0, 1)] = Field(description="router mass that may be lost per token")


class SinkSection(Section):
    """One receiver of telemetry records."""

    plugin: Text = Field(description="sink")
    options: OptionTable = Field(default={}, description="options of the sink")


class TraceSection(Section):
    """Files that traces are written to."""

    route: FilePath | None = Field(default=None, description="file for the routing of every token")
    io: FilePath | None = Field(default=None, description="file for every read")
    compute: FilePath | None = Field(default=None, description="file for compute times")


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

    _source: str = PrivateAttr("profile")
    _given: Mapping[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @property
    def source(self) -> str:
        """What messages call this profile: its path as given, or the name of a bundled one."""
        return self._source

    def set_source(self, source: str, given: Mapping[tuple[str, ...], str]) -> None:
        """Say where this profile came from: its display name, and which paths an argument gave instead."""
        self._source, self._given = source, given

    def where(self, path: str | tuple[str, ...]) -> str:
        """``FILE: a.b.c`` for a message; ``--set`` or ``--model`` in place of the file if the value came from there."""
        parts = tuple(path.split(".")) if isinstance(path, str) else path
        return f"{_giver(parts, self._given, self._source)}: {dotted(parts)}"


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
    profile: str | Path | Mapping[str, Any], *, model: str | None = None, overrides: Sequence[str] = ()
) -> Profile:
    """Load, override and validate a profile.

    ``profile`` is a path first, then the name of a bundled profile, or a table that is already in memory. ``model``
    replaces ``model.path``; ``overrides`` are ``a.b.c=VALUE`` texts, applied in order after it. A relative path is
    relative to the profile's folder where the profile says it, else to the current directory.

    Raises :class:`~bmoe.errors.ProfileError` with every problem, one line each.
    """
    problems: list[str] = []
    if isinstance(profile, Mapping):
        source, folder, raw = "profile", None, profile
    else:
        path, source = _find(profile)
        folder, raw = path.parent, read_toml(path, source)
    data = plain_table(raw, source, problems)
    if folder is not None:
        _anchor(data, folder)
    given: dict[tuple[str, ...], str] = {}
    if model is not None:
        _override(data, ("model", "path"), model, "--model", given, problems)
    for text in overrides:
        try:
            at, value = parse_override(text)
        except ProfileError as exc:
            problems += exc.problems
        else:
            _override(data, at, value, "--set", given, problems)
    said = {line.partition(" = ")[0] for line in problems}
    loaded, found = _validate(data, source, given)
    # A value that is not plain TOML was reported above; its type is wrong as well, which adds nothing.
    problems += [line for line in found if line.partition(" = ")[0] not in said]
    if loaded is None or problems:
        raise ProfileError(list(dict.fromkeys(problems)))
    return loaded


def _override(
    data: Table, at: tuple[str, ...], value: Any, label: str, given: dict[tuple[str, ...], str], problems: list[str]
) -> None:
    before = len(problems)
    plain_value(value, at, label, problems)
    if len(problems) > before:
        return
    try:
        apply_override(data, at, value)
    except ProfileError as exc:
        problems += exc.problems
    else:
        given[at] = label


def _validate(data: Table, source: str, given: Mapping[tuple[str, ...], str]) -> tuple[Profile | None, list[str]]:
    def where(path: tuple[str, ...]) -> str:
        return f"{_giver(path, given, source)}: {dotted(path)}"

    problems = _together(data, where)
    try:
        loaded = Profile.model_validate(data)
    except ValidationError as exc:
        return None, problems + explain(exc, Profile, data, where)
    loaded.set_source(source, given)
    return loaded, problems


def _together(data: Table, where: Callable[[tuple[str, ...]], str]) -> list[str]:
    """What two keys say against each other; looked at before validation, so that it is reported with the rest."""
    cache = data.get("cache")
    if not isinstance(cache, dict):
        return []
    budget, ceiling = cache.get("budget_mb"), cache.get("ceil_mb")
    if not isinstance(budget, int | float) or not isinstance(ceiling, int | float) or not 0 < ceiling < budget:
        return []
    path = ("cache", "budget_mb")
    return [f"{where(path)} = {toml_value(budget)} is above cache.ceil_mb = {toml_value(ceiling)}; change one of them"]


def _giver(path: tuple[str, ...], given: Mapping[tuple[str, ...], str], source: str) -> str:
    for length in range(len(path), 0, -1):
        if path[:length] in given:
            return given[path[:length]]
    return source


def _anchor(data: Table, folder: Path) -> None:
    for section, key in _PATH_KEYS:
        table = data.get(section)
        value = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and isinstance(value, str):
            table[key] = _anchored(value, folder)
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
