"""Nomic's models. Tensors and metadata: ``src/models/{bert,nomic-bert-moe}.cpp`` of llama.cpp."""

from __future__ import annotations

from bmoe.synth.recipe import Recipe, architecture


def nomic_bert_moe(m: Recipe) -> None:
    """nomic-embed-text-v2-moe: an encoder, whose result is a vector; experts without a gate in every other layer."""
    m.keys |= {"attention.causal": False, "attention.layer_norm_epsilon": 1e-5, "moe_every_n_layers": 2}
    m.keys |= {"tokenizer.ggml.token_type_count": 1, "pooling_type": 1}
    m.embedding()
    m.tensor("token_types.weight", (m.shape.n_embd, 1), "bias")
    m.norm("token_embd_norm", bias=True)
    for layer in m.layers():
        layer.matrix("attn_qkv", m.shape.n_embd, 3 * m.shape.n_embd, bias=True)
        layer.matrix("attn_output", m.shape.n_embd, m.shape.n_embd, bias=True)
        layer.norm("attn_output_norm", bias=True)
        if layer.number % 2:
            layer.router()
            layer.experts(gate=False)
        else:
            layer.ffn(gate=False, bias=True)
        layer.norm("layer_output_norm", bias=True)


ARCHITECTURES = (architecture("nomic-bert-moe", nomic_bert_moe, n_head_kv=4, head_dim=16, n_ff=0),)
