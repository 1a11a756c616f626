"""A model that drafts for another: what is known of its file before it is opened, and what it takes."""

from __future__ import annotations

from bmoe.contracts import ModelFacts, ShardFacts, TensorFacts
from bmoe.errors import ModelError
from bmoe.layout import kv_elements
from bmoe.shards import read_shards
from bmoe.states import state_bytes


def read_draft_model(path: str) -> ModelFacts:
    """The facts of any model, from its headers alone; experts, if it has any, count as its other tensors do.

    Raises ModelError in one line that names the file.
    """
    headers = read_shards(path)
    values, lengths = headers[0].values, headers[0].lengths
    arch = values.get("general.architecture")
    if not isinstance(arch, str) or not arch:
        raise ModelError(f"{path}: damaged gguf header: general.architecture is missing; download the file again")

    def number(key: str) -> int:
        found = values.get(f"{arch}.{key}")
        return found if isinstance(found, int) and not isinstance(found, bool) and found > 0 else 0

    n_layer, n_head = number("block_count"), number("attention.head_count")
    return ModelFacts(
        path=path,
        name=arch,
        arch=arch,
        shards=tuple(ShardFacts(header.path, header.nbytes) for header in headers),
        n_layer=n_layer,
        n_expert=number("expert_count"),
        n_used=number("expert_used_count"),
        n_embd=number("embedding_length"),
        n_vocab=lengths.get("tokenizer.ggml.tokens") or number("vocab_size"),
        n_ctx_train=number("context_length"),
        n_nextn=0,
        banks=(),
        dense=tuple(
            TensorFacts(tensor.name, shard, tensor.offset, tensor.nbytes, tensor.shape, tensor.type_name)
            for shard, header in enumerate(headers)
            for tensor in header.tensors
        ),
        kv_elements=kv_elements(values, arch, n_layer),
        state_bytes=state_bytes(values, arch, n_layer, (tensor for header in headers for tensor in header.tensors)),
        n_head=n_head,
        expert_width=number("expert_feed_forward_length"),
    )
