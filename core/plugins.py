"""Which plugins there are: a fresh pluggy manager per open, its hooks called once, names resolved to providers.

No other file calls a hook. What comes out is a :class:`Catalog` of plain tables; a broken plugin is an error, never a
warning.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pluggy

from bmoe import hookspecs
from bmoe.contracts import ArchRow, Options, Provider
from bmoe.errors import PluginError
from bmoe.problems import cause, one_line, suggest, toml_value
from bmoe.profile import Profile
from bmoe.registry import AUTO, KINDS, Registry
from bmoe.rows import Sourced, gather_rows, merge_rows, row_problem
from bmoe.selection import selections

if TYPE_CHECKING:
    from bmoe.plan import Plan

GROUP = "bmoe.plugins"

_PROVIDER_HOOKS = {
    "bmoe_caches": "cache",
    "bmoe_fetchers": "fetch",
    "bmoe_prefetchers": "prefetch",
    "bmoe_dense": "dense",
    "bmoe_routing": "routing",
    "bmoe_importance": "importance",
    "bmoe_drafters": "draft",
    "bmoe_sinks": "sink",
}
_HOOKS = ("bmoe_archs", *_PROVIDER_HOOKS, "bmoe_check_plan")


@dataclass(frozen=True)
class Catalog:
    """What was loaded: rows and providers by name, and where each came from.

    ``known`` are all names that could be chosen, loaded or not. ``manager`` is for tests, which arm a tripwire on it.
    ``problems`` say what could not be loaded, and ``failed`` of which plugins names may be lacking for that reason.
    """

    archs: Mapping[str, ArchRow]
    providers: Mapping[str, Mapping[str, Provider[Any]]]
    known: Mapping[str, tuple[str, ...]]
    manager: pluggy.PluginManager
    problems: tuple[str, ...]
    failed: frozenset[str]
    _cause: BaseException | None
    _origins: Mapping[tuple[str, str], str]
    _experimental: frozenset[tuple[str, str]]

    def refuse(self) -> Catalog:
        """This catalog, if all of it could be loaded; else raises PluginError with every problem, one line each."""
        if self.problems:
            raise PluginError("\n".join(self.problems)) from self._cause
        return self

    def origin(self, kind: str, name: str) -> str:
        """What provides ``name``: a module of bmoe, an installed plugin (its name) or a TOML file; else KeyError."""
        return self._origins[kind, name]

    def is_experimental(self, kind: str, name: str) -> bool:
        """Whether the registry or the provider itself marks it experimental."""
        provider = self.providers.get(kind, {}).get(name)
        return (kind, name) in self._experimental or (provider is not None and provider.experimental)

    def check_plan(self, plan: Plan) -> list[str]:
        """The reasons of all plugins why ``plan`` cannot run. Raises PluginError if one cannot say."""
        reasons: list[str] = []
        for plugin in _ordered(self.manager):
            try:
                reasons += [one_line(reason) for reason in _call(self.manager, plugin, "bmoe_check_plan", plan=plan)]
            except PluginError as exc:
                raise PluginError(f"{_name(self.manager, plugin)}: {exc}") from exc.__cause__
        return reasons


@dataclass
class _Loading:
    """A load under way; problems are gathered, so that one run reports them all."""

    registry: Registry
    manager: pluggy.PluginManager
    problems: list[str] = field(default_factory=list)
    first_cause: BaseException | None = None
    failed: set[str] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)
    providers: dict[str, dict[str, Provider[Any]]] = field(default_factory=lambda: {k: {} for k in KINDS})
    origins: dict[tuple[str, str], str] = field(default_factory=dict)
    own_rows: list[Sourced] = field(default_factory=list)
    other_rows: list[Sourced] = field(default_factory=list)

    def problem(self, text: str, exc: BaseException | None = None) -> None:
        self.problems.append(text)
        self.first_cause = self.first_cause or exc

    def place(self, name: str) -> str:
        """Where a plugin comes from, for a person: a module, with the installed plugin's name before it."""
        return self.places.get(name, name)

    def is_own(self, name: str) -> bool:
        return name not in self.places


