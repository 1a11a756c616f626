"""The PyTorch model: its experts against the formula, the head's view, resuming, and parity with llama.cpp."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the optional group `train`")
pytest.importorskip("tokenizers", reason="needs the optional group `train`")

from train_reference import export, measure, model, parity, tokens, train  # noqa: E402
from train_reference.experts import Kernels, Layout, routed  # noqa: E402

SHAPE = model.Shape(
    vocabulary=275,
    width=64,
    blocks=3,
    dense_width=96,
    heads=4,
    kv_heads=2,
    head_width=32,
    rotary=16,
    experts=8,
    used=2,
    expert_width=32,
    context=128,
)


def drawn(seed: int = 0):
    """A model whose every part matters: no zeros, no ones."""
    torch.manual_seed(seed)
    made = model.Model(SHAPE).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_().mul_(parameter.shape[-1] ** -0.5)
        for layer in made.expert_layers():
            layer.bias.normal_().mul_(0.1)
    return made


def test_routed_experts_and_their_gradients_are_those_of_the_formula():
    torch.manual_seed(1)
    rows, weights = torch.randn(40, 6, requires_grad=True), torch.rand(40, 2, requires_grad=True)
    chosen = torch.stack([torch.randperm(4)[:2] for _ in range(40)])  # the fifth expert gets no row
    gate, up = (torch.randn(5, 4, 6, requires_grad=True) for _ in range(2))
    down = torch.randn(5, 6, 4, requires_grad=True)
    expected = torch.zeros(40, 6)
    for j in range(2):
        e = chosen[:, j]
        hidden = [torch.einsum("nd,nhd->nh", rows, m[e]) for m in (gate, up)]
        act = torch.nn.functional.silu(hidden[0]) * hidden[1]
        expected = expected + weights[:, j : j + 1] * torch.einsum("nh,ndh->nd", act, down[e])
    result = routed(rows, weights, chosen, (gate, up, down), Kernels())
    torch.testing.assert_close(result, expected)
    toward = torch.randn_like(result)
    inputs = (rows, weights, gate, up, down)
    for mine, theirs in zip(
        torch.autograd.grad((result * toward).sum(), inputs),
        torch.autograd.grad((expected * toward).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_every_choice_has_a_place_in_its_experts_part():
    chosen = torch.stack([torch.randperm(8)[:3] for _ in range(50)])
    layout = Layout(chosen, 8)
    assert len(set(layout.place.tolist())) == chosen.numel()
    for place, expert in zip(layout.place.tolist(), chosen.reshape(-1).tolist(), strict=True):
        assert layout.parts[expert].start <= place < layout.parts[expert].stop
        assert place < layout.total


def test_a_later_pass_of_the_head_sees_true_keys_before_its_chain():
    mask = model.chain_mask(4, 2)
    assert mask[:, :4].int().tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0]]
    assert mask[:, 4:].int().tolist() == torch.eye(4).int().tolist()
    assert model.chain_mask(4, 1).int().tolist() == torch.tril(torch.ones(4, 4)).int().tolist()


def test_the_selection_bias_moves_against_the_load():
    made = drawn()
    layer = made.expert_layers()[0]
    layer.bias.zero_()
    loads = torch.zeros(2, 3, 8, dtype=torch.int64)
    loads[:, 0] = torch.tensor([100, 0, 10, 10, 10, 10, 10, 10])
    train.rebalance(made, loads, 0.01)
    assert layer.bias[0] == layer.bias.min()
    assert layer.bias[1] == layer.bias.max()
    assert loads.sum() == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of a little grammar, their vocabulary and their tokens."""
    folder = tmp_path_factory.mktemp("data")
    texts = [f"the {a} sees the {b}." for a in ("cat", "dog", "fox") for b in ("hen", "bee", "cow")] * 30
    documents = folder / "train.jsonl"
    documents.write_text(
        "".join(json.dumps({"source": "toy", "key": str(i), "text": t}) + "\n" for i, t in enumerate(texts))
    )
    tokenizer = tokens.train_vocabulary(texts, folder / "tokenizer.json", SHAPE.vocabulary)
    tokens.write_tokens(tokenizer, documents, folder / "train.npz")
    return folder


def recipe(steps: int) -> train.Recipe:
    return train.Recipe(steps=steps, windows=4, length=32, rate=0.01)


def test_training_learns_and_a_resumed_run_is_the_same_run(data, tmp_path):
    whole = train.run(data / "train.npz", tmp_path / "whole", recipe(12), SHAPE, workers=1, compiled=False)
    log = [json.loads(line) for line in (tmp_path / "whole/log.jsonl").read_text().splitlines()]
    assert log[-1]["loss"] < log[0]["loss"] - 1
    assert log[-1]["rate"] < log[5]["rate"]

    folder, keep = tmp_path / "parts", train.save

    class StopError(RuntimeError):
        pass

    def save_and_stop(*arguments):
        keep(*arguments)
        if arguments[4] == 7:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "save", save_and_stop)
        patch.setattr(train, "SAVE_EVERY", 1)
        with pytest.raises(StopError):
            train.run(data / "train.npz", folder, recipe(12), SHAPE, workers=1, compiled=False)
    parts = train.run(data / "train.npz", folder, recipe(12), SHAPE, workers=1, compiled=False)
    first, second = (train.trained(p).state_dict() for p in (whole, parts))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_two_processes_train_the_model_that_one_trains(data, tmp_path):
    """Up to rounding; without the head, which would see other windows."""
    alone = replace(recipe(4), head_weight=0.0)
    paths = [train.run(data / "train.npz", tmp_path / str(n), alone, SHAPE, workers=n, compiled=False) for n in (1, 2)]
    first, second = (train.trained(p).state_dict() for p in paths)
    trunk = [name for name in first if not name.startswith("head.") and not name.endswith("bias")]
    difference = [float((first[name] - second[name]).abs().mean() / first[name].abs().mean()) for name in trunk]
    assert np.median(difference) < 0.01  # Muon makes much of the rounding of a gradient near zero
    log = [json.loads(line) for line in (tmp_path / "2/log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [1, 2, 3, 4]


def test_llama_cpp_computes_the_exported_model_and_splits_text_alike(data, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    made = drawn()
    path = tmp_path / "f32.gguf"
    export.export(made, data / "tokenizer.json", path, name="toy")
    found = parity.compare(made, path, data / "tokenizer.json", data / "train.jsonl", documents=3, depth=2)
    assert found.unlike == 0
    assert found.documents == 270
    assert found.trunk < 1e-3
    assert max(found.drafts) < 1e-3


def test_a_run_with_drafts_says_what_a_run_without_says(data, tmp_path):
    pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    path = tmp_path / "f32.gguf"
    export.export(drawn(), data / "tokenizer.json", path, name="toy")
    session = measure.Session(path, mtp=True, context=SHAPE.context)
    plain, none = measure.generate(session, "the cat", 24)
    drafted, verdicts = measure.generate(session, "the cat", 24, depth=3)
    session.close()
    assert none == []
    assert plain[:24] == drafted[:24]
    assert verdicts
    assert np.all([len(v) <= 3 for v in verdicts])
