"""Models with recurrent layers between those with attention: AI21's, NVIDIA's, IBM's and Liquid AI's.

Tensors and metadata: ``src/models/{jamba,nemotron-h,granite-hybrid,lfm2moe}.cpp`` of llama.cpp, whose loader takes a
layer for recurrent if it has no key-value heads.
"""

from __future__ import annotations

from bmoe.synth.recipe import Layer, Recipe, architecture
from bmoe.synth.shapes import Shape

_STATE, _KERNEL, _GROUPS = 16, 4, 2


def jamba(m: Recipe) -> None:
    """Jamba 1.5 and 1.6, Mini and Large: Mamba, attention in one layer of some, experts in every other one."""
    rank = 4
    _mamba_keys(m, rank)
    m.keys |= {"attention.head_count_kv": [m.shape.n_head_kv * (n % 4 == 2) for n in range(m.shape.n_layer)]}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if layer.number % 4 == 2:
            layer.attention()
        else:
            _mamba(layer, rank)
        layer.norm("ffn_norm")
        if layer.number % 2:
            layer.router()
            layer.experts()
        else:
            layer.ffn()
    m.output()


def nemotron_h_moe(m: Recipe) -> None:
    """Nemotron 3 Nano, Super, Puzzle: a layer is Mamba 2, attention or experts, without a gate and of a narrower input.

    As in Puzzle, later layers have narrower experts and use more of them.
    """
    shape, heads, latent, kinds = m.shape, 8, 32, "ME*E"
    trunk = [kinds[n % len(kinds)] for n in range(shape.n_layer)]
    kinds_of = trunk + ["*E"] * shape.n_nextn  # the head for next-token prediction has attention and experts
    _mamba_keys(m, heads, _GROUPS)
    m.keys |= {"attention.head_count_kv": [shape.n_head_kv * ("*" in kind) for kind in kinds_of]}
    widths = [_width(shape, n) * ("E" in kind) for n, kind in enumerate(kinds_of)]
    m.keys |= {"feed_forward_length": widths, "expert_feed_forward_length": widths}
    m.keys |= {"expert_used_count": [(shape.n_used + n // 3) * ("E" in kind) for n, kind in enumerate(kinds_of)]}
    m.keys |= {"expert_shared_feed_forward_length": shape.n_ff_exp, "moe_latent_size": latent}
    m.keys |= {"attention.layer_norm_epsilon": 1e-5, "expert_weights_norm": True, "expert_weights_scale": 2.5}
    m.output()
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if trunk[layer.number] == "M":
            _mamba2(layer, heads)
        elif trunk[layer.number] == "*":
            layer.attention()
        else:
            _latent_experts(layer, latent)
    for layer in m.heads():
        layer.norm("attn_norm")
        layer.attention()
        layer.norm("post_attention_norm")
        _latent_experts(layer, latent)
        layer.nextn()


def granitehybrid(m: Recipe) -> None:
    """Granite 4.0 H Tiny, Small: Mamba 2, attention without positions, shared experts, scales at every joint."""
    heads = 8
    _mamba_keys(m, heads, _GROUPS)
    m.keys |= {"attention.head_count_kv": [m.shape.n_head_kv * (n % 4 == 2) for n in range(m.shape.n_layer)]}
    m.keys |= {"expert_shared_feed_forward_length": m.shape.n_ff_exp, "rope.scaling.finetuned": False}
    m.keys |= {"embedding_scale": 4.0, "residual_scale": 0.5, "attention.scale": 0.125, "logit_scale": 6.0}
    m.embedding()
    for layer in m.layers():
        layer.norm("attn_norm")
        if layer.number % 4 == 2:
            layer.attention()
        else:
            _mamba2(layer, heads)
        layer.norm("ffn_norm")
        layer.router()
        layer.experts()
        layer.shared()
    m.output()


def lfm2moe(m: Recipe) -> None:
    """LFM2-8B-A1B, LFM2-24B-A2B: short convolutions, a dense lead, sigmoid gating with a selection bias."""
    m.keys |= {"attention.head_count_kv": [m.shape.n_head_kv * (n % 2) for n in range(m.shape.n_layer)]}
    m.keys |= {"shortconv.l_cache": 3, "expert_gating_func": 2}
    m.embedding()
    m.norm("token_embd_norm")  # the last norm, under another name
    m.tensor("output.weight", (m.shape.n_embd, m.shape.n_vocab), "output", m.shape.output)
    for layer in m.layers():
        layer.norm("attn_norm")
        if layer.number % 2:
            layer.attention(head_norms=True)
        else:
            layer.matrix("shortconv.conv", 3, m.shape.n_embd, quant="F32")
            layer.matrix("shortconv.in_proj", m.shape.n_embd, 3 * m.shape.n_embd)
            layer.matrix("shortconv.out_proj", m.shape.n_embd, m.shape.n_embd)
        layer.norm("ffn_norm")
        if layer.is_dense:
            layer.ffn()
        else:
            layer.router(selection_bias=True)
            layer.experts()


def _width(shape: Shape, layer: int) -> int:
    return shape.n_ff_exp - 32 * (layer // 3)


def _latent_experts(layer: Layer, latent: int) -> None:
    layer.router(selection_bias=True)
    layer.matrix("ffn_latent_down", layer.shape.n_embd, latent)
    layer.experts(gate=False, n_in=latent, width=_width(layer.shape, layer.number))
    layer.matrix("ffn_latent_up", latent, layer.shape.n_embd)
    layer.shared(gate=False)


def _mamba_keys(m: Recipe, rank: int, groups: int = 0) -> None:
    m.keys |= {"ssm.conv_kernel": _KERNEL, "ssm.inner_size": 2 * m.shape.n_embd}
    m.keys |= {"ssm.state_size": _STATE, "ssm.time_step_rank": rank}
    if groups:
        m.keys |= {"ssm.group_count": groups}


def _mamba(layer: Layer, rank: int) -> None:
    embd, inner = layer.shape.n_embd, 2 * layer.shape.n_embd
    layer.matrix("ssm_in", embd, 2 * inner)
    layer.matrix("ssm_conv1d", _KERNEL, inner, bias=True, quant="F32")
    layer.matrix("ssm_x", inner, rank + 2 * _STATE)
    layer.matrix("ssm_dt", rank, inner, bias=True)
    for name, width in (("dt", rank), ("b", _STATE), ("c", _STATE)):
        layer.norm(f"ssm_{name}_norm", width)
    layer.tensor("ssm_a", (_STATE, inner), "decay")
    layer.tensor("ssm_d", (inner,), "norm")
    layer.matrix("ssm_out", inner, embd)


def _mamba2(layer: Layer, heads: int) -> None:
    embd, inner = layer.shape.n_embd, 2 * layer.shape.n_embd
    mixed = inner + 2 * _GROUPS * _STATE
    layer.matrix("ssm_in", embd, inner + mixed + heads)
    layer.matrix("ssm_conv1d", _KERNEL, mixed, bias=True, quant="F32")
    layer.bias("ssm_dt", heads)
    layer.tensor("ssm_a", (1, heads), "decay")
    layer.tensor("ssm_d", (1, heads), "norm")
    layer.norm("ssm_norm", inner // _GROUPS, _GROUPS)
    layer.matrix("ssm_out", inner, embd)


ARCHITECTURES = (
    # the dense layers of Jamba are as wide as its experts, and its attention as its embeddings
    architecture("jamba", jamba, head_dim=16, n_ff=0),
    architecture("nemotron_h_moe", nemotron_h_moe, n_ff=0, n_shared=1, n_nextn=1),
    architecture("granitehybrid", granitehybrid, n_ff=0),
    architecture("lfm2moe", lfm2moe, head_dim=16, n_dense=1),
)
