"""Synthetic models load, decode, repeat for a seed, and route as alike as they were asked to."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from bmoe.errors import ModelError
from bmoe.layout import read_model
from bmoe.synth import QUANTS, SHAPES, write_model
from bmoe.synth.blocks import BLOCK, random_rows
from bmoe.synth.vocabulary import EOS, N_BYTES, N_PLAIN, make_vocabulary
from bmoe.testing.models import TinyModels
from bmoe_plugins.archs.table import bmoe_archs

SUFFIXES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
ROWS = {row.name: row for row in bmoe_archs()}
TINY = [("tiny-qwen3moe", quant) for quant in QUANTS]
TINY += [(like, q) for like in ("tiny-gpt-oss", "tiny-glm4moe") for q in ("F32", "Q4_0", "Q8_0", "MXFP4")]


@pytest.fixture(scope="module", name="models")
def _models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


# ---- llama.cpp, plainly


class Llama:
    """A model in plain llama.cpp: tokens in, logits out."""

    def __init__(self, path: Path) -> None:
        self._c: Any = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        c = self._c
        self.nodes: list[str] = []
        """Names of what was computed, in order."""
        self._base = _mapped_base()
        params = c.llama_model_default_params()
        params.use_extra_bufts = False
        self._model = c.llama_model_load_from_file(str(path).encode(), params)
        assert self._model, f"llama.cpp does not load {path}"
        self._vocab = c.llama_model_get_vocab(self._model)
        context = c.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = 128
        context.n_threads = context.n_threads_batch = 1
        self._callback = context.cb_eval = type(context.cb_eval)(self._seen)
        self._context = c.llama_init_from_model(self._model, context)
        assert self._context

    def close(self) -> None:
        self._c.llama_free(self._context)
        self._c.llama_model_free(self._model)

    def tokens(self, text: str) -> list[int]:
        raw = text.encode()
        found = (self._c.llama_token * (len(raw) + 1))()
        count = self._c.llama_tokenize(self._vocab, raw, len(raw), found, len(found), False, True)
        assert count >= 0
        return list(found[:count])

    def text(self, tokens: Sequence[int]) -> str:
        buffer = ctypes.create_string_buffer(64)
        pieces = []
        for token in tokens:
            length = self._c.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
            pieces.append(buffer.raw[:length])
        return b"".join(pieces).decode()

    def decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The last token's logits; the context goes on from there."""
        array = (self._c.llama_token * len(tokens))(*tokens)  # the batch only points to it
        assert self._c.llama_decode(self._context, self._c.llama_batch_get_one(array, len(tokens))) == 0
        n_vocab = self._c.llama_vocab_n_tokens(self._vocab)
        return np.ctypeslib.as_array(self._c.llama_get_logits_ith(self._context, -1), (n_vocab,)).copy()

    def greedy(self, prompt: str, count: int) -> list[int]:
        out: list[int] = []
        batch = self.tokens(prompt)
        for _ in range(count):
            logits = self.decode(batch)
            assert np.isfinite(logits).all()
            batch = [int(logits.argmax())]
            out += batch
        return out

    def _seen(self, tensor: int, ask: bool, _: int) -> bool:
        if not ask:
            self.nodes.append(self._base.ggml_get_name(tensor).decode())
        return True


def _mapped_base() -> ctypes.CDLL:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    with open("/proc/self/maps") as maps:
        path = next(line.split()[-1] for line in maps if "libggml-base" in line)
    base = ctypes.CDLL(path)
    base.ggml_get_name.restype = ctypes.c_char_p
    base.ggml_get_name.argtypes = [ctypes.c_void_p]
    return base


@pytest.fixture(name="load")
def _load() -> Iterator[Any]:
    opened: list[Llama] = []

    def load(path: Path) -> Llama:
        opened.append(Llama(path))
        return opened[-1]

    yield load
    for llama in opened:
        llama.close()


@pytest.mark.parametrize(("like", "quant"), TINY)
def test_a_tiny_model_decodes_finite_and_varied(models: TinyModels, load: Any, like: str, quant: str) -> None:
    llama = load(models.path(like, quant))
    prompt = llama.tokens("Grüße, 世界! \U0001f600")
    assert llama.text(prompt) == "Grüße, 世界! \U0001f600"
    logits = llama.decode(prompt)
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 20
    assert logits.max() - np.sort(logits)[-20] > 0.1
    assert len({float(x) for x in logits[N_PLAIN:]}) > 200
    greedy = load(models.path(like, quant)).greedy("Hello, world", 24)
    assert len(set(greedy)) > 1
    assert min(greedy) >= N_PLAIN  # words: readable, and never the end by chance
    assert llama.text(greedy).isprintable()


