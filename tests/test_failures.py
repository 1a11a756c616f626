"""What can fail says in one line what is wrong, and the session generates again, with the logits of a fresh run."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import bmoe
from bmoe import BmoeError, Conversation, Engine
from bmoe.errors import ModelError, PluginError, ProfileError, ReadError
from bmoe.native import io
from bmoe.native.evalhook import compiled_seam_missing
from bmoe.testing.models import TinyModels
from bmoe_plugins.caches.lru import Lru
from bmoe_plugins.fetch.pread import PreadFetcher

PROFILE = {"model": {"threads": 1, "ctx": 256, "ubatch": 16}}
PROMPT = [5, 300, 301, 7, 280, 412, 33]
LONG = [(i * 37 + 11) % 512 for i in range(50)]
EVICTING = "cache.budget_mb=1.5"
FETCHERS = [
    pytest.param(("pread", 1), id="pread-1"),
    pytest.param(("pread", 4), id="pread-4"),
    pytest.param(("aio", 1), id="aio", marks=pytest.mark.skipif(bool(io.aio_missing()), reason="no native AIO here")),
]


@pytest.fixture(name="models", scope="module")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.fixture(name="model", scope="module")
def _model(models: TinyModels) -> str:
    return str(models.path())


def run(conversation: Conversation, prompt: Sequence[int] = PROMPT, n: int = 6) -> str:
    assert n == len(list(conversation.generate(prompt, n, hash_logits=True)))
    assert conversation.summary is not None
    assert conversation.summary.logits_sha256 is not None
    return conversation.summary.logits_sha256


@pytest.fixture(name="expected", scope="module")
def _expected(model: str) -> dict[str, str]:
    """The hashes of fresh runs, by prompt."""
    with bmoe.open(PROFILE, model, ["cache.budget_mb=0"]) as engine, engine.conversation() as conversation:
        return {"PROMPT": run(conversation), "LONG": run(conversation, LONG)}


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


def stop_of(conversation: Conversation) -> str:
    assert conversation.summary is not None
    return conversation.summary.stop


# ---- reads


class Fault:
    """Makes the n-th read below every plugin fail, once it is armed; ``result`` is a count or a negative errno."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.result: int | None = None
        self._lock = threading.Lock()
        real_pread, real_collect = io.pread, io.AioCalls.collect

        def pread(fd: int, address: int, nbytes: int, offset: int) -> int:
            got = real_pread(fd, address, nbytes, offset)
            if not self._strikes():
                return got
            assert self.result is not None
            short = self.result
            if short > 0:
                ctypes.memset(address + short, 0xAA, nbytes - short)
                self.arm(0, 0)  # the rest of a short read is not there either
            return short

        def collect(calls: io.AioCalls, least: int, most: int, events: int) -> int:
            got = real_collect(calls, least, most, events)
            for index in range(got):
                if self._strikes():
                    assert self.result is not None
                    ctypes.c_int64.from_address(events + 32 * index + 16).value = self.result
            return got

        monkeypatch.setattr(io, "pread", pread)
        monkeypatch.setattr(io.AioCalls, "collect", collect)

    def arm(self, n: int, result: int) -> None:
        self.left, self.result = n, result

    def _strikes(self) -> bool:
        with self._lock:
            if self.left < 0:
                return False
            self.left -= 1
            return self.left < 0


@pytest.fixture(name="fault")
def _fault(monkeypatch: pytest.MonkeyPatch) -> Fault:
    return Fault(monkeypatch)


@pytest.mark.parametrize("fetcher", FETCHERS)
@pytest.mark.parametrize("budget", ["cache.budget_mb=0", EVICTING])
@pytest.mark.parametrize(
    ("result", "said"),
    [
        (-errno.EIO, r"read of \d+ bytes at offset \d+ failed: Input/output error \(EIO\); check the drive"),
        (-errno.EINVAL, r"read of \d+ bytes at offset \d+ failed: Invalid argument \(EINVAL\)"),
        (0, r"read of \d+ bytes at offset \d+ ended after 0 of \d+ bytes; the file has \d+ bytes now"),
        (512, r"read of \d+ bytes at offset \d+ ended after \d+ of \d+ bytes; the file has \d+ bytes now"),
    ],
    ids=["EIO", "EINVAL", "empty", "short"],
)
def test_a_failed_read_names_file_offset_length_and_reason_and_the_session_goes_on(
    model: str,
    expected: dict[str, str],
    fault: Fault,
    fetcher: tuple[str, int],
    budget: str,
    result: int,
    said: str,
) -> None:
    overrides = [budget, f"fetch.plugin={fetcher[0]}", f"fetch.lanes={fetcher[1]}"]
    with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
        for n in (0, 3, 17, 40):
            fault.arm(n, result)
            with pytest.raises(ReadError, match=said) as caught:
                list(conversation.generate(LONG, 6))
            assert one_line(caught.value).startswith(f"{model}: read of ")
            assert "error" == stop_of(conversation)
            assert conversation.tokens == LONG[: len(conversation.tokens)]
            fault.left = -1
            assert expected["PROMPT"] == run(conversation)
        assert expected["LONG"] == run(conversation, LONG)


