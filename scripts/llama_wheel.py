"""Make llama-cpp-python available: reuse an installed one, else a kept wheel, else build the parts that bmoe needs.

The package index has only its source. A full build compiles 193 files; without the image tools and llama.cpp's own
command-line helpers it is 83. The wheel is built for this machine's CPU and kept per user, keyed by version, Python,
platform and CPU flags, so that a second environment does not build again.

Example: .venv/bin/python scripts/llama_wheel.py
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

PACKAGE = "llama-cpp-python"
VERSION = "0.3.36"
BELOW = "0.4"
LEAN = "set(LLAMA_BUILD_COMMON OFF)\n"


def main(argv: list[str] | None = None) -> int:
    """Find or build the wheel and install it into the Python that runs this script."""
    args = parse(argv)
    have = installed_version()
    if have and not args.wheel_only:
        if in_range(have):
            print(f"{PACKAGE} {have} is installed; nothing to build")
            return 0
        print(f"{PACKAGE} {have} is installed, but bmoe is tested with >={VERSION},<{BELOW}; it will be replaced")
    if sys.prefix == sys.base_prefix and not args.wheel_only:
        print(f"error: {sys.executable} is not a virtual environment; run `make demo`, or give --wheel-only")
        return 1
    home = args.cache / cache_key(os.environ, portable=args.portable)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with locked(home / "lock"):
            wheel = kept_wheel(home) or build(home, portable=args.portable)
    except BuildError as error:
        print(f"error: {error}")
        return 1
    print(f"wheel: {wheel}")
    if args.wheel_only:
        return 0
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", str(wheel)], check=False).returncode


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--portable",
        action="store_true",
        default=os.environ.get("BMOE_PORTABLE") == "1",
        help="do not tune for this CPU (GGML_NATIVE=OFF), for a wheel that is to be shared; also BMOE_PORTABLE=1",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=default_cache(os.environ),
        metavar="DIR",
        help="where wheels are kept (default: %(default)s)",
    )
    parser.add_argument("--wheel-only", action="store_true", help="find or build the wheel, install nothing")
    return parser.parse_args(argv)


class BuildError(Exception):
    """The wheel could not be built; the text says why and what to do."""


def installed_version() -> str | None:
    """Version of llama-cpp-python in the running Python."""
    try:
        return metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        return None


def in_range(version: str) -> bool:
    """Whether ``version`` lies in the range that bmoe is tested with."""
    return release(VERSION) <= release(version) < release(BELOW)


def release(version: str) -> tuple[int, ...]:
    """Leading numbers of a version, for comparison; ``0.3.36.post1`` counts as ``0.3.36``."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def default_cache(env: Mapping[str, str]) -> Path:
    """Per-user folder of kept wheels."""
    base = Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "bmoe" / "wheels"


def cache_key(env: Mapping[str, str], *, portable: bool) -> str:
    """What a kept wheel depends on: version, Python, platform, CPU flags (or ``portable``) and the caller's flags."""
    python = f"{sys.implementation.name}{sys.version_info.major}.{sys.version_info.minor}"
    parts = [VERSION, python, re.sub(r"\W", "_", sysconfig.get_platform())]
    parts.append("portable" if portable else digest(cpu_flags()))
    if extra := env.get("CMAKE_ARGS", "").strip():
        parts.append(digest(extra))
    return "-".join(parts)


def digest(text: str) -> str:
    """Short name of a long text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Sorted instruction-set flags over all cores; the processor's name where there is no ``/proc/cpuinfo``."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    flags = {word for line in re.findall(r"(?im)^(?:flags|features)\s*:(.*)$", text) for word in line.split()}
    return " ".join([platform.machine(), *sorted(flags)])


def kept_wheel(home: Path) -> Path | None:
    """The wheel in ``home``; it was renamed there in one step, so it is whole."""
    return next(iter(sorted(home.glob("*.whl"))), None)


def build(home: Path, *, portable: bool) -> Path:
    """Build the wheel in a folder of its own, then move it into ``home`` in one step; raises BuildError."""
    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("clang++") or os.environ.get("CXX")):
        raise BuildError("no C++ compiler found; on Debian: apt install build-essential; on Termux: pkg install clang")
    log = home / "build.log"
    print(f"compiling {PACKAGE} {VERSION} from source: about 2-4 minutes on 2 cores, once for this user and CPU")
    print(f"full log: {log}", flush=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=home, ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        lean = folder / "lean.cmake"
        lean.write_text(LEAN)
        # pip's own wheel cache knows neither CPU nor flags, so in a shared home it would serve a wrong wheel.
        command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"]
        command += ["--wheel-dir", str(folder), f"{PACKAGE}=={VERSION}"]
        code = follow(command, build_environment(os.environ, lean, portable=portable), log)
        wheel = kept_wheel(folder)
        if code or wheel is None or not zipfile.is_zipfile(wheel):
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise BuildError(f"{PACKAGE} {VERSION} was not built (exit code {code}); end of {log}:\n{tail}")
        return wheel.replace(home / wheel.name)


def build_environment(env: Mapping[str, str], lean: Path, *, portable: bool) -> dict[str, str]:
    """The caller's, with the flags that leave out what bmoe does not use, and ``lean``'s folder for temporary files.

    An interrupted pip leaves its folders behind; in there they go with the rest.
    """
    flags = ["-DLLAVA_BUILD=OFF", shlex.quote(f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={lean}")]
    if portable:
        flags.append("-DGGML_NATIVE=OFF")
    return {**env, "CMAKE_ARGS": " ".join([*flags, env.get("CMAKE_ARGS", "")]).strip(), "TMPDIR": str(lean.parent)}


def follow(command: list[str], env: Mapping[str, str], log: Path) -> int:
    """Run ``command`` into ``log`` and say now and then how far it is; ends with the caller, whatever ends that."""
    start = time.monotonic()
    pause = 1.0 if sys.stdout.isatty() else 20.0
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, start_new_session=True
        )
        try:
            while True:
                try:
                    code = process.wait(timeout=pause)
                    break
                except subprocess.TimeoutExpired:
                    report(f"  {time.monotonic() - start:4.0f} s  {progress(log)}")
        finally:
            if process.poll() is None:
                end(process)
    report(f"  {time.monotonic() - start:4.0f} s  {'failed' if code else 'built'}")
    if sys.stdout.isatty():
        print()
    return code


def progress(log: Path) -> str:
    """How far the build is, from the last ``[done/all]`` of its log."""
    with log.open("rb") as source:
        source.seek(max(0, log.stat().st_size - 20_000))
        counts = re.findall(rb"\[(\d+)/(\d+)\]", source.read())
    return f"file {counts[-1][0].decode()} of {counts[-1][1].decode()}" if counts else "preparing"


def report(line: str) -> None:
    """Show a progress line: in place on a terminal, one below the other in a log."""
    print(f"\r{line:60}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a build with its compilers."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    else:
        process.terminate()
    process.wait()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold ``path`` so that two environments do not build the same wheel at once."""
    try:
        import fcntl
    except ImportError:  # Windows: two builds at once cost time, the rename keeps them right
        yield
        return
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            print("another build of the same wheel is under way; waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _terminate(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted; nothing was kept")
        sys.exit(130)
