"""What is installed, and does it fit together: versions, llama.cpp's structures, the seam, compiler, kernel."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from typing import Any

from bmoe.doctor.findings import Check, Finding, Sources, note, ok, problem, text_of
from bmoe.telemetry import versions

_OLDEST = (3, 10)

REINSTALL = "install bmoe with its dependencies again (make demo)"
REBUILD = "install a tested llama-cpp-python, built on this machine (make demo compiles it)"
PROC = "mount /proc (mount -t proc proc /proc): it tells where llama.cpp's libraries were loaded"
COMPILE_SEAM = (
    "install a C compiler and Python's headers and install bmoe again; until then the slower Python seam serves"
)
GET_COMPILER = "install a C compiler (Debian: apt install build-essential; Termux: pkg install clang) before an update"
LINUX = "use Linux, or WSL 2 on Windows; what bmoe measures and reads is written for Linux"
WSL = (
    "give WSL enough memory in .wslconfig ([wsl2] memory=…), and keep models inside its own file system, not on /mnt/c"
)
ANDROID = "keep models in Termux's own folder, hold a wake lock (termux-wake-lock), and leave memory for Android"
URING = "nothing to do: aio and pread serve; kernel.io_uring_disabled=0, or another seccomp profile, would allow it"
USERFAULT = (
    "nothing to do: no plugin of bmoe needs it; vm.unprivileged_userfaultfd=1, or another sandbox, would allow it"
)
AIO = "nothing to do if uring or pread serve; else raise fs.aio-max-nr, or allow io_setup in the sandbox"
NO_FETCHER = "allow one of them, or install bmoe again; without a fetcher nothing can be streamed"


def packages(sources: Sources) -> Finding:
    """Versions of everything that a bug report names."""
    found = versions()
    shown = ", ".join(f"{name} {version}" for name, version in found.items() if name != "kernel")
    absent = [name for name, version in found.items() if version == "not installed" and name != "bmoe"]
    if sys.version_info < _OLDEST or absent:
        return problem(shown, REINSTALL, **found)
    return ok(shown, **found)


def system(sources: Sources) -> Finding:
    """The kernel, and whether it is one of those with habits of their own: WSL, Android."""
    release = text_of(sources.root / "proc/sys/kernel/osrelease") or platform.release()
    banner = f"{release} {text_of(sources.root / 'proc/version')}".lower()
    shown = f"{platform.system()} {release} on {platform.machine()}"
    if not sys.platform.startswith(("linux", "android")):
        return note(shown, LINUX)
    if "microsoft" in banner:
        kind = "WSL 2" if "wsl2" in banner or "standard" in banner else "WSL"
        return note(f"{kind}: {shown}", WSL, kind=kind)
    if "android" in banner or (sources.root / "system/build.prop").exists():
        return note(f"Android: {shown}", ANDROID, kind="Android")
    inside = _container(sources)
    return ok(f"{shown}, in a container ({inside})" if inside else shown, kind=inside or "Linux")


def _container(sources: Sources) -> str:
    for file, name in ((".dockerenv", "docker"), ("run/.containerenv", "podman")):
        if (sources.root / file).exists():
            return name
    return text_of(sources.root / "run/systemd/container")


def structures(sources: Sources) -> Finding:
    """llama.cpp loads, and its structures are those that bmoe writes into."""
    answer = sources.ask("software:probe_structures", (), 30)
    if answer.failure:
        return problem(answer.failure, PROC if "/proc/self/maps" in answer.failure else REBUILD)
    return ok(f"struct ggml_tensor agrees with llama-cpp-python {answer.told[-1]}", version=answer.told[-1])


def probe_structures() -> str:
    """Compare the structures; the version of llama-cpp-python. Raises NativeError."""
    from importlib.metadata import version

    from bmoe.native import lib, tensor

    lib.llama()
    tensor.self_check()
    return version("llama-cpp-python")


def seam(sources: Sources) -> Finding:
    """Which of the two seams answers llama.cpp."""
    answer = sources.ask("software:probe_seam", (), 15)
    if not answer.failure and not answer.told[-1]:
        return ok("compiled", seam="c")
    return note(f"Python: {answer.failure or answer.told[-1]}", COMPILE_SEAM, seam="python")


def probe_seam() -> str:
    """Why the compiled seam cannot be used, or ""; made once, since a file that loads may still be another's."""
    from bmoe.native.compiled import compiled_seam_missing, make_seam

    missing = compiled_seam_missing()
    if not missing:
        make_seam("c", ())
    return missing