@pytest.mark.parametrize("fetcher", FETCHERS)
def test_a_read_that_fails_while_decoding_leaves_the_tokens_before_it(
    model: str, expected: dict[str, str], fault: Fault, fetcher: tuple[str, int]
) -> None:
    overrides = ["cache.budget_mb=0", f"fetch.plugin={fetcher[0]}", f"fetch.lanes={fetcher[1]}"]
    with bmoe.open(PROFILE, model, overrides) as engine, engine.conversation() as conversation:
        whole = [token.id for token in conversation.generate(PROMPT, 6)]
        stream = conversation.generate(PROMPT, 6)
        tokens = [next(stream).id, next(stream).id]
        fault.arm(7, -errno.EIO)
        with pytest.raises(ReadError):
            next(stream)
        fault.left = -1

        assert whole[:2] == tokens
        assert PROMPT + tokens[:1] == conversation.tokens
        assert whole[2:] == [token.id for token in conversation.generate(tokens[1:], 4, append=True)]
        assert expected["PROMPT"] == run(conversation)


def test_a_failure_in_a_later_ubatch_keeps_the_ubatches_before_it(model: str, fault: Fault) -> None:
    with bmoe.open(PROFILE, model, ["cache.budget_mb=0", "fetch.plugin=pread", "fetch.lanes=1"]) as engine:
        reads: list[int] = []
        with engine.conversation() as conversation:
            whole = [token.id for token in conversation.generate(LONG, 4)]
            assert engine.stream is not None
            before = engine.stream.counters.reads
            list(conversation.generate(LONG[:33], 1))
            reads.append(engine.stream.counters.reads - before)

            # 32 tokens are two whole ubatches; the third fails at its first read
            list(conversation.generate(LONG[:32], 1))
            fault.arm(engine.stream.counters.reads - before - reads[0], -errno.EIO)
            with pytest.raises(ReadError):
                list(conversation.generate(LONG, 4))
            fault.left = -1
            assert LONG[:32] == conversation.tokens
            assert whole == [token.id for token in conversation.generate(LONG[32:], 4, append=True)]


@pytest.mark.parametrize("fetcher", FETCHERS)
@pytest.mark.parametrize("direct", ["true", "false"])
def test_a_file_truncated_after_open_is_named_and_works_again_once_restored(
    model: str, expected: dict[str, str], tmp_path: Path, fetcher: tuple[str, int], direct: str
) -> None:
    content = Path(model).read_bytes()
    path = tmp_path / "copy.gguf"
    path.write_bytes(content)
    overrides = [
        "cache.budget_mb=0",
        f"fetch.plugin={fetcher[0]}",
        f"fetch.lanes={fetcher[1]}",
        f"fetch.direct={direct}",
    ]
    with bmoe.open(PROFILE, str(path), overrides) as engine, engine.conversation() as conversation:
        cut = engine.facts.banks[-1].projections[0].offset + 100
        assert expected["PROMPT"] == run(conversation)
        os.truncate(path, cut)
        for _ in range(2):
            with pytest.raises(ReadError) as caught:
                list(conversation.generate(PROMPT, 6))
            text = one_line(caught.value)
            assert text.startswith(f"{path}: read of ")
            assert f"; the file has {cut} bytes now, was it truncated?" in text
        with open(path, "r+b") as file:
            file.seek(cut)
            file.write(content[cut:])
        assert expected["PROMPT"] == run(conversation)


# ---- plugins


