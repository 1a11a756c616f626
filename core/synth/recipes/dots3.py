"""rednote's third generation. Tensors and metadata: ``src/models/dots3note.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth import latent
from bmoe.synth.latent import Latent
from bmoe.synth.recipe import Layer, Recipe, architecture

_WINDOWED = Latent(rank=16, nope=8, value=16)


def dots3note(m: Recipe) -> None:
    """dots3-note: latent attention, with an indexer or in a window with other dimensions; a head without experts."""
    full = [number % 2 == 0 for number in range(m.shape.n_layer)]
    heads = [m.shape.n_head if one else m.shape.n_head // 2 for one in [*full, *[False] * m.shape.n_nextn]]
    m.keys |= Latent().keys() | _WINDOWED.keys("_swa") | latent.indexer_keys() | latent.sigmoid_keys()
    m.keys |= {"attention.head_count": heads, "attention.sliding_window_pattern": [not one for one in full]}
    m.keys |= {"attention.indexer.types": full, "rope.freq_base_swa": m.shape.rope_base}
    m.output()
    m.embedding()
    for layer in m.layers():
        _attention(layer, Latent() if full[layer.number] else _WINDOWED, heads[layer.number])
        if full[layer.number]:
            latent.indexer(layer)
        latent.feed_forward(layer)
    for layer in m.heads():
        _attention(layer, _WINDOWED, heads[layer.number])
        layer.norm("ffn_norm")
        layer.ffn()
        layer.nextn()
        layer.tensor("nextn.embed_tokens.weight", (m.shape.n_embd, m.shape.n_vocab), "embedding")


def _attention(layer: Layer, kind: Latent, n_head: int) -> None:
    layer.norm("attn_norm")
    kind.attention(layer, n_head=n_head)
    layer.norm("attn_k_norm", kind.rope)
    layer.matrix("attn_gate", layer.shape.n_embd, n_head)


ARCHITECTURES = (architecture("dots3note", dots3note, n_dense=1, n_shared=1, n_nextn=1, window=16),)