def compiler(sources: Sources) -> Finding:
    """A C compiler, which an update of llama-cpp-python will want."""
    for name in ("cc", "gcc", "clang"):
        place = sources.which(name)
        if not place:
            continue
        try:
            command = [place, "--version"]
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=3,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return note(f"{place} does not run: {error}", GET_COMPILER)
        if done.returncode:
            return note(f"{place} --version ends with exit code {done.returncode}", GET_COMPILER)
        return ok((done.stdout.splitlines() or [place])[0], path=place)
    return note("none found (cc, gcc, clang)", GET_COMPILER)


def io_uring(sources: Sources) -> Finding:
    """Whether the kernel grants a ring."""
    return _granted(sources, "software:probe_io_uring", URING)


def probe_io_uring() -> str:
    """Why io_uring cannot be used, or ""."""
    from bmoe.native import uring

    return uring.missing()


def native_aio(sources: Sources) -> Finding:
    """Whether the kernel grants a context."""
    return _granted(sources, "software:probe_aio", AIO)


def probe_aio() -> str:
    """Why native AIO cannot be used, or ""."""
    from bmoe.native import aio

    return aio.missing()


def userfaultfd(sources: Sources) -> Finding:
    """Whether page faults may be waited for."""
    return _granted(sources, "software:probe_userfaultfd", USERFAULT)


def probe_userfaultfd() -> str:
    """Why userfaultfd cannot be used, or ""."""
    from bmoe.native import faults

    return faults.missing()


def _granted(sources: Sources, probe: str, remedy: str) -> Finding:
    answer = sources.ask(probe, (), 10)
    missing = answer.failure or answer.told[-1]
    if re.fullmatch("ended by SIG(SYS|KILL)", answer.failure):
        missing = f"the sandbox ends a process that tries it ({answer.failure.removeprefix('ended by ')})"
    return note(str(missing), remedy, granted=False) if missing else ok("granted", granted=True)


def fetchers(sources: Sources) -> Finding:
    """Which fetchers can run here."""
    usable, refused = usable_fetchers(sources)
    shown = ", ".join([*usable, *(f"not {name} ({why})" for name, why in refused.items())])
    if not usable:
        return problem(shown or "none", NO_FETCHER)
    return ok(shown, usable=usable, refused=refused)


def usable_fetchers(sources: Sources) -> tuple[list[str], dict[str, str]]:
    """Names of the fetchers that can run here, and why the others cannot; each is asked in a process of its own."""
    from bmoe.plugins import load_all
    from bmoe.registry import load_registry

    if "fetchers" in sources.known:
        found: tuple[list[str], dict[str, str]] = sources.known["fetchers"]
        return found
    usable: list[str] = []
    refused: dict[str, str] = {}
    for name in load_all(load_registry()).providers["fetch"]:
        answer = sources.ask("software:probe_fetcher", (name,), 10)
        why = answer.failure or str(answer.told[-1])
        if why:
            refused[name] = why
        else:
            usable.append(name)
    sources.known["fetchers"] = usable, refused
    return usable, refused


def probe_fetcher(name: str) -> Any:
    """Why one fetcher cannot run here, or ""."""
    from bmoe.plugins import load_all
    from bmoe.registry import load_registry

    return load_all(load_registry()).providers["fetch"][name].available()


CHECKS = (
    Check("packages", "are bmoe's packages there", packages, (REINSTALL,), needed=True),
    Check("system", "which kernel is it", system, (LINUX, WSL, ANDROID)),
    Check(
        "structures",
        "do llama.cpp's structures agree with bmoe's",
        structures,
        (REBUILD, PROC),
        seconds=35,
        needed=True,
    ),
    Check("seam", "is the compiled seam in use", seam, (COMPILE_SEAM,), seconds=20),
    Check("compiler", "can packages be built here", compiler, (GET_COMPILER,), seconds=12),
    Check("io_uring", "does the kernel grant io_uring", io_uring, (URING,), seconds=15),
    Check("native AIO", "does the kernel grant native AIO", native_aio, (AIO,), seconds=15),
    Check("userfaultfd", "does the kernel grant userfaultfd", userfaultfd, (USERFAULT,), seconds=15),
    Check("fetchers", "which readers can run here", fetchers, (NO_FETCHER,), seconds=60, needed=True),
)