@pytest.mark.parametrize("like", ["tiny-qwen3moe", "tiny-gpt-oss", "tiny-glm4moe"])
def test_the_graph_multiplies_in_the_order_of_the_architecture_row(models: TinyModels, load: Any, like: str) -> None:
    """Gate before up: built the other way round, but the graph is walked from its result."""
    llama = load(models.path(like))
    llama.decode([1, 2, 3])
    order = [n for n in llama.nodes if n in ("ffn_moe_gate-1", "ffn_moe_up-1", "ffn_moe_down-1")]
    assert order == ["ffn_moe_gate-1", "ffn_moe_up-1", "ffn_moe_down-1"]
    assert ROWS[SHAPES[like].arch].experts == (SUFFIXES,)


@pytest.mark.parametrize("like", ["qwen3-30b-a3b", pytest.param("gpt-oss-120b", marks=pytest.mark.slow)])
def test_one_layer_of_a_big_shape_decodes(load: Any, like: str, tmp_path: Path) -> None:
    """Experts as holes here, so that the file is small; dense weights are as large as the real ones."""
    path = write_model(tmp_path / "m.gguf", like, layers=1, sparse=True)
    facts = read_model(path, ROWS)
    shape = SHAPES[like]
    assert (facts.n_vocab, facts.n_embd, facts.n_expert, facts.n_used) == (
        shape.n_vocab, shape.n_embd, shape.n_expert, shape.n_used,
    )  # fmt: skip
    assert len(set(load(path).greedy("Hello", 4))) > 1


def test_true_entry_sizes() -> None:
    """Expert bytes of the named models at their usual quantisation."""
    block, nbytes = BLOCK["Q4_K"]
    assert 3 * 2048 * 768 // block * nbytes == 2654208
    block, nbytes = BLOCK["MXFP4"]
    assert 3 * 2880 * 2880 // block * nbytes == 13219200


# ---- bytes


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("like", ["tiny-qwen3moe", "tiny-gpt-oss", "tiny-glm4moe"])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, like: str) -> None:
    first = write_model(tmp_path / "a.gguf", like, seed=5, locality=0.5)
    again = write_model(tmp_path / "b.gguf", like, seed=5, locality=0.5)
    other = write_model(tmp_path / "c.gguf", like, seed=6, locality=0.5)
    assert digest(first) == digest(again) != digest(other)


def test_fewer_layers_are_the_first_layers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "tiny-qwen3moe", layers=2)
    assert read_model(path, ROWS).n_layer == 2


def test_experts_differ(models: TinyModels) -> None:
    path = models.path(quant="Q4_K")
    data = path.read_bytes()
    seen = set()
    for bank in read_model(path, ROWS).banks:
        for p in bank.projections:
            seen |= {data[p.offset + e * p.stride :][: p.stride] for e in range(bank.n_expert)}
    assert len(seen) == 4 * 3 * 8


@pytest.mark.parametrize("quant", BLOCK)
def test_blocks_have_the_deviation_that_was_asked_for(quant: str) -> None:
    raw = random_rows(quant, 512, 200, 0.02, np.random.default_rng(1))
    weights = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[quant]) if quant != "F32" else raw.view("<f4")
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.5 if quant == "MXFP4" else 0.03)
    assert abs(weights.mean()) < 0.2 * weights.std()


def test_sparse_experts_are_holes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "tiny-qwen3moe", quant="F32", sparse=True)
    full = write_model(tmp_path / "n.gguf", "tiny-qwen3moe", quant="F32")
    assert os.path.getsize(path) == os.path.getsize(full)
    facts = read_model(path, ROWS)
    data = path.read_bytes()
    assert not any(any(data[p.offset :][: p.stride * b.n_expert]) for b in facts.banks for p in b.projections)
    assert os.stat(path).st_blocks * 512 <= facts.file_bytes - facts.expert_bytes // 2


