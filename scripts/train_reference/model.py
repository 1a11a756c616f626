"""glm4moe in PyTorch: leading dense block, blocks with routed and shared experts, and one MTP (nextn) head.

The formulas are those of llama.cpp's `glm4moe`: RMSNorm per head before a rotary embedding of half of each head
(NeoX pairs), sigmoid gating whose bias serves the choice only, and a head that joins the next token's embedding with
the hidden state after the output norm. Parameters carry the names of the gguf's tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (PyTorch's own name for it)
from torch import Tensor, nn

from .experts import Kernels, routed

Angles = tuple[Tensor, Tensor]
Past = tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Shape:
    """Sizes of the model. `blocks` is the trunk's, `dense` of which have no experts; the head is one block more."""

    vocabulary: int = 4096
    width: int = 256
    blocks: int = 9
    dense: int = 1
    dense_width: int = 768
    heads: int = 4
    kv_heads: int = 2
    head_width: int = 64
    rotary: int = 32
    base: float = 10000.0
    experts: int = 32
    used: int = 4
    expert_width: int = 96
    scale: float = 2.0
    epsilon: float = 1e-5
    context: int = 512


class Norm(nn.Module):
    """RMSNorm in float32."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.epsilon)


def matrix(rows: int, columns: int, *stack: int) -> nn.Parameter:
    """Return a weight (out, in), or a stack of them, drawn for inputs of unit variance."""
    return nn.Parameter(torch.randn(*stack, rows, columns) / math.sqrt(columns))


class Attention(nn.Module):
    """Grouped-query attention. `past` holds keys and values of a chained head's earlier passes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q = matrix(shape.heads * shape.head_width, shape.width)
        self.k = matrix(shape.kv_heads * shape.head_width, shape.width)
        self.v = matrix(shape.kv_heads * shape.head_width, shape.width)
        self.output = nn.Parameter(torch.zeros(shape.width, shape.heads * shape.head_width))
        self.q_norm = Norm(shape.head_width, shape.epsilon)
        self.k_norm = Norm(shape.head_width, shape.epsilon)

    def forward(self, x: Tensor, angles: Angles, past: Past) -> tuple[Tensor, Past]:
        """Attend x (batch, time, width); return the result and `past` with this pass's keys and values."""
        rows, time, _ = x.shape
        kv, width = self.shape.kv_heads, self.shape.head_width
        q = F.linear(x, self.q).view(rows, time, -1, width).transpose(1, 2)
        k = F.linear(x, self.k).view(rows, time, kv, width).transpose(1, 2)
        v = F.linear(x, self.v).view(rows, time, kv, width).transpose(1, 2)
        q, k = rotate(self.q_norm(q), angles).to(v.dtype), rotate(self.k_norm(k), angles).to(v.dtype)
        past = (*past, (k, v))
        keys = torch.cat([k for k, _ in past], 2) if len(past) > 1 else k
        values = torch.cat([v for _, v in past], 2) if len(past) > 1 else v
        # query head j uses KV head j // groups: fold the groups into the time axis instead of repeating keys
        scores = (q.reshape(rows, kv, -1, width) @ keys.mT).float().view(rows, kv, -1, time, keys.shape[2])
        scores = scores.masked_fill(~chain_mask(time, len(past)), -math.inf) / math.sqrt(width)
        share = scores.softmax(-1).to(v.dtype).view(rows, kv, -1, keys.shape[2])
        y = (share @ values).view(rows, -1, time, width).transpose(1, 2).reshape(rows, time, -1)
        return F.linear(y, self.output), past


def chain_mask(time: int, passes: int) -> Tensor:
    """Return what pass number `passes` of the head may see: (time, passes * time), True where it may.

    A draft of depth d at position p was fed its own hidden states at p-d+2 .. p; what stands before came from the
    trunk. So the first pass's keys count up to p-d+1, and of pass j > 1 exactly the key at p-(d-j). With one pass
    this is the plain causal mask.
    """
    at = torch.arange(time)
    back = at[:, None] - at[None, :]
    return torch.cat([back >= passes - 1, *(back == passes - j for j in range(2, passes + 1))], 1)


def rotate(x: Tensor, angles: Angles) -> Tensor:
    """Turn the first entries of each head, in pairs (i, i + rotary / 2)."""
    cos, sin = angles
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], -1)


