"""Step 19: the loss. `grpo/loss.py`: per-token log-probabilities in, one number and its statistics out.

Rule: token loss = -min(rho A, clip(rho, 1 - epsilon, 1 + epsilon_high) A) + beta rho k3, averaged as `loss_type` says.
Step 20 calls it once per micro-batch. Command: pytest tests/test_19_loss.py
"""

import itertools
import json
import math

import numpy as np
import pytest
import torch

from grpo.loss import kl_estimate, loss_normalizer, policy_loss

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "cispo")
LEVELS = ("token", "sequence")


def ratios(*values: float) -> torch.Tensor:
    """One row of log-probabilities whose ratio to old log-probabilities of 0 is `values`."""
    return torch.tensor([values]).log().requires_grad_()


def settings(loss_type: str, **more) -> dict:
    return {"loss_type": loss_type, "max_completion_length": 7, "epsilon_high": 0.28} | more


def random_batch(rows: int = 6, width: int = 5) -> dict:
    lengths = torch.tensor([5, 1, 3, 2, 4, 2])[:rows, None]
    logprobs = -torch.rand(rows, width) * 3
    noise = [logprobs + 0.4 * torch.randn(rows, width) for _ in range(3)]
    names = ("old_logprobs", "ref_logprobs", "sampling_logprobs")
    tensors = {"logprobs": logprobs, "advantages": torch.randn(rows), "mask": torch.arange(width) < lengths}
    return tensors | dict(zip(names, noise, strict=True))


def value_and_grad(batch: dict, **config) -> tuple[torch.Tensor, torch.Tensor, dict]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    loss, stats = policy_loss(**{**batch, "logprobs": logprobs}, **config)
    loss.backward()
    return loss.detach(), logprobs.grad, stats


# --- worked numbers ---

# With epsilon .2: (sign of A, rho) -> (token loss, d loss / d log pi = rho x d loss / d rho, clipped). The minimum
# takes the clipped branch only where the ratio has already moved in the direction that the advantage asks for.
CELLS = [
    (+1, 0.5, -0.5, -0.5, False),  # A > 0 but less likely than before: pull it back, fully
    (+1, 1.1, -1.1, -1.1, False),
    (+1, 1.5, -1.2, 0.0, True),  # already more likely: no more profit
    (-1, 0.5, 0.8, 0.0, True),  # already less likely: no more profit
    (-1, 1.1, 1.1, 1.1, False),
    (-1, 1.5, 1.5, 1.5, False),  # A < 0 but more likely: push it back, fully (maximum would clip here)
]


@pytest.mark.parametrize(("sign", "rho", "loss", "slope", "clipped"), CELLS)
def test_the_six_cells_of_the_clip(sign, rho, loss, slope, clipped):
    logprobs = ratios(rho)
    actual, stats = policy_loss(logprobs, torch.zeros(1, 1), torch.tensor([float(sign)]), torch.ones(1, 1))
    actual.backward()
    assert actual.item() == pytest.approx(loss)
    assert logprobs.grad.item() == pytest.approx(slope)
    low, high, region = (stats[f"clip_ratio/{name}_mean"][0].item() for name in ("low", "high", "region"))
    assert (low, high, region) == (clipped and sign < 0, clipped and sign > 0, clipped)