def load_plugins(profile: Profile, registry: Registry) -> Catalog:
    """Load the in-tree plugins that ``profile`` names, all in-tree rows, and what ``plugins.enable`` lists.

    Raises :class:`~bmoe.errors.PluginError` with every problem, one line each: a plugin that is unknown, cannot be
    imported, implements an unknown hook, or takes a name that is taken.
    """
    return gather_plugins(profile, registry).refuse()


def gather_plugins(profile: Profile, registry: Registry) -> Catalog:
    """As :func:`load_plugins`, but what cannot be loaded is among the catalog's problems, so that the rest serves."""
    wanted = {("arch", name) for name in registry.names("arch")}
    for selection in selections(profile):
        names = AUTO.get(selection.kind, ()) if selection.name == "auto" else (selection.name,)
        wanted |= {(selection.kind, name) for name in names}
    loading = _Loading(registry, _fresh_manager())
    modules = [row.module for row in registry.rows if (row.kind, row.name) in wanted]
    _load(loading, modules, profile.plugins.enable, profile.where("plugins.enable"))
    for index, path in enumerate(profile.plugins.archs):
        rows, problems = gather_rows(path)
        loading.other_rows += [(path, row) for row in rows]
        for line in problems:
            loading.problem(f"{profile.where(f'plugins.archs.{index}')}: {line}")
    return _catalog(loading)


def load_all(
    registry: Registry, enable: Iterable[str] = (), where: str = "plugins.enable", archs: Iterable[str] = ()
) -> Catalog:
    """Load everything in-tree and the installed plugins named in ``enable``: for listings and gates.

    ``where`` is what messages call the place that names them, such as an option of the command line; ``archs`` are
    TOML files with more rows.

    Raises :class:`~bmoe.errors.PluginError` as :func:`load_plugins` does.
    """
    loading = _Loading(registry, _fresh_manager())
    _load(loading, [row.module for row in registry.rows], enable, where)
    for path in archs:
        rows, problems = gather_rows(path)
        loading.other_rows += [(path, row) for row in rows]
        for line in problems:
            loading.problem(line)
    return _catalog(loading).refuse()


def installed_plugins() -> dict[str, EntryPoint]:
    """The plugins that are installed beside bmoe, by the name that ``plugins.enable`` says."""
    return {point.name: point for point in entry_points(group=GROUP)}


def _fresh_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def _load(loading: _Loading, modules: Iterable[str], enable: Iterable[str], where: str) -> None:
    """Import and register everything, then collect rows and providers."""
    for module in dict.fromkeys(modules):
        _import(loading, module)
    for name in dict.fromkeys(enable):
        _enable(loading, name, where)
    if not loading.problems:
        # A plugin with an unknown hook was reported in our words; this is the safety net for what we did not foresee.
        try:
            loading.manager.check_pending()
        except pluggy.PluginValidationError as exc:
            loading.problem(one_line(exc), exc)
    for plugin in _ordered(loading.manager):
        _collect(loading, plugin)


def _import(loading: _Loading, module: str) -> None:
    try:
        plugin = importlib.import_module(module)
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever an import does, it is this plugin's failure
        loading.problem(f"reinstall bmoe or choose another plugin: {module} cannot be imported ({cause(exc)})", exc)
        return
    _register(loading, plugin, module)