class Gated(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = matrix(hidden, width)
        self.up = matrix(hidden, width)
        self.down = nn.Parameter(torch.zeros(width, hidden))

    def forward(self, x: Tensor) -> Tensor:
        """Apply to the last axis."""
        return F.linear(F.silu(F.linear(x, self.gate)) * F.linear(x, self.up), self.down)


class Experts(nn.Module):
    """Routed experts beside a shared one. `load` counts how often each was chosen since it was last cleared."""

    bias: Tensor
    load: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        n, width, hidden = shape.experts, shape.width, shape.expert_width
        self.router = nn.Parameter(torch.randn(n, width) / math.sqrt(width))
        self.register_buffer("bias", torch.zeros(n))
        self.register_buffer("load", torch.zeros(n, dtype=torch.int64), persistent=False)
        self.gate = matrix(hidden, width, n)
        self.up = matrix(hidden, width, n)
        self.down = nn.Parameter(torch.randn(n, width, hidden) * 0.02)
        self.shared = Gated(width, hidden)
        self.chosen: Tensor | None = None  # of the last call, for measurements
        self.kernels = Kernels()

    def forward(self, x: Tensor) -> Tensor:
        """Route every row of x (batch, time, width)."""
        with torch.autocast("cpu", enabled=False):
            scores = torch.sigmoid(F.linear(x.float(), self.router))
        return self.shared(x) + self.mix(x, scores)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mix(self, x: Tensor, scores: Tensor) -> Tensor:
        """Return the chosen experts' weighted sum."""
        rows, flat = x.reshape(-1, x.shape[-1]), scores.reshape(-1, scores.shape[-1])
        self.chosen = torch.topk(flat.detach() + self.bias, self.shape.used, -1).indices
        weights = flat.gather(-1, self.chosen)
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(2**-14) * self.shape.scale
        if self.training:
            self.load += torch.bincount(self.chosen.reshape(-1), minlength=self.shape.experts)
        return routed(rows, weights, self.chosen, (self.gate, self.up, self.down), self.kernels).view(x.shape)


class Block(nn.Module):
    """Attention, then a dense feed-forward or experts, each on a normalised input and added."""

    def __init__(self, shape: Shape, *, dense: bool) -> None:
        super().__init__()
        self.attn_norm = Norm(shape.width, shape.epsilon)
        self.attn = Attention(shape)
        self.post_attention_norm = Norm(shape.width, shape.epsilon)
        self.ffn: Gated | Experts = Gated(shape.width, shape.dense_width) if dense else Experts(shape)

    def forward(self, x: Tensor, angles: Angles, past: Past = ()) -> tuple[Tensor, Past]:
        """Return x with both results added, and `past` with this pass's keys and values."""
        attended, past = self.attn(self.attn_norm(x), angles, past)
        x = x + attended
        return x + self.ffn(self.post_attention_norm(x)), past


class Head(nn.Module):
    """The MTP head: predicts the token after the next from the next token and a hidden state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.enorm = Norm(shape.width, shape.epsilon)
        self.hnorm = Norm(shape.width, shape.epsilon)
        self.eh_proj = matrix(shape.width, 2 * shape.width)
        self.block = Block(shape, dense=False)
        self.shared_head_norm = Norm(shape.width, shape.epsilon)


class Model(nn.Module):
    """Trunk, head, embedding and output matrix (the head shares the last two)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token_embd = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * 0.3)
        self.blocks = nn.ModuleList(Block(shape, dense=i < shape.dense) for i in range(shape.blocks))
        self.output_norm = Norm(shape.width, shape.epsilon)
        self.output = nn.Parameter(torch.randn(shape.vocabulary, shape.width) * 0.02)
        self.head = Head(shape)
        half = shape.rotary // 2
        angle = torch.arange(shape.context)[:, None] * shape.base ** (-torch.arange(half) / half)[None, :]
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def angles(self, time: int) -> Angles:
        """Return cosines and sines of the first `time` positions."""
        return self.cos[:time], self.sin[:time]  # type: ignore[index]

    def trunk(self, tokens: Tensor) -> Tensor:
        """Return the hidden states after the output norm, (batch, time, width)."""
        x = F.embedding(tokens, self.token_embd)
        for block in self.blocks:
            x, _ = block(x, self.angles(tokens.shape[1]))
        hidden: Tensor = self.output_norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the output matrix applied to hidden states of the trunk or of the head."""
        return F.linear(hidden, self.output)

    def draft(self, tokens: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Return the head's hidden states of drafts 1..depth; each predicts the token after the one at its position.

        The state that enters at a position is that of the position before: the trunk's for the first draft, the
        head's own of the draft before for the others. Position 0 gets zeros.
        """
        embedded = self.head.enorm(F.embedding(tokens, self.token_embd))
        past: Past = ()
        states = []
        for _ in range(depth):
            before = F.pad(hidden[:, :-1], (0, 0, 1, 0))
            x = F.linear(torch.cat([embedded, self.head.hnorm(before)], -1), self.head.eh_proj)
            x, past = self.head.block(x, self.angles(tokens.shape[1]), past)
            hidden = self.head.shared_head_norm(x)
            states.append(hidden)
        return states

    def expert_layers(self) -> list[Experts]:
        """Return the routed layers, the head's last."""
        blocks = [*self.blocks, self.head.block]
        return [b.ffn for b in blocks if isinstance(b.ffn, Experts)]
