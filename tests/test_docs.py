"""The documentation keeps up with the code: every hook, kind and command in it exists, every link and example works."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from pathlib import Path

import pytest

from bmoe import contracts, hookspecs
from bmoe.rows import read_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("examples/*/*.md"), *(ROOT / "docs").rglob("*.md")])
HOOKS = {name: hook for name, hook in vars(hookspecs).items() if name.startswith("bmoe_")}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(page: str) -> str:
    return (ROOT / page).read_text("utf-8")


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(language: str) -> list[object]:
    return [
        pytest.param(body, id=f"{shown(page)}-{number}")
        for page in PAGES
        for number, (kind, body) in enumerate(FENCE.findall(page.read_text("utf-8")))
        if kind == language
    ]


def signature(name: str) -> str:
    return name + str(inspect.signature(HOOKS[name])).replace("'", "")


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hook_has_a_heading_with_its_exact_signature(name: str):
    assert f"\n## `{signature(name)}`\n" in text("docs/reference/hooks.md")


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_hook_section_says_when_what_and_how(name: str):
    section = text("docs/reference/hooks.md").split(f"\n## `{signature(name)}`\n")[1].split("\n## ")[0]

    assert [part for part in ("*When:*", "*Return:*", "```python", f"def {name}(") if part not in section] == []


def test_no_hook_is_documented_that_does_not_exist():
    assert set(re.findall(r"\bbmoe_[a-z]+(?:_plan)?(?=[(`])", text("docs/reference/hooks.md"))) == set(HOOKS)


def test_every_kind_of_provider_is_documented():
    """The kinds are those that ``Provider`` names for ``needs`` and ``excludes``."""
    named = re.search(r"\(kinds: ([^)]*)\)", inspect.getdoc(contracts.Provider) or "")
    assert named is not None
    kinds = set(re.split(r",\s+", named.group(1)))

    for page in ("docs/reference/providers.md", "docs/reference/hooks.md"):
        assert kinds - set(re.findall(r"^\|.*?`([a-z]+)`.*\|$", text(page), re.MULTILINE) + rows(page)) == set()


def rows(page: str) -> list[str]:
    return re.findall(r"`([a-z]+)`(?= \|)", text(page))


def test_every_field_of_a_provider_is_documented():
    fields = set(contracts.Provider.__dataclass_fields__)

    assert (
        set(re.findall(r"^\| `(\w+)` \|", text("docs/reference/providers.md").split("## Kinds")[0], re.MULTILINE))
        == fields
    )


def test_every_kind_in_the_registry_is_documented():
    registry = tomllib.loads(text("registry.toml"))
    kinds = {row["kind"] for row in registry["plugin"]}

    assert kinds
    assert kinds - set(rows("docs/reference/providers.md")) == set()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_to_files(page: Path):
    local = [target.split("#")[0] for target in LINK.findall(page.read_text("utf-8")) if "://" not in target]

    assert [target for target in local if target and not (page.parent / target).exists()] == []


def test_every_page_is_reachable_from_the_index():
    """By links from page to page."""
    found: set[Path] = set()
    coming = [ROOT / "docs/index.md"]
    while coming:
        page = coming.pop()
        if page in found or page.suffix != ".md" or not page.exists():
            continue
        found.add(page)
        targets = LINK.findall(page.read_text("utf-8"))
        coming += [(page.parent / target.partition("#")[0]).resolve() for target in targets if "://" not in target]

    assert set((ROOT / "docs").rglob("*.md")) - found == set()


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_make_commands_exist(page: Path):
    targets = set(re.findall(r"^([a-z][a-z-]*):", text("Makefile"), re.MULTILINE))
    commands = re.findall(
        r"^make ([^\n#]*)$", "".join(body for _, body in FENCE.findall(page.read_text("utf-8"))), re.MULTILINE
    )
    commands += re.findall(r"`make ([^`]*)`", page.read_text("utf-8"))
    named = {word for command in commands for word in command.split() if "=" not in word}

    assert named - targets == set()


def test_readme_shows_both_commands_on_the_first_screen():
    first = text("README.md").splitlines()[:24]

    assert [command for command in ("make demo", "make test") if command not in first] == []


def test_bundled_profiles_are_those_of_the_readme():
    table = text("README.md").split("## Profiles")[1].split("```")[0]

    assert sorted(re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE)) == sorted(
        path.stem for path in (ROOT / "core/profiles").glob("*.toml")
    )


@pytest.mark.parametrize("source", blocks("toml"))
def test_toml_examples_are_toml(source: str):
    assert tomllib.loads(source)


def test_the_example_row_loads(tmp_path: Path):
    """The table of the page says the same as its Python form."""
    page = "docs/how-to/add-an-architecture.md"
    (tmp_path / "rows.toml").write_text(next(body for kind, body in FENCE.findall(text(page)) if kind == "toml"))

    assert read_rows(str(tmp_path / "rows.toml")) == example(page)["bmoe_archs"]()


@pytest.mark.parametrize("source", [block for block in blocks("python") if "bmoe.open" not in block.values[0]])
def test_python_examples_run(source: str):
    """Examples define plugins and gates; defining them needs no model."""
    exec(compile(source, "example", "exec"), {"__name__": "example", "__file__": "example.py"})


def example(page: str) -> dict[str, object]:
    space: dict[str, object] = {"__name__": "example"}
    body = next(body for kind, body in FENCE.findall(text(page)) if kind == "python")
    exec(compile(body, page, "exec"), space)
    return space


def test_the_example_policy_ranks_by_use():
    """The page's plugin, driven as the store drives it: the least used goes, never a pinned one, and counts fade."""
    (provider,) = example("docs/how-to/write-a-cache-policy.md")["bmoe_caches"]()
    facts = type("Facts", (), {"cache": contracts.CacheFacts(budget_bytes=3, capacity=3, cycle=2)})
    policy = provider.build(provider.options(window=8), facts)
    for key in (1, 2, 3):
        policy.touch([key])
        policy.admit(key, False)
    policy.touch([1, 3])

    assert policy.victim(()) == 2
    assert policy.victim({2}) == 1
    policy.touch([2, 2, 2])
    assert policy.victim(()) == 1
    for key in (1, 2, 3):
        policy.forget(key)
    assert policy.victim(()) is None


def test_the_example_plugin_fits_in_40_lines():
    body = next(body for kind, body in FENCE.findall(text("docs/how-to/write-a-cache-policy.md")) if kind == "python")

    assert len([line for line in body.splitlines() if line.strip()]) <= 40


def test_every_script_has_help():
    for path in (ROOT / "scripts").glob("*.py"):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "Example:" in (module.__doc__ or ""), path