def test_the_docstring_example():
    loss, stats = policy_loss(ratios(1.5, 0.5), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    assert loss.item() == pytest.approx(-0.85)
    assert "loss" in stats
    assert [part.item() for part in stats["clip_ratio/region_mean"]] == [1, 2]


def test_clip_higher_and_two_sided_delta():
    ones, zeros = torch.ones(1, 1), torch.zeros(1, 1)
    assert policy_loss(ratios(1.5), zeros, torch.ones(1), ones, epsilon_high=0.28)[0].item() == pytest.approx(-1.28)
    assert policy_loss(ratios(9.0), zeros, -torch.ones(1), ones, delta=4.0)[0].item() == pytest.approx(4.0)
    assert policy_loss(ratios(9.0), zeros, -torch.ones(1), ones)[0].item() == pytest.approx(9.0)


def test_cispo_caps_the_weight_and_keeps_the_gradient():
    logprobs = torch.tensor([[math.log(6.0), math.log(0.5)]], requires_grad=True)
    loss, stats = policy_loss(
        logprobs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2), loss_type="cispo", epsilon_high=5.0
    )
    loss.backward()
    assert loss.item() == pytest.approx(-(5 * math.log(6) + 0.5 * math.log(0.5)) / 2)
    assert logprobs.grad.tolist()[0] == pytest.approx([-2.5, -0.25])
    assert [part.item() for part in stats["cispo_clip_ratio"]] == [1, 2]
    _, stats = policy_loss(
        logprobs, torch.zeros(1, 2), -torch.ones(1), torch.ones(1, 2), loss_type="cispo", epsilon_high=5.0
    )
    assert stats["cispo_clip_ratio"][0] == 0, "counted where the cap takes gain away: A > 0"


def test_a_sequence_ratio_is_the_geometric_mean_over_the_row():
    """rho = (2, .5, 4) -> (2 x .5 x 4)^(1/3) = 4^(1/3) = 1.5874, clipped to 1.2 for A > 0; never 4, the product."""
    arguments = torch.zeros(1, 4), -torch.ones(1), torch.tensor([[1, 1, 1, 0]])
    logprobs = ratios(2.0, 0.5, 4.0, 9.0)
    loss, stats = policy_loss(logprobs, *arguments, importance_sampling_level="sequence")
    loss.backward()
    assert loss.item() == pytest.approx(4 ** (1 / 3))
    assert logprobs.grad.tolist()[0] == pytest.approx([4 ** (1 / 3) / 3] * 3 + [0.0])
    assert stats["clip_ratio/region_mean"][1].item() == 1  # one ratio a row
    positive = policy_loss(logprobs, arguments[0], torch.ones(1), arguments[2], importance_sampling_level="sequence")
    assert positive[0].item() == pytest.approx(-1.2)


def test_the_kl_estimates_at_log_2():
    arguments = torch.tensor([math.log(2.0)]), torch.zeros(1)
    for name, value in {"k1": 0.6931, "k2": 0.2402, "k3": 0.1931}.items():
        assert kl_estimate(*arguments, name).item() == pytest.approx(value, abs=1e-4)


