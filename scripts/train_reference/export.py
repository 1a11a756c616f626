"""The trained model as a gguf of architecture glm4moe, in float32; and its quantised files."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .model import Attention, Block, Experts, Gated, Model
from .tokens import BOUNDARY, PRE, SPECIALS, TEMPLATE, listing

LICENCE = (
    "Trained on WordNet 3.0 (Copyright 2006 by Princeton University, all rights reserved; WordNet licence), docstrings "
    "of Python's standard library (PSF-2.0), texts in the public domain and generated texts."
)

Array = npt.NDArray[np.float32]


def export(model: Model, vocabulary: Path, path: Path, *, name: str, licence: str = "Apache-2.0") -> None:
    """Write the model and its vocabulary (tokenizer.json) to `path`. Raises ValueError if they do not fit."""
    import gguf

    shape = model.shape
    size = len(listing(vocabulary)[0])
    if size != shape.vocabulary:
        raise ValueError(f"{vocabulary}: {size} tokens, but the model was trained with {shape.vocabulary}")
    writer = gguf.GGUFWriter(str(path), "glm4moe")
    writer.add_name(name)
    writer.add_license(licence)
    writer.add_description(LICENCE)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.blocks + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_leading_dense_block_count(shape.dense)
    writer.add_feed_forward_length(shape.dense_width)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_width)
    writer.add_value_length(shape.head_width)
    writer.add_rope_dimension_count(shape.rotary)
    writer.add_rope_freq_base(shape.base)
    writer.add_layer_norm_rms_eps(shape.epsilon)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.expert_width)
    writer.add_expert_shared_count(1)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(True)
    writer.add_expert_weights_scale(shape.scale)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_vocabulary(writer, vocabulary)
    for tensor, values in tensors(model).items():
        writer.add_tensor(tensor, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any, path: Path) -> None:
    import gguf

    tokens, merges = listing(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index(BOUNDARY))
    writer.add_eos_token_id(tokens.index(BOUNDARY))
    writer.add_eot_token_id(tokens.index("<|end|>"))
    writer.add_add_bos_token(True)
    writer.add_chat_template(TEMPLATE)


def tensors(model: Model) -> dict[str, Array]:
    """Return every tensor under its gguf name, in PyTorch's order of axes (gguf reverses it)."""
    named = {
        "token_embd.weight": _array(model.token_embd),
        "output_norm.weight": _array(model.output_norm.weight),
        "output.weight": _array(model.output),
    }
    for i, block in enumerate([*model.blocks, model.head.block]):
        assert isinstance(block, Block)
        named |= {f"blk.{i}.{k}": v for k, v in _block(block).items()}
    last = f"blk.{model.shape.blocks}.nextn"
    named[f"{last}.eh_proj.weight"] = _array(model.head.eh_proj)
    for norm in ("enorm", "hnorm", "shared_head_norm"):
        named[f"{last}.{norm}.weight"] = _array(getattr(model.head, norm).weight)
    return named


def _block(block: Block) -> dict[str, Array]:
    attention: Attention = block.attn
    named = {
        "attn_norm.weight": block.attn_norm.weight,
        "attn_q.weight": attention.q,
        "attn_k.weight": attention.k,
        "attn_v.weight": attention.v,
        "attn_output.weight": attention.output,
        "attn_q_norm.weight": attention.q_norm.weight,
        "attn_k_norm.weight": attention.k_norm.weight,
        "post_attention_norm.weight": block.post_attention_norm.weight,
    }
    match block.ffn:
        case Gated() as dense:
            named |= {"ffn_gate.weight": dense.gate, "ffn_up.weight": dense.up, "ffn_down.weight": dense.down}
        case Experts() as experts:
            named |= {
                "ffn_gate_inp.weight": experts.router,
                "exp_probs_b.bias": experts.bias,
                "ffn_gate_exps.weight": experts.gate,
                "ffn_up_exps.weight": experts.up,
                "ffn_down_exps.weight": experts.down,
                "ffn_gate_shexp.weight": experts.shared.gate,
                "ffn_up_shexp.weight": experts.shared.up,
                "ffn_down_shexp.weight": experts.shared.down,
            }
    return {k: _array(v) for k, v in named.items()}


def _array(values: Any) -> Array:
    array: Array = values.detach().float().numpy()
    return np.ascontiguousarray(array)


def quantise(source: Path, target: Path, kind: str, threads: int) -> None:
    """Write `target` in llama.cpp's file type `kind` (such as "Q8_0" or "Q4_K_M"). Raises RuntimeError if it fails."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.nthread = threads
    done = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters))
    if done:
        raise RuntimeError(f"{source}: llama.cpp could not write {target} as {kind} (it returned {done})")