def test_nothing_is_left_behind_and_nothing_overwritten(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", "tiny-gpt-oss")
    before = digest(path)
    with pytest.raises(ModelError, match="exists already"):
        write_model(path, "tiny-gpt-oss", seed=1)
    assert digest(path) == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert digest(write_model(path, "tiny-gpt-oss", seed=1, overwrite=True)) != before


# ---- locality


def test_embeddings_are_as_alike_as_the_locality_says(models: TinyModels) -> None:
    for locality in (0.0, 0.3, 0.5, 0.7, 1.0):
        reader = gguf.GGUFReader(models.path("tiny-qwen3moe", locality=locality))
        rows = next(t.data for t in reader.tensors if t.name == "token_embd.weight")[N_PLAIN:]
        unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        cosines = (unit @ unit.T)[np.triu_indices(len(unit), 1)]
        assert cosines.mean() == pytest.approx(locality**2 / (locality**2 + (1 - locality) ** 2), abs=0.08)
        assert np.linalg.norm(rows, axis=1).mean() == pytest.approx(16, rel=0.1)  # sqrt(256): the norm is kept


def test_routing_overlap_rises_with_locality(models: TinyModels) -> None:
    """Router logits of the first layer's input, in numpy: the share of experts that two tokens have in common."""
    overlaps = []
    for locality in (0.0, 0.4, 0.6, 0.8, 1.0):
        reader = gguf.GGUFReader(models.path("tiny-qwen3moe", locality=locality))
        tensors = {t.name: t.data for t in reader.tensors}
        logits = tensors["token_embd.weight"] @ tensors["blk.0.ffn_gate_inp.weight"].T
        chosen = [set(np.argsort(-row)[:2].tolist()) for row in logits[N_PLAIN:]]
        pairs = [len(a & b) / 2 for a, b in pairwise(chosen)]
        overlaps.append(sum(pairs) / len(pairs))
    assert overlaps == sorted(overlaps)
    assert overlaps[0] < 0.35
    assert overlaps[3] > 0.7
    assert overlaps[4] == 1.0


# ---- progress


@pytest.mark.parametrize("sparse", [False, True])
def test_progress_counts_the_bytes_that_are_written_up_to_the_whole(tmp_path: Path, sparse: bool) -> None:
    told: list[tuple[int, int]] = []
    path = tmp_path / "m.gguf"
    write_model(path, "tiny-qwen3moe", quant="F32", sparse=sparse, progress=lambda *counts: told.append(counts))
    written, totals = [w for w, _ in told], {total for _, total in told}

    assert written == sorted(written)
    assert totals == {written[-1]}
    assert (path.stat().st_size - written[-1] > 1 << 20) is sparse


def test_what_progress_raises_leaves_nothing(tmp_path: Path) -> None:
    def stop(written: int, total: int) -> None:
        if written:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "m.gguf", "tiny-qwen3moe", progress=stop)
    assert list(tmp_path.iterdir()) == []


# ---- vocabulary and arguments


def test_tokens_are_distinct_and_cover_every_byte() -> None:
    vocabulary = make_vocabulary(151936)
    assert len(vocabulary.tokens) == len(vocabulary.types) == len(set(vocabulary.tokens)) == 151936
    assert len(set(vocabulary.tokens[:N_BYTES])) == 256
    assert vocabulary.tokens[EOS] == "<|end|>"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"like": "qwen3-30b-a3"}, "did you mean 'qwen3-30b-a3b'"),
        ({"quant": "Q4_L"}, "did you mean 'Q4_"),
        ({"like": "tiny-gpt-oss", "quant": "Q4_K"}, "blocks of 256 weights and tiny-gpt-oss rows of 192"),
        ({"like": "tiny-glm4moe", "layers": 1}, "the first 1 of tiny-glm4moe have no experts; give more"),
        ({"like": "gpt-oss-120b", "quant": "Q6_K"}, "choose of F32, Q4_0, Q8_0, MXFP4"),
        ({"layers": 0}, "layers = 0"),
        ({"layers": -1}, "layers = -1"),
        ({"layers": 10**9}, "layers = 1000000000"),
        ({"seed": -1}, "seed = -1"),
        ({"locality": 1.5}, "locality = 1.5"),
        ({"locality": float("nan")}, "locality = nan"),
        ({"like": "gpt-oss-120b", "quant": "F32", "layers": 1024}, "MiB are needed"),
    ],
)
def test_an_argument_that_cannot_be_is_refused(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        write_model(tmp_path / "m.gguf", **{"like": "tiny-qwen3moe", **arguments})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_and_one_in_the_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        write_model(tmp_path / "absent" / "m.gguf", "tiny-qwen3moe")
    with pytest.raises(ModelError, match="is a directory"):
        write_model(tmp_path, "tiny-qwen3moe", overwrite=True)