class Fuse:
    """Makes a method of a plugin class raise ``error`` at its n-th call from when it is lit, once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str) -> None:
        self.left = -1
        self.error: BaseException | Callable[[], object] = AssertionError("never lit")
        real = getattr(owner, method)

        def call(*arguments: Any) -> Any:
            if self.left >= 0:
                self.left -= 1
                if self.left < 0:
                    if isinstance(self.error, BaseException):
                        raise self.error
                    self.error()
            return real(*arguments)

        monkeypatch.setattr(owner, method, call)


METHODS = [
    (Lru, "touch"),
    (Lru, "admit"),
    (Lru, "victim"),
    (Lru, "forget"),
    (PreadFetcher, "submit"),
    (PreadFetcher, "wait"),
]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of address space are Linux's")
SEAMS = ["python", pytest.param("c", marks=pytest.mark.skipif(bool(compiled_seam_missing()), reason="not compiled"))]


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize(("owner", "method"), METHODS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.parametrize("error", [ValueError("of a plugin"), KeyboardInterrupt("now")], ids=["error", "interrupt"])
def test_what_a_plugin_raises_surfaces_as_itself_and_the_conversation_generates_again(
    model: str,
    expected: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    seam: str,
    owner: type,
    method: str,
    error: BaseException,
) -> None:
    fuse = Fuse(monkeypatch, owner, method)
    fuse.error = error
    overrides = [EVICTING, "fetch.plugin=pread"]
    with bmoe.open(PROFILE, model, overrides, seam=seam) as engine, engine.conversation() as conversation:
        for n in (0, 1, 4, 9):
            fuse.left = n
            with pytest.raises(type(error)) as caught:
                list(conversation.generate(LONG, 6))

            assert error is caught.value
            assert fuse.left == -1
            assert "error" == stop_of(conversation)
            assert expected["PROMPT"] == run(conversation)
        assert expected["LONG"] == run(conversation, LONG)
        assert engine.stream is not None
        assert engine.stream.store.held_bytes <= engine.stream.store.budget_bytes


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("method", ["touch", "admit", "victim"])
def test_a_plugin_that_fails_every_time_fails_with_its_first_error(
    model: str, monkeypatch: pytest.MonkeyPatch, seam: str, method: str
) -> None:
    raised: list[BaseException] = []

    def fail(*arguments: object) -> None:
        raised.append(RuntimeError(f"number {len(raised)}"))
        raise raised[-1]

    monkeypatch.setattr(Lru, method, fail)
    with bmoe.open(PROFILE, model, [EVICTING], seam=seam) as engine, engine.conversation() as conversation:
        for _ in range(2):
            raised.clear()
            with pytest.raises(RuntimeError) as caught:
                list(conversation.generate(LONG, 6))
            assert raised[0] is caught.value


@pytest.mark.skipif(not hasattr(signal, "raise_signal"), reason="no signals here")
@pytest.mark.parametrize("seam", SEAMS)
def test_a_real_interrupt_inside_a_callback_ends_the_decode(
    model: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch, seam: str
) -> None:
    fuse = Fuse(monkeypatch, Lru, "touch")
    fuse.error = lambda: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with bmoe.open(PROFILE, model, [EVICTING], seam=seam) as engine, engine.conversation() as conversation:
            for n in (0, 3, 8):
                fuse.left = n
                with pytest.raises(KeyboardInterrupt):
                    list(conversation.generate(LONG, 6))
                assert expected["PROMPT"] == run(conversation)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_policy_that_names_a_pinned_entry_is_a_plugin_error(
    model: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Lru, "victim", lambda policy, pinned: min(pinned) if pinned else None)
        engine = bmoe.open(PROFILE, model, [EVICTING])
    with engine, engine.conversation() as conversation, pytest.raises(PluginError, match="not resident or is pinned"):
        list(conversation.generate(LONG, 6))


# ---- models


def expect(error: type[BmoeError], model: str, *overrides: str, profile: dict[str, Any] | None = None) -> str:
    with pytest.raises(error) as caught:
        bmoe.open(profile or PROFILE, model, overrides)
    return one_line(caught.value)


def test_a_directory_is_no_model(tmp_path: Path) -> None:
    assert f"{tmp_path}: is a directory; name the .gguf file in it" in expect(ModelError, str(tmp_path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'no.gguf'}: no such file" in expect(ModelError, str(tmp_path / "no.gguf"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "HTML"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "gguf"),
        (b"GGUF", "gguf"),
        (b"just text", "gguf"),
    ],
    ids=["empty", "html", "png", "short", "text"],
)
def test_a_file_that_is_no_gguf_says_what_it_is(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)

    text = expect(ModelError, str(path))

    assert text.startswith(f"{path}: ")
    assert said.lower() in text.lower().replace(str(path).lower(), "")


def test_a_dense_model_has_nothing_to_stream(model: str, tmp_path: Path) -> None:
    path = tmp_path / "dense.gguf"
    path.write_bytes(Path(model).read_bytes().replace(b"_exps.weight", b"_exqs.weight"))

    text = expect(ModelError, str(path))

    assert f"{path}: a qwen3moe model without routed experts" in text
    assert "llama.cpp runs it directly" in text


def test_an_unknown_architecture_lists_the_known_and_how_to_add_one(model: str, tmp_path: Path) -> None:
    path = tmp_path / "unknown.gguf"
    path.write_bytes(Path(model).read_bytes().replace(b"qwen3moe", b"qwen9moe"))

    text = expect(ModelError, str(path))

    assert f"{path}: architecture 'qwen9moe' has experts but no row is known for it" in text
    assert "close to 'qwen3moe'" in text
    assert "known: " in text
    assert "qwen3moe" in text.partition("known: ")[2]
    assert "add one: a TOML file with its row, named in the profile's plugins.archs" in text


def test_a_file_that_llama_cpp_refuses_carries_its_reason(model: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    # the router of one layer under a name that the graph does not know
    path.write_bytes(Path(model).read_bytes().replace(b"blk.1.ffn_gate_inp.weight", b"blk.1.ffn_gate_ixp.weight"))

    text = expect(ModelError, str(path))

    assert text.startswith(f"{path}: llama.cpp cannot load this model: ")
    assert "blk.1.ffn_gate_inp.weight" in text


def test_a_truncated_download_is_refused_before_llama_cpp_maps_it(model: str, tmp_path: Path) -> None:
    path = tmp_path / "part.gguf"
    content = Path(model).read_bytes()
    path.write_bytes(content[: len(content) // 2])

    assert expect(ModelError, str(path)).startswith(f"{path}: ")


def test_no_model_at_all_says_how_to_give_one() -> None:
    with pytest.raises(BmoeError, match=r"--model FILE, or set model\.path"):
        bmoe.open(PROFILE)


# ---- budgets and memory


def test_a_budget_below_one_cycle_is_refused_with_the_number_needed(model: str) -> None:
    text = expect(ProfileError, model, "cache.policy=lru", "cache.budget_mb=0.5")

    assert "cache.budget_mb = 0.5 is below what one token uses (8 experts)" in text
    needed = int(text.partition("give at least ")[2].partition(",")[0])
    with bmoe.open(PROFILE, model, ["cache.policy=lru", f"cache.budget_mb={needed}"]) as engine:
        assert engine.plan.budget.bytes == needed << 20


def test_an_automatic_budget_below_one_cycle_becomes_0_with_a_notice(model: str, expected: dict[str, str]) -> None:
    with bmoe.open(PROFILE, model, ["cache.ceil_mb=0.5"]) as engine, engine.conversation() as conversation:
        assert 0 == engine.plan.budget.bytes
        (notice,) = engine.record.notices
        assert 'cache.budget_mb = "auto" became 0' in notice
        assert "one token uses 1" in notice
        assert expected["PROMPT"] == run(conversation)


def limited(model: str, room: int, failing: str) -> subprocess.CompletedProcess[str]:
    """Run ``failing`` with ``room`` bytes of address space left, then lift the limit and generate three tokens."""
    program = f"""
