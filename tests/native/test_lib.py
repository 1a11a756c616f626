"""Only one copy of libggml-base, of a tested llama-cpp-python, is used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from bmoe.errors import NativeError
from bmoe.native import lib

ONE = """\
7f0000000000-7f0000010000 r--p 00000000 fe:00 11    /venv/lib/libggml-base.so.0
7f0000010000-7f0000080000 r-xp 00010000 fe:00 11    /venv/lib/libggml-base.so.0
7f0000080000-7f0000090000 rw-p 00080000 fe:00 11    /venv/lib/libggml-base.so.0
7f0000100000-7f0000180000 r-xp 00000000 fe:00 12    /venv/lib/libggml-cpu.so.0
7f0000200000-7f0000210000 rw-p 00000000 00:00 0
7f0000300000-7f0000310000 r--s 00000000 fe:00 13    /models/libggml-base of a model.gguf
"""


def test_segments_of_one_file_are_one_copy() -> None:
    assert ["/venv/lib/libggml-base.so.0"] == lib.mapped_copies("libggml-base", ONE)


def test_another_file_of_the_same_name_is_a_second_copy() -> None:
    second = "7f0000400000-7f0000410000 r-xp 00000000 fe:00 99    /other venv/lib/libggml-base.so.0.9\n"

    copies = lib.mapped_copies("libggml-base", ONE + second)

    assert ["/venv/lib/libggml-base.so.0", "/other venv/lib/libggml-base.so.0.9"] == copies


def test_the_same_inode_number_on_another_device_is_a_second_copy() -> None:
    second = "7f0000400000-7f0000410000 r-xp 00000000 fd:07 11    /mnt/libggml-base.so.0\n"

    assert 2 == len(lib.mapped_copies("libggml-base", ONE + second))


def test_no_copy_is_none() -> None:
    assert [] == lib.mapped_copies("libggml-base", "")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mapped files are only known on Linux")
def test_a_second_mapped_copy_is_refused_by_name(tmp_path: Path) -> None:
    lib.ggml()
    original = lib.mapped_copies("libggml-base", Path("/proc/self/maps").read_text())
    copy = tmp_path / "libggml-base.so.0"
    copy.write_bytes(Path(original[0]).read_bytes())
    program = (
        "import ctypes\nfrom bmoe.native import lib, tensor\nlib.llama()\n"
        f"ctypes.CDLL({str(copy)!r})\n"
        "try:\n    tensor.self_check()\nexcept lib.NativeError as error:\n    print(error)\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.startswith("expected one mapped libggml-base, found [")
    assert str(copy) in done.stdout
    assert 1 == done.stdout.count("\n")


@pytest.mark.parametrize("version", ["0.2.90", "0.3.35", "0.4.0", "0.4.0rc1", "1.0"])
def test_a_version_outside_the_tested_range_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", version)

    with pytest.raises(NativeError, match=rf"llama-cpp-python {version} is not supported; install one from 0\.3\.36"):
        lib.llama.__wrapped__()


@pytest.mark.parametrize("version", ["0.3.36", "0.3.37", "0.3.100", "0.3.36.post1"])
def test_a_version_inside_the_range_is_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(llama_cpp, "__version__", version)

    assert lib.llama.__wrapped__() is lib.llama()


def test_a_missing_binding_is_one_line_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)

    with pytest.raises(NativeError, match="llama-cpp-python cannot be loaded .* install it with") as caught:
        lib.llama.__wrapped__()

    assert "\n" not in str(caught.value)