def test_averages_of_rows_of_three_and_one_token():
    """A = (1, 3), on-policy: token losses -1 -1 -1 | -3. grpo (1 + 3) / 2, tokens (3 + 3) / 4, dr_grpo 6 / (2 x 7)."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    expected = {"grpo": -2.0, "dapo": -1.5, "bnpo": -1.5, "dr_grpo": -6 / 14}
    for (loss_type, value), level in itertools.product(expected.items(), LEVELS):
        config = settings(loss_type, importance_sampling_level=level)
        loss, _ = policy_loss(torch.zeros(2, 3), None, torch.tensor([1.0, 3.0]), mask, **config)
        assert loss.item() == pytest.approx(value)
    assert [loss_normalizer(name, 2, 4) for name in LOSS_TYPES] == [2, 4, 4, 2, 4]


# --- the slow, obvious loop ---


def loop_loss(batch: dict, c: dict) -> float:
    """policy_loss written token by token, in Python floats."""
    rows, tokens, total = len(batch["mask"]), int(batch["mask"].sum()), 0.0
    for b in range(rows):
        places = [s for s in range(batch["mask"].shape[1]) if batch["mask"][b, s]]
        new, old, ref, sampled = (
            [batch[name][b, s].item() for s in places]
            for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampling_logprobs")
        )
        a = batch["advantages"][b].item()
        for s in range(len(places)):
            rho = math.exp(new[s] - old[s])
            if c["importance_sampling_level"] == "sequence":
                rho = math.exp(sum(x - y for x, y in zip(new, old, strict=True)) / len(places))
            if c["loss_type"] == "cispo":
                token = -min(rho, c["epsilon_high"]) * a * new[s]
            else:
                token = -min(min(rho, c["delta"]) * a, max(0.8, min(rho, 1 + c["epsilon_high"])) * a)
            token *= min(math.exp(old[s] - sampled[s]), c["importance_sampling_cap"])
            d = new[s] - ref[s]
            token += c["beta"] * (math.exp(-d) + d - 1) * (rho if c["use_bias_correction_kl"] else 1)
            total += token / {"grpo": rows * len(places), "dr_grpo": rows * 7}.get(c["loss_type"], tokens)
    return total


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_values_and_gradients_equal_the_loop(loss_type, level, corrected):
    config = settings(loss_type, importance_sampling_level=level, use_bias_correction_kl=corrected)
    config |= {"delta": 1.4, "beta": 0.1, "importance_sampling_cap": 1.1}
    batch = random_batch()
    loss, grad, _ = value_and_grad(batch, **config)
    assert loss.item() == pytest.approx(loop_loss(batch, config), rel=1e-5)
    if loss_type == "cispo":
        return  # its weight has no gradient, which differences of the value cannot see
    for b, s in itertools.product(range(6), range(5)):
        nudge = torch.zeros(6, 5).double()
        nudge[b, s] = 1e-6
        plus, minus = (loop_loss({**batch, "logprobs": batch["logprobs"] + sign * nudge}, config) for sign in (1, -1))
        assert grad[b, s].item() == pytest.approx((plus - minus) / 2e-6, abs=1e-5)


def test_the_truncated_importance_weight_has_no_gradient_and_both_sides_are_logged():
    old, sampled = torch.tensor([[0.0, -0.5]]), torch.tensor([[-1.0, 0.0]])  # weights e^1 -> 2, e^-.5
    logprobs = old.clone().requires_grad_()
    arguments = logprobs, old, torch.ones(1), torch.ones(1, 2)
    loss, stats = policy_loss(*arguments, sampling_logprobs=sampled, importance_sampling_cap=2.0)
    loss.backward()
    assert logprobs.grad.tolist()[0] == pytest.approx([-1.0, -math.exp(-0.5) / 2])
    assert stats["sampling/sampling_logp_difference/mean"][0].item() == pytest.approx(1.5)
    assert stats["sampling/importance_sampling_ratio/mean"][0].item() == pytest.approx(math.e + math.exp(-0.5))
    assert policy_loss(*arguments, sampling_logprobs=sampled)[0].item() == pytest.approx(-1.0)  # cap 0: only logged


# --- exact expectations, by enumerating everything a tiny policy can say ---

TOKENS = 3  # token 2 ends; at most two tokens: 2, 02, 00, 01, 12, 10, 11
SEQUENCES = [(2,), *itertools.product((0, 1), range(TOKENS))]


def score_all(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (7, 2), mask (7, 2) and probabilities (7,) of all completions; row p of the table follows p."""
    logp = table.log_softmax(dim=1)
    rows = [[logp[p, t] for p, t in zip((TOKENS, *s), s, strict=False)] for s in SEQUENCES]
    mask = torch.tensor([[1, len(s) == 2] for s in SEQUENCES])
    logprobs = torch.stack([torch.stack([*row, torch.zeros(())][:2]) for row in rows])
    return logprobs, mask, (logprobs * mask).sum(dim=1).exp()


