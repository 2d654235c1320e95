"""Step 9: LoRA, a small trainable difference on frozen weights.

Built here: model/lora.py `LoRALinear`, `add_lora`, `lora_modules`, `lora_parameters`, `adapter_disabled`, `merge_lora`.
Equation: y = W x + b + s B A x with s = alpha / r; A (r, in) random, B (out, r) zero (arXiv:2106.09685, eq. 3).
Run: pytest tests/test_09_lora.py
Later steps need it: training (20) moves A and B only; the reference policy is the model with its adapter off.
"""

import math

import pytest
import torch
from helpers import check_close, gradients, random_ids, tiny_model
from torch import nn

from model.lora import LINEAR_NAMES, LoRALinear, adapter_disabled, add_lora, lora_modules, lora_parameters, merge_lora
from model.weights import load_model, save_model

IDS = random_ids(2, 7)


def adapted(trained: bool = True, **changes):
    """A tiny model with an adapter of rank 4; `trained`: B is random instead of zero, as after some steps."""
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    add_lora(model, **{"r": 4, "alpha": 8, "generator": generator} | changes)
    for name, parameter in lora_parameters(model).items():
        if trained and name.endswith("lora_B"):
            nn.init.normal_(parameter, std=0.2, generator=generator)
    return model


def worked_layer() -> LoRALinear:
    """W = ((1, 2), (3, 4)), b = (1, -1), A = (1, 1), B = (2, 0), s = 3."""
    base = nn.Linear(2, 2)
    base.weight.data, base.bias.data = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0])
    layer = LoRALinear(base, r=1, scaling=3.0)
    layer.lora_A.data, layer.lora_B.data = torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0], [0.0]])
    return layer


# --- worked numbers ---


def test_worked_layer():
    """x = (1, 10): W x + b = (22, 42); A x = 11; B A x = (22, 0); times 3: (66, 0); y = (88, 42).

    Merged: W + 3 * (2, 0)^T (1, 1) = ((1 + 6, 2 + 6), (3, 4)).
    """
    check_close(worked_layer().merged_weight(), [[7.0, 8.0], [3.0, 4.0]], "W + scaling * B A")
    check_close(worked_layer()(torch.tensor([1.0, 10.0])), [88.0, 42.0], "W x + b + scaling * B (A x)")


def test_worked_gradients():
    """The gradient (1, 0) arrives at y. At B: s * A x = 33 in its row; at A: s * B^T (1, 0) times x = 6 * (1, 10)."""
    layer = worked_layer()
    layer(torch.tensor([1.0, 10.0]))[0].backward()
    check_close(layer.lora_B.grad, [[33.0], [0.0]], "the scaling belongs to the gradient too")
    check_close(layer.lora_A.grad, [[6.0, 60.0]], "the scaling belongs to the gradient too")
    assert layer.weight.grad is layer.bias.grad is None


def test_worked_sizes_and_scalings():
    """r = 8 on a (64, 32) layer: 8 * 32 + 64 * 8 = 768 numbers. alpha 16: 16 / 8 = 2, or 16 / sqrt(8) for rslora."""
    layer = LoRALinear(nn.Linear(32, 64), r=8, scaling=2.0)
    assert sum(p.numel() for p in layer.parameters() if p.requires_grad) == 768
    for rslora, scaling in ((False, 2.0), (True, 16 / math.sqrt(8))):
        assert {layer.scaling for _, layer in lora_modules(adapted(r=8, alpha=16, rslora=rslora))} == {scaling}


# --- properties ---


def test_a_new_adapter_changes_no_bit():
    model = adapted(trained=False)
    assert torch.equal(model(IDS), tiny_model()(IDS))
    for name, parameter in lora_parameters(model).items():  # B is zero, A uniform up to 1 / sqrt(in)
        bound = 1 / math.sqrt(parameter.shape[1]) if name.endswith("lora_A") else 0.0
        assert 0.8 * bound <= parameter.abs().max() <= bound, name


def test_equals_a_model_with_the_difference_in_its_weights():
    """The slow way: form W + s B A for each adapted layer of a plain model."""
    model, plain = adapted(), tiny_model()
    for name, layer in lora_modules(model):
        plain.get_submodule(name).weight.data += 8 / 4 * layer.lora_B.data @ layer.lora_A.data
    check_close(model(IDS), plain(IDS), "every adapted layer adds s B A x", 1e-4, 1e-4)


