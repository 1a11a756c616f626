"""A result that can be shown to anyone: what is known to be harmless is taken over, and nothing else.

Text is where names, hosts and paths may stand. So a text is kept only if bmoe itself could have written it (the name of
one of its plugins, a choice of the profile) or if it is reduced to a form that has no room for a name (a version).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bmoe.bench import prompts
from bmoe.bench.result import Result
from bmoe.bench.vocabulary import REMOVED, RESOLVED, Vocabulary
from bmoe.bundled import bundled_models
from bmoe.telemetry import SCHEMA

_VERSION = re.compile(r"\d+(?:\.\d+)*(?:\.?(?:a|b|rc|dev|post)\d+)?")
_CPU = re.compile(r"[A-Z0-9][\w()@.,+ -]{0,80}", re.ASCII)
_SYSTEMS = ("Linux", "Darwin", "Windows")
_ARCHS = ("x86_64", "aarch64", "arm64", "armv7l", "riscv64", "ppc64le", "s390x", "AMD64")
# fmt: off
_FILESYSTEMS = (
    "ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "bcachefs", "overlay", "tmpfs", "vfat", "exfat", "ntfs",
    "ntfs3", "fuse", "fuseblk", "nfs", "nfs4", "cifs", "9p", "virtiofs", "apfs", "erofs", "sdcardfs",
)
# fmt: on
_MACHINE_NUMBERS = ("cpus", "memory_bytes", "page_bytes")
# fmt: off
_SHAPE = (
    "n_layer", "n_expert", "n_used", "n_embd", "n_vocab", "file_bytes", "expert_bytes", "dense_bytes", "cycle_bytes",
)
# fmt: on
_PROFILE = ("model", "stream", "cache", "fetch", "dense", "prefetch", "draft", "routing", "loss")
# fmt: off
_FAILURES = (
    "timeout", "protocol", "exit", "killed", "signal", "MemoryError", "ProfileError", "PluginError", "ModelError",
    "LogitsError", "NativeError", "ReadError",
)
# fmt: on
_SERIES = ("warmup_s", "decode_s", "read_wait_s", "manage_s", "hits", "lookups", "bytes", "evictions", "majflt")


def anonymous(result: Result) -> dict[str, Any]:
    """The report of ``result``: machine, versions, settings, resolved profiles, figures and series.

    Sides are called A, B, …. Without: paths, names of files, users and hosts, the text of errors, notices and remarks,
    and options of plugins that are not bmoe's own, by name or value.
    """
    whole = result.as_dict()
    known = Vocabulary()
    runs = [side["run"] for side in whole["sides"] if side["run"]]
    return {
        "schema": SCHEMA,
        "event": "bench_report",
        "complete": whole["complete"],
        "prompts": {"version": prompts.VERSION, "count": len(prompts.PROMPTS)},
        "settings": known.numbers(whole["settings"]),
        "machine": _machine(runs[0].get("machine", {})) if runs else None,
        "versions": _versions(runs[0].get("versions", {})) if runs else None,
        "sides": [_side(chr(ord("A") + index), side, known) for index, side in enumerate(whole["sides"])],
        "trials": [_trial(trial) for trial in whole["trials"]],
    }


def _side(name: str, side: Mapping[str, Any], known: Vocabulary) -> dict[str, Any]:
    run = side["run"] or {}
    failure = side["failure"]
    profile, resolved = run.get("profile", {}), run.get("resolved", {})
    return {
        "side": name,
        "varied": [known.override(text) for text in side["varied"]],
        "model": _model(run, known) if run else None,
        "profile": known.plain({key: profile[key] for key in _PROFILE if key in profile}) if run else None,
        "resolved": known.plain({key: resolved[key] for key in RESOLVED if key in resolved}),
        "figures": side["figures"],
        "against_baseline": side["against_baseline"],
        "failure": _among(failure["kind"], _FAILURES) if failure else None,
    }


def _model(run: Mapping[str, Any], known: Vocabulary) -> dict[str, Any]:
    bundled = {str(path): name for name, path in bundled_models().items()}
    shape = run.get("shape", {})
    return {
        "arch": known.text(str(run.get("arch"))),
        "bundled": bundled.get(str(run.get("model"))),
        **{key: shape[key] for key in _SHAPE if isinstance(shape.get(key), int)},
    }


def _trial(trial: Mapping[str, Any]) -> dict[str, Any]:
    numbers = ("round", "prompt", "prompt_tokens", "given", "open_s", "prefill_s", "peak_rss_bytes")
    return {
        "side": chr(ord("A") + trial["side"]),
        **{key: trial[key] for key in numbers},
        "entry": trial["entry"],
        **{key: trial[key] for key in _SERIES},
    }


def _machine(machine: Mapping[str, Any]) -> dict[str, Any]:
    cpu = _CPU.fullmatch(str(machine.get("cpu")))
    return {
        "system": _among(machine.get("system"), _SYSTEMS),
        "arch": _among(machine.get("arch"), _ARCHS),
        "cpu": cpu[0] if cpu else None,
        **{key: machine.get(key) if isinstance(machine.get(key), int) else None for key in _MACHINE_NUMBERS},
        "filesystem": _among(machine.get("filesystem"), _FILESYSTEMS),
    }


def _versions(found: Mapping[str, Any]) -> dict[str, str | None]:
    """Numbers alone: a kernel or a build of one's own may be named after its owner."""
    kept: dict[str, str | None] = {}
    for name in ("bmoe", "python", "llama-cpp-python", "numpy", "kernel"):
        text = str(found.get(name, "")).rpartition(" ")[2]
        version = _VERSION.match(text)
        kept[name] = version[0] if version else None
    return kept


def _among(value: object, names: tuple[str, ...]) -> str | None:
    """``value`` if it is one of ``names``, ``(removed)`` if it is another text, None if there is none."""
    if value is None:
        return None
    return str(value) if value in names else REMOVED