@pytest.mark.parametrize("baseline", [0.0, 0.6])
@pytest.mark.parametrize("loss_type", ["dapo", "dr_grpo"])
def test_the_expected_gradient_is_the_gradient_of_the_expected_reward(loss_type, baseline):
    """Sum over all completions of p(o) x gradient, A = r - b: the baseline changes the variance, not the mean."""
    table = torch.randn(TOKENS + 1, TOKENS, requires_grad=True)
    rewards = torch.rand(len(SEQUENCES))
    logprobs, mask, p = score_all(table)
    (truth,) = torch.autograd.grad(-(p * rewards).sum(), table, retain_graph=True)
    weighted = p.detach() * (rewards - baseline)  # the loss is linear in A, so A may carry the probability
    config = settings(loss_type, max_completion_length=1, normalizer=1)
    loss, _ = policy_loss(logprobs, None, weighted, mask, **config)
    (estimate,) = torch.autograd.grad(loss, table)
    torch.testing.assert_close(estimate, truth, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "corrected", "target"),
    [
        ("k1", False, "zero"),
        ("k2", False, "reverse"),
        ("k3", False, "forward"),
        ("k3", True, "reverse"),
        ("k1", True, "reverse"),
    ],
)
def test_the_expected_gradients_of_the_kl_estimators(estimator, corrected, target):
    """One token; E over the policy. k1 as a loss does nothing; k3 alone pulls along KL(ref || pi), the wrong one."""
    logits, ref = torch.randn(5, requires_grad=True), torch.randn(5).log_softmax(dim=0)
    logp = logits.log_softmax(dim=0)
    reverse, forward = (logp.exp() * (logp - ref)).sum(), (ref.exp() * (ref - logp)).sum()
    truth = {"zero": 0 * reverse, "reverse": reverse, "forward": forward}[target]
    (truth,) = torch.autograd.grad(truth, logits, retain_graph=True)
    estimate = torch.zeros(5)
    config = {"kl_estimator": estimator, "use_bias_correction_kl": corrected, "beta": 1.0}
    for token in range(5):
        row = logp[token].reshape(1, 1)
        arguments = row, None, torch.zeros(1), torch.ones(1, 1)
        loss, _ = policy_loss(*arguments, ref_logprobs=ref[token].reshape(1, 1), **config)
        estimate += logp[token].exp().detach() * torch.autograd.grad(loss, logits, retain_graph=True)[0]
    torch.testing.assert_close(estimate, truth, rtol=1e-4, atol=1e-6)


# --- properties ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_on_policy_the_loss_is_minus_the_mean_advantage_and_the_gradient_is_not_zero(loss_type, level):
    """Advantages that sum to 0 give loss 0, which looks dead and is not: the gradient is -A per token."""
    batch = random_batch()
    batch["advantages"] = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, -2.0])
    batch["mask"] = torch.ones(6, 5, dtype=torch.bool)
    stored = {**batch, "old_logprobs": batch["logprobs"]}
    absent = {**batch, "old_logprobs": None}
    config = settings(loss_type, importance_sampling_level=level, epsilon_high=5.0)
    for left, right in zip(value_and_grad(stored, **config)[:2], value_and_grad(absent, **config)[:2], strict=True):
        assert torch.equal(left, right)
    loss, grad, stats = value_and_grad(absent, **config)
    if loss_type != "cispo":
        assert abs(loss.item()) < 1e-6
        assert stats["clip_ratio/region_mean"][0].item() == 0
    tokens = 42 if loss_type == "dr_grpo" else 30
    torch.testing.assert_close(grad, -batch["advantages"][:, None].expand(6, 5) / tokens)


FULL = {"beta": 0.1, "importance_sampling_cap": 2.0, "delta": 3.0}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_what_stands_under_mask_zero_changes_no_bit(loss_type, level):
    batch = random_batch()
    config = settings(loss_type, importance_sampling_level=level, **FULL)
    loss, grad, stats = value_and_grad(batch, **config)
    assert not grad[~batch["mask"]].any()
    for junk in (math.nan, math.inf, -math.inf, 200.0, -200.0, None):
        dirty = dict(batch)
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampling_logprobs"):
            filler = torch.randn(6, 5) if junk is None else torch.full((6, 5), junk)
            dirty[name] = torch.where(batch["mask"], batch[name], filler)
        again = value_and_grad(dirty, **config)
        assert torch.equal(again[0], loss)
        assert torch.equal(again[1], grad)
        assert all(torch.equal(again[2][name][0], stats[name][0]) for name in stats)