def _enable(loading: _Loading, name: str, where: str) -> None:
    points = [point for point in entry_points(group=GROUP) if point.name == name]
    if not points:
        installed = sorted(installed_plugins())
        remedy = suggest(name, installed) if installed else "install it with pip, or remove it"
        loading.failed.add(name)
        loading.problem(f"{where} names {toml_value(name)}, which is not installed; {remedy}")
        return
    if len(points) > 1:
        both = " and ".join(sorted(_distribution(point) for point in points))
        loading.failed.add(name)
        loading.problem(f"{where} names {toml_value(name)}, which {both} both provide; uninstall one")
        return
    loading.places[name] = f"{name} ({points[0].value})"
    try:
        plugin = points[0].load()
    except (Exception, SystemExit) as exc:  # noqa: BLE001 - whatever an import does, it is this plugin's failure
        loading.failed.add(name)
        loading.problem(
            f"repair {_distribution(points[0])} (pip install --force-reinstall) or remove {toml_value(name)} from "
            f"{where.rpartition(': ')[2]}: {points[0].value} cannot be imported ({cause(exc)})",
            exc,
        )
        return
    _register(loading, plugin, name)


def _distribution(point: EntryPoint) -> str:
    dist = point.dist
    return f"{dist.name} {dist.version}" if dist is not None else point.value


def _register(loading: _Loading, plugin: object, name: str) -> None:
    try:
        problems = list(_hook_problems(loading.manager, plugin, loading.place(name)))
    except Exception as exc:  # noqa: BLE001 - an object whose attributes cannot be read is no plugin
        problems = [f"{loading.place(name)}: its hooks cannot be read; correct it ({cause(exc)})"]
    for text in problems:
        loading.problem(text)
    if problems:
        loading.failed.add(name)
        return
    try:
        loading.manager.register(plugin, name)
    except (pluggy.PluginValidationError, ValueError) as exc:
        loading.failed.add(name)
        loading.problem(f"{loading.place(name)}: cannot be registered; correct it ({one_line(exc)})", exc)


def _hook_problems(manager: pluggy.PluginManager, plugin: object, name: str) -> Iterator[str]:
    """Hooks that do not exist, and hooks without their marker."""
    for attribute in dir(plugin):
        if not attribute.startswith("bmoe_"):
            continue
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            if attribute in _HOOKS and callable(getattr(plugin, attribute)):
                yield f"{name}: {attribute} is not marked; put @bmoe.hookimpl above it"
            continue
        hook = options.get("specname") or attribute
        if hook not in _HOOKS:
            yield f"{name}: {toml_value(hook)} is not a hook of bmoe; {suggest(hook, _HOOKS)}"


def _ordered(manager: pluggy.PluginManager) -> list[object]:
    return [plugin for _, plugin in manager.list_name_plugin() if plugin is not None]


def _name(manager: pluggy.PluginManager, plugin: object) -> str:
    return manager.get_name(plugin) or repr(plugin)


def _call(manager: pluggy.PluginManager, plugin: object, hook: str, **arguments: object) -> list[Any]:
    """What one plugin returns from one hook, as a list. Raises PluginError; the caller says whose it is."""
    others = [p for p in _ordered(manager) if p is not plugin]
    try:
        results = manager.subset_hook_caller(hook, others)(**arguments)
        if any(isinstance(result, str | bytes | Mapping) for result in results):
            raise TypeError(f"it returned {one_line(repr(results[0]))[:60]}, not a list")
        return [item for result in results for item in result]
    except Exception as exc:
        raise PluginError(f"{hook} failed; correct the plugin or leave it out ({cause(exc)})") from exc


def _collect(loading: _Loading, plugin: object) -> None:
    """Add the rows and providers of ``plugin`` to the tables."""
    name = _name(loading.manager, plugin)
    place = loading.place(name)
    rows = loading.own_rows if loading.is_own(name) else loading.other_rows
    provided: set[tuple[str, str]] = set()
    before = len(loading.problems)
    try:
        for row in _call(loading.manager, plugin, "bmoe_archs"):
            wrong = row_problem(row)
            if wrong:
                loading.problem(f"{place}: {wrong}")
            else:
                rows.append((name, row))
        for hook, kind in _PROVIDER_HOOKS.items():
            for provider in _call(loading.manager, plugin, hook):
                wrong = _provider_problem(provider, kind, hook, "" if loading.is_own(name) else f"{name}.")
                if wrong:
                    loading.problem(f"{place}: {wrong}")
                else:
                    _add(loading, kind, provider, name)
                    provided.add((kind, provider.name))
    except PluginError as exc:
        loading.problem(f"{place}: {exc}", exc)
    if len(loading.problems) > before:
        loading.failed.add(name)
    elif loading.is_own(name):
        _match_registry(loading, name, provided)