import resource
import bmoe
def opened(*overrides):
    return bmoe.open({PROFILE!r}, {model!r}, ["fetch.plugin=pread", "fetch.lanes=1", *overrides])
opened().close()
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
hard = resource.getrlimit(resource.RLIMIT_AS)[1]
resource.setrlimit(resource.RLIMIT_AS, (used + {room}, hard))
try:
    {failing}
except bmoe.BmoeError as error:
    print(type(error).__name__, error)
resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
with opened() as engine:
    print(len(list(engine.conversation().generate([1, 2, 3], 3))))
"""
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)


@LINUX
def test_a_context_too_big_for_memory_is_an_error_that_names_the_knob(model: str) -> None:
    done = limited(model, 1 << 30, "opened('model.ctx=4194304')")

    assert 0 == done.returncode, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NativeError llama.cpp cannot create a context of 4194304 tokens: ")
    assert first.endswith("; lower model.ctx or model.ubatch")
    assert "3" == second


@LINUX
def test_memory_for_the_experts_that_is_not_granted_is_an_error_not_a_crash(model: str) -> None:
    done = limited(model, 1 << 30, "from bmoe.native import memory; memory.reserve(2 << 30)")

    assert 0 == done.returncode, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("NativeError cannot reserve 2048 MiB of address space")
    assert "3" == second


@pytest.fixture(name="engine")
def _engine(model: str) -> Iterator[Engine]:
    with bmoe.open(PROFILE, model, ["model.ctx=32"]) as engine:
        yield engine


def test_a_prompt_longer_than_the_context_is_refused_and_the_next_one_is_served(
    engine: Engine, expected: dict[str, str]
) -> None:
    with engine.conversation() as conversation:
        with pytest.raises(ModelError) as caught:
            conversation.generate(LONG, 6)
        assert "the prompt has 50 tokens and the context has room for 31" in one_line(caught.value)
        assert expected["PROMPT"] == run(conversation)