@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 4), (3, 3)])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_micro_batches_with_the_steps_normalizer_add_up(loss_type, level, sizes):
    batch = random_batch()
    config = settings(loss_type, importance_sampling_level=level, **FULL)
    loss, grad, stats = value_and_grad(batch, **config)
    normalizer = loss_normalizer(loss_type, 6, int(batch["mask"].sum()))
    parts, start = [], 0
    for size in sizes:
        part = {name: tensor[start : start + size] for name, tensor in batch.items()}
        parts.append(value_and_grad(part, normalizer=normalizer, **config))
        start += size
    if loss_type == "bnpo":  # the exception, by definition
        assert not torch.allclose(sum(part[0] for part in parts) / len(sizes), loss)
        return
    torch.testing.assert_close(sum(part[0] for part in parts), loss)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad)
    for name, (total, count) in stats.items():
        sums, counts = (sum(part[2][name][i] for part in parts) for i in (0, 1))
        torch.testing.assert_close(sums / counts, total / count, msg=name)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_row_order_extra_padding_and_a_duplicated_batch_change_nothing(loss_type, level):
    batch = random_batch()
    config = settings(loss_type, importance_sampling_level=level, **FULL)
    loss, grad, _ = value_and_grad(batch, **config)
    order = torch.randperm(6)
    shuffled = value_and_grad({name: tensor[order] for name, tensor in batch.items()}, **config)
    torch.testing.assert_close(shuffled[0], loss)
    torch.testing.assert_close(shuffled[1], grad[order])
    twice = value_and_grad({name: torch.cat([tensor, tensor]) for name, tensor in batch.items()}, **config)
    torch.testing.assert_close(twice[0], loss)
    torch.testing.assert_close(twice[1][:6] + twice[1][6:], grad)
    wider = {n: t if t.dim() == 1 else torch.nn.functional.pad(t, (0, 3)) for n, t in batch.items()}
    torch.testing.assert_close(value_and_grad(wider, **config)[0], loss)


# --- edges ---


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("gap", [200.0, -200.0])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_log_ratios_of_200_give_finite_values_and_gradients(loss_type, level, gap, sign):
    zeros = torch.zeros(1, 1)
    batch = {"logprobs": zeros + gap, "old_logprobs": zeros, "ref_logprobs": zeros, "sampling_logprobs": zeros - gap}
    batch |= {"mask": zeros == 0, "advantages": torch.tensor([sign])}
    loss, grad, stats = value_and_grad(batch, **settings(loss_type, importance_sampling_level=level, beta=0.1))
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert all(total.isfinite() for total, _ in stats.values())


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_with_every_token_masked_is_zero_and_finite(loss_type):
    batch = random_batch() | {"mask": torch.zeros(6, 5)}
    for level in LEVELS:
        loss, grad, _ = value_and_grad(batch, **settings(loss_type, importance_sampling_level=level, **FULL))
        assert loss.item() == 0
        assert not grad.any()


def test_a_fully_masked_row_counts_as_a_row_and_not_as_tokens():
    """As in TRL with mask_truncated_completions: grpo and dr_grpo divide by 2 rows, dapo by the 2 tokens left."""
    mask = torch.tensor([[1, 1], [0, 0]])
    for loss_type, expected in {"grpo": -0.5, "dr_grpo": -2 / 14, "dapo": -1.0}.items():
        loss, _ = policy_loss(torch.zeros(2, 2), None, torch.tensor([1.0, 9.0]), mask, **settings(loss_type))
        assert loss.item() == pytest.approx(expected)
    arguments = ratios(2.0, 2.0).detach().expand(2, 2), torch.zeros(2, 2), torch.ones(2), mask
    stats = policy_loss(*arguments, importance_sampling_level="sequence")[1]
    assert [part.item() for part in stats["clip_ratio/high_mean"]] == [1, 1]  # the empty row has no ratio


def test_only_the_trained_policy_receives_a_gradient_and_the_kl_is_corrected_by_default():
    batch = random_batch()
    frozen = [batch[name].requires_grad_() for name in ("old_logprobs", "ref_logprobs", "sampling_logprobs")]
    default = value_and_grad(batch, beta=0.1, importance_sampling_cap=2.0)
    assert all(tensor.grad is None for tensor in frozen)
    corrected, plain = (
        value_and_grad(batch, use_bias_correction_kl=on, **FULL | {"delta": None}) for on in (True, False)
    )
    assert torch.equal(default[1], corrected[1])
    assert not torch.equal(default[1], plain[1])