def _match_registry(loading: _Loading, module: str, provided: set[tuple[str, str]]) -> None:
    """An in-tree module provides exactly the providers that registry.toml lists; one that has rows may have any."""
    own = (row for row in loading.registry.rows if row.module == module and row.kind != "arch")
    listed = {(str(row.kind), row.name) for row in own}
    for kind, name in sorted(listed ^ provided):
        wrong = "does not provide" if (kind, name) in listed else "is not listed with"
        loading.problem(f'registry.toml: {module} {wrong} {kind} "{name}"; make the two agree')


def _add(loading: _Loading, kind: str, provider: Provider[Any], name: str) -> None:
    taken = loading.origins.get((kind, provider.name))
    if taken is not None:
        place = loading.place(name)
        both = f"{loading.place(taken)} and {place}" if taken != name else f"{place} twice"
        loading.problem(f'{kind} "{provider.name}" is provided by {both}; remove or rename one')
        return
    loading.providers[kind][provider.name] = provider
    loading.origins[kind, provider.name] = name


def _provider_problem(provider: object, kind: str, hook: str, prefix: str) -> str:
    """Why ``provider`` cannot be one, or "" if it can; a name from outside starts with its plugin's ``prefix``."""
    if not isinstance(provider, Provider):
        return f"{hook} returned {one_line(repr(provider))[:60]}, which is no Provider; return bmoe.Provider(…)"
    name = provider.name
    if not isinstance(name, str) or not name or not name.isprintable() or name == "auto":
        return f"{hook} has a provider named {toml_value(name)}; give it another name"
    if not name.startswith(prefix):
        return f'{kind} "{name}" lacks the prefix of its plugin; name it "{prefix}{name}"'
    if not callable(provider.build) or not callable(provider.available):
        return f'{kind} "{name}": build and available must be functions; give functions'
    if not (isinstance(provider.options, type) and issubclass(provider.options, Options)):
        return f'{kind} "{name}": options is no model of options; derive it from bmoe.contracts.Options'
    for other in (*provider.needs, *provider.excludes):
        target_kind, _, target = str(other).partition(":")
        if target_kind not in KINDS or not target:
            return f'{kind} "{name}": {toml_value(other)} names no plugin; write "kind:name" or "kind:*"'
    return ""


def _catalog(loading: _Loading) -> Catalog:
    merged, problems = merge_rows(loading.own_rows, loading.other_rows, loading.place)
    for text in problems:
        loading.problem(text)
    registry = loading.registry
    known = {k: tuple(sorted({*registry.names(k), *loading.providers[k]})) for k in KINDS}
    known["arch"] = tuple(sorted(merged))
    origins = {**loading.origins, **{("arch", name): origin for name, (origin, _) in merged.items()}}
    return Catalog(
        archs=MappingProxyType({name: row for name, (_, row) in merged.items()}),
        providers=MappingProxyType({k: MappingProxyType(v) for k, v in loading.providers.items()}),
        known=MappingProxyType({str(k): names for k, names in known.items()}),
        manager=loading.manager,
        problems=tuple(dict.fromkeys(loading.problems)),
        failed=frozenset(loading.failed),
        _cause=loading.first_cause,
        _origins=MappingProxyType(origins),
        _experimental=frozenset(
            (str(row.kind), row.name)
            for row in registry.rows
            if row.stability == "experimental" and origins.get((row.kind, row.name)) == row.module
        ),
    )