def test_only_the_adapter_trains_and_all_of_it():
    model = adapted(trained=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(lora_parameters(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):  # B is zero at first, so A has no gradient in the first step
        gradients(model, lambda: model(IDS).log_softmax(dim=-1)[..., 3].mean())
        optimizer.step()
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved == set(lora_parameters(model))


def test_adapter_disabled_is_the_base_model_and_comes_back():
    model = adapted()
    with adapter_disabled(model):
        assert torch.equal(model(IDS), tiny_model()(IDS))
    with pytest.raises(RuntimeError), adapter_disabled(model):
        raise RuntimeError
    assert torch.equal(model(IDS), adapted()(IDS)), "after an error, too"


def test_two_passes_in_training_mode_agree():
    """No dropout: the ratio of a policy to itself is one, so what is scored is what was sampled."""
    model = adapted().train()
    assert torch.equal(model(IDS), model(IDS))


def test_a_merged_model_is_plain_equal_and_trainable():
    model = adapted()
    merge_lora(model)
    check_close(model(IDS), adapted()(IDS), "W + scaling * B A", 1e-4, 1e-4)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(tiny_model().state_dict())
    add_lora(model, r=2, alpha=4)  # and it can have another adapter


def test_targets_choose_the_layers():
    names = [name for name, _ in lora_modules(adapted(target_modules=["q_proj", "v_proj"]))]
    assert names == [f"model.layers.{i}.self_attn.{name}" for i in (0, 1) for name in ("q_proj", "v_proj")]
    assert {name.rsplit(".", 1)[-1] for name, _ in lora_modules(adapted())} == set(LINEAR_NAMES)


def test_a_float32_adapter_on_a_bfloat16_base_moves_at_a_small_learning_rate():
    """Adam moves a number by about the learning rate, here 1e-6. Near .1 a bfloat16 is only precise to .0005."""
    model = tiny_model().bfloat16()
    add_lora(model, r=4, alpha=8)
    parameters = lora_parameters(model)
    for name, parameter in parameters.items():
        assert parameter.dtype == torch.float32, name
        parameter.data = torch.empty_like(parameter).uniform_(0.1, 0.2).bfloat16().float()
    before = {name: p.detach().clone() for name, p in parameters.items()}
    assert model(IDS).dtype == torch.bfloat16
    gradients(model, lambda: model(IDS).float().log_softmax(dim=-1)[..., 3].mean())
    torch.optim.AdamW(parameters.values(), lr=1e-6, weight_decay=0).step()
    for name, parameter in parameters.items():
        assert (parameter != before[name]).float().mean() > 0.9, f"{name} did not move"
        assert torch.equal(parameter.bfloat16().float(), before[name]), "in bfloat16 it would not have moved"


def test_a_bfloat16_base_trains_its_adapter_in_float32_and_samples_in_bfloat16():
    """A = (1 + 2^-10, 1), x = (1, -1): A x = 2^-10, times s B = 6; a bfloat16 near 1 goes in steps of 2^-7: A x = 0."""
    layer, x = worked_layer(), torch.tensor([1.0, -1.0]).bfloat16()
    layer.weight.data, layer.bias.data = torch.zeros(2, 2).bfloat16(), torch.zeros(2).bfloat16()
    layer.lora_A.data[0, 0] += 2**-10
    for mode, expected in ((torch.enable_grad, 6 * 2**-10), (torch.no_grad, 6 * 2**-10), (torch.inference_mode, 0.0)):
        with mode():
            assert layer(x).tolist() == [expected, 0.0]
            assert layer(x).dtype == torch.bfloat16


# --- error texts ---


def test_wrong_targets_and_a_second_adapter_are_refused():
    with pytest.raises(ValueError, match=r"lora_target_modules = \['q_proj', 'query'\]: .*named \['query'\]; exp"):
        add_lora(tiny_model(), 4, 8, ["q_proj", "query"])
    with pytest.raises(ValueError, match="expected some of"):
        add_lora(tiny_model(), 4, 8, [])
    with pytest.raises(ValueError, match=r"already has a LoRA adapter; merge it \(merge_lora\)"):
        add_lora(adapted(), 4, 8)


def test_a_model_with_an_adapter_is_saved_only_when_merged(tmp_path):
    model, ids = tiny_model(), random_ids(1, 5)
    add_lora(model, 2, 4.0)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.normal_()
    with pytest.raises(ValueError, match="expected merged weights"):
        save_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with torch.no_grad():
        wanted = model(ids)
        merge_lora(model)
        save_model(model, tmp_path / "out")
        torch.testing.assert_close(load_model(tmp_path / "out")(ids), wanted, atol=1e-4, rtol=1e-4)