def test_half_precision_inputs_are_computed_in_float32():
    """In bfloat16 the ratio of a small update, exp(-.001), rounds to 1 and would lose the step."""
    logprobs = torch.tensor([[-0.001]], dtype=torch.bfloat16)
    loss, _ = policy_loss(logprobs, torch.zeros_like(logprobs), torch.ones(1), torch.ones(1, 1))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-math.exp(logprobs.item()), abs=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss_type": "dpo"}, 'loss_type = "dpo"; expected grpo, dapo, bnpo, dr_grpo or cispo'),
        ({"importance_sampling_level": "word"}, "expected token or sequence"),
        ({"loss_type": "cispo"}, "needs epsilon_high, the absolute cap"),
        ({"loss_type": "dr_grpo"}, "divides by max_completion_length"),
        ({"beta": 0.1, "ref_logprobs": None}, r"beta = 0.1 needs ref_logprobs"),
        ({"beta": 0.1, "kl_estimator": "k4"}, "expected k1, k2 or k3"),
        ({"mask": torch.ones(6, 4)}, r"mask: shape \(6, 4\); expected \(6, 5\)"),
        ({"old_logprobs": torch.ones(6, 6)}, r"old_logprobs: shape \(6, 6\)"),
        ({"advantages": torch.ones(3, 2)}, r"advantages: shape \(3, 2\); expected \(6,\)"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**{**random_batch(), **change})


# --- the same numbers as TRL 1.16 ---


def trl_cases(folder):
    """(case, stored tensors, keyword arguments of policy_loss without logprobs) of every case of the table."""
    with np.load(folder / "oracle.npz") as file:
        stored = {name: torch.tensor(file[name]) for name in file.files}
    for case in json.loads((folder / "cases.json").read_text(encoding="utf-8"))["cases"]:
        suffix = f"_T{case['temperature']}"
        arguments = {
            "old_logprobs": stored["old_logps" + suffix] if case["old"] else None,
            "ref_logprobs": stored["ref_logps" + suffix],
            "advantages": stored["advantages"],
            "mask": stored["completion_mask"],
            "epsilon": case["eps_low"],
            "epsilon_high": case["eps_high"],
            "importance_sampling_level": case["level"],
            "max_completion_length": 10,
        }
        yield case, stored, arguments | {name: case[name] for name in ("beta", "loss_type")}


def test_values_equal_trl_on_stored_log_probabilities(shared):
    for case, stored, arguments in trl_cases(shared / "checkpoints" / "trl_loss"):
        loss, _ = policy_loss(stored[f"logps_T{case['temperature']}"], **arguments)
        assert loss.item() == pytest.approx(case["loss"], abs=1e-6), case["case"]


def test_gradients_through_a_model_equal_trl(shared):
    """Norm over all parameters and the matrix of one layer; float32 sums in another order differ by about 1e-5.

    NOTE: log-probabilities at temperature 1 throughout: in this table the temperature never reached the logits
    (logps_T0.7 equals logps_T1.0); that log-probabilities are tempered is tested in step 17.
    """
    from model import load_model  # only here: the loss itself needs no model

    model = load_model(shared / "checkpoints" / "q2_tied_fp32")
    for case, stored, arguments in trl_cases(shared / "checkpoints" / "trl_loss"):
        ids = torch.cat([stored["prompt_ids"], stored["completion_ids"]], dim=1)
        attention_mask = torch.cat([stored["prompt_mask"], stored["completion_mask"]], dim=1)
        start = stored["prompt_ids"].shape[1] - 1  # the position that scores the first completion token
        logprobs = model(ids, attention_mask)[:, start:-1].log_softmax(dim=2)
        logprobs = logprobs.gather(2, stored["completion_ids"].unsqueeze(2)).squeeze(2)
        model.zero_grad()
        loss, _ = policy_loss(logprobs, **arguments)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        assert loss.item() == pytest.approx(case["loss"], abs=5e-6), case["case"]
        assert norm.item() == pytest.approx(case["grad_norm"], rel=1e-4), case["case"]
        expected = stored[case["case"] + "_grad_l1_q"]
        difference = model.model.layers[1].self_attn.q_proj.weight.grad - expected
        assert difference.norm() < 1e-4 * expected.norm(), case["case"]
