"""Step 20: one update. `grpo/update.py`: `update_policy`, `micro_batches`, `learning_rate`.

What is built: rollouts and advantages in, `num_iterations` optimizer steps out. Rule: every micro-batch is divided by
the token (or row) count of the whole step, so that splitting changes no number; old log-probabilities are those of the
first iteration; groups without a signal are not scored, yet their tokens count. While the ratio is one:

    d loss = - sum_i A_i sum_t d log pi(token t of row i) / normalizer

Needs steps 15 to 19. Command: pytest tests/test_20_update.py
"""

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from helpers import check_close, tiny_model
from rl_helpers import ADVANTAGES, PROMPTS, TablePolicy, check_same, gradient, lora_model, make_rollouts, settings

import grpo.update
from grpo.advantage import compute_advantages
from grpo.batch import build_tree, score
from grpo.loss import kl_estimate
from grpo.rollout import Rollouts
from grpo.update import learning_rate, make_optimizer, micro_batches, update_policy
from model.sampling import generate

# --- worked ---


def two_completions(finished: tuple[bool, bool] = (True, True), **changes) -> tuple[TablePolicy, float]:
    """One SGD step on two one-token completions, 0 with A = 1 and 1 with A = -1, p = (1/2, 1/2), and its norm."""
    policy = TablePolicy(torch.zeros(2, 2))
    rollouts = Rollouts([[0]], [[[0], [1]]], [[[-0.6931]] * 2], [list(finished)], [[0.6931] * 2])
    config, optimizer = settings(temperature=1.0, **changes), torch.optim.SGD(policy.parameters(), lr=1.0)
    totals = update_policy(policy, optimizer, rollouts, torch.tensor([[1.0, -1.0]]), config)
    return policy, totals["grad_norm"][0]


def test_a_completion_with_positive_advantage_becomes_more_likely():
    """d log p(0) = (1/2, -1/2), and d log p(1) its negative: d loss = -((1/2, -1/2) - (-1/2, 1/2)) / 2 tokens =
    (-1/2, 1/2), and SGD goes against it. The norm, 0.7071, is logged before it is clipped to a tenth.
    """
    for max_grad_norm, slope in {1.0: 0.5, 0.0707107: 0.05}.items():
        policy, norm = two_completions(max_grad_norm=max_grad_norm)
        check_close(policy.table.grad, [[-slope, slope], [0.0, 0.0]], "sign, or the step's two tokens")
        assert policy.logprob(0, 0) > -0.6931 > policy.logprob(0, 1)
        assert norm == pytest.approx(0.7071, abs=1e-4)


def test_a_masked_truncated_completion_leaves_the_loss_but_not_the_baseline():
    """Completion 1 was cut: -(1/2, -1/2) / 1 token. With a baseline without it A would be 0, and the gradient too."""
    policy, _ = two_completions(finished=(True, False), mask_truncated_completions=True)
    check_close(policy.table.grad, [[-0.5, 0.5], [0.0, 0.0]], "one token, and the advantage that it had")


def test_the_end_token_is_pushed_like_any_other():
    """After token 1, with p = (1/2, 1/2): 1 and then the end, 0, with A = 1; 1 and 1 with A = -1; four tokens.

    d log p(0) = (1/2, -1/2) = -d log p(1). The first row: 0 in sum. The second: -2 (-1/2, 1/2) = (1, -1). So
    d loss = -(1, -1) / 4: the end becomes more likely. Without the last tokens the sum would be 0: nobody would stop.
    """
    policy = TablePolicy(torch.zeros(2, 2))
    rollouts = Rollouts([[1]], [[[1, 0], [1, 1]]], [[[-0.6931] * 2] * 2], [[True, False]], [[0.6931] * 2])
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    update_policy(policy, optimizer, rollouts, torch.tensor([[1.0, -1.0]]), settings(temperature=1.0))
    check_close(policy.table.grad, [[0.0, 0.0], [-0.25, 0.25]], "the end token is under the mask")


def test_learning_rate_schedules():
    """Name and warmup_steps, and the rates of six steps: the last one still learns. (1 + cos(pi / 4)) / 2 = 0.8536."""
    schedules = {
        ("linear", 2): [0.5, 1.0, 1.0, 0.75, 0.5, 0.25],
        ("cosine", 2): [0.5, 1.0, 1.0, 0.8536, 0.5, 0.1464],
        ("constant_with_warmup", 4): [0.25, 0.5, 0.75, 1.0, 1.0, 1.0],
        ("constant", 0): [1.0] * 6,
    }
    for (name, warmup_steps), rates in schedules.items():
        config = settings(learning_rate=1.0, lr_scheduler_type=name, warmup_steps=warmup_steps)
        assert [learning_rate(config, step, 6) for step in range(6)] == pytest.approx(rates, abs=1e-4), name


# --- the slow, obvious spec ---


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "bnpo"])
def test_the_gradient_is_reinforce_over_the_whole_step(loss_type, masked):
    """Row by row, prompt copied, no tree, no batch; the flat group's rows and tokens are counted like any other.

    A truncated completion that is masked leaves the sum and the token count, but it stays a row and, above all, its
    group's advantages stay as they are: they were computed with it. bnpo: a mean of three micro-batches' token means.
    """
    model, rollouts, slow = tiny_model(), make_rollouts(), 0.0
    kept = ~rollouts.truncated if masked else torch.ones(5, 3, dtype=torch.bool)
    tokens = (rollouts.lengths * kept).sum(dim=1).tolist()  # of every group
    for q, g in kept.nonzero().tolist():
        ids = rollouts.completion_ids[q][g]
        logits = model(torch.tensor([PROMPTS[q] + ids]))[0, len(PROMPTS[q]) - 1 : -1] / 0.8
        row = logits.log_softmax(dim=1)[range(len(ids)), ids].sum()
        in_micro_batch = sum(tokens[q // 2 * 2 : q // 2 * 2 + 2])
        divisors = {"dapo": sum(tokens), "grpo": 15 * len(ids), "dr_grpo": 15 * 6, "bnpo": 3 * in_micro_batch}
        slow -= ADVANTAGES[q, g] * row / divisors[loss_type]
    slow.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    config = settings(loss_type=loss_type, mask_truncated_completions=masked, micro_batch_size=2)
    check_same(gradient(model, config)[0], expected, "mean of means, lost denominator, moved baseline or wrong sign")


@pytest.mark.parametrize(("name", "share"), {"rloo": 1.0, "dr_grpo": 0.5}.items())
def test_over_all_groups_the_expected_gradient_is_that_of_the_expected_reward(name, share):
    """Every group of two one-token completions, weighed by its probability: the baseline that a group makes of itself.

    Left out of its own baseline (rloo), a completion's advantage is unbiased; with it, it is (G - 1) / G = 1/2 of that.
    """
    table, rewards = torch.randn(3, 3), torch.tensor([1.0, 0.2, 0.0])
    p = table[0].softmax(dim=0)
    truth = -p * (rewards - p @ rewards)  # of minus the expected reward, by the logits that follow token 0
    total = torch.zeros(3)
    for pair in itertools.product(range(3), repeat=2):
        policy = TablePolicy(table)
        rollouts = Rollouts([[0]], [[[token] for token in pair]], [[[-1.0]] * 2], [[True] * 2], [[1.0] * 2])
        advantages = compute_advantages(rewards[list(pair)][None], name)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.0)
        update_policy(policy, optimizer, rollouts, advantages, settings(temperature=1.0))
        total += p[pair[0]] * p[pair[1]] * policy.table.grad[0]
    check_close(total, share * truth, "the baseline must not change the expectation")


# --- properties ---


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "cispo"])
def test_micro_batches_change_no_gradient_and_no_metric(loss_type, level):
    """Two iterations, so that ratios differ from one and some are clipped; a KL term and truncated IS as well."""
    config = {"loss_type": loss_type, "importance_sampling_level": level, "num_iterations": 2, "beta": 0.1}
    config |= {"importance_sampling_cap": 2.0, "epsilon_high": 1.02 if loss_type == "cispo" else 0.28}
    results = []
    for size in (5, 1, 2, 3):
        model = lora_model()
        results.append(gradient(model, settings(micro_batch_size=size, **config), rate=0.05, reference=model))
        check_same(results[-1][0], results[0][0], f"gradient with {size} groups in a micro-batch")
        check_same(results[-1][1], results[0][1], f"metric with {size} groups in a micro-batch")
    clipped = results[0][1]["cispo_clip_ratio" if loss_type == "cispo" else "clip_ratio/region_mean"]
    assert clipped[0] > 0, "no ratio was clipped: this test shows less than it should"
    assert results[0][1]["kl"][1] == 2 * 55  # tokens of both iterations


def test_flat_groups_are_skipped_and_it_changes_no_gradient(monkeypatch):
    """Group 2 is nine tokens of the denominator all the same: what it says is "change nothing". A KL term needs it."""
    assert micro_batches(ADVANTAGES, settings(micro_batch_size=2)) == [[0, 1], [3, 4]]
    assert micro_batches(ADVANTAGES, settings(micro_batch_size=2, beta=0.1)) == [[0, 1], [2, 3], [4]]
    skipped, totals = gradient(tiny_model(), settings())
    assert totals["tokens/with_gradient_ratio"] == (46, 55)
    monkeypatch.setattr(grpo.update, "micro_batches", lambda advantages, _: [[q] for q in range(len(advantages))])
    check_same(gradient(tiny_model(), settings())[0], skipped, "a flat group says nothing")
    alone, _ = gradient(tiny_model(), settings(), groups=(0, 1, 3, 4))
    check_same(skipped, {name: slope * 46 / 55 for name, slope in alone.items()}, "but its tokens count")


def test_old_logprobs_are_frozen_before_the_first_update(monkeypatch):
    calls, policy_loss = [], grpo.update.policy_loss

    def spy(logprobs, old_logprobs, *rest, **settings):
        calls.append((logprobs, logprobs.detach() if old_logprobs is None else old_logprobs))
        return policy_loss(logprobs, old_logprobs, *rest, **settings)

    monkeypatch.setattr(grpo.update, "policy_loss", spy)
    gradient(tiny_model(), settings(num_iterations=3, micro_batch_size=2), rate=0.05)
    for i, (logprobs, old) in enumerate(calls):  # two micro-batches an iteration
        assert torch.equal(old, calls[i % 2][0]), "old is what the first iteration computed"
        assert torch.equal(logprobs, old) == (i < 2), "the ratio is one in the first iteration and only there"


def test_every_iteration_starts_from_a_zero_gradient():
    once, twice = (gradient(tiny_model(), settings(num_iterations=n))[0] for n in (1, 2))  # the rate is 0
    check_same(twice, once, "the first iteration's gradient was left in")


def test_scoring_uses_the_temperature_and_vocabulary_of_the_sampler():
    """Before any update the trainer's log-probabilities are the sampler's: the logged difference is rounding."""
    model, prompts, config = tiny_model(), PROMPTS[:2], settings()
    s = generate(model, prompts, 3, max_completion_length=6, eos_ids={0}, vocab_size=30, temperature=0.8)
    rollouts, optimizer = Rollouts(prompts, *vars(s).values()), torch.optim.SGD(model.parameters(), lr=0.0)
    totals = update_policy(model, optimizer, rollouts, ADVANTAGES[:2], config, vocab_size=30)
    difference, count = totals["sampling/sampling_logp_difference/mean"]
    assert (difference / count, count) == (pytest.approx(0, abs=1e-5), rollouts.lengths.sum())


def test_the_reference_is_the_model_without_its_adapter_or_a_frozen_copy_of_it():
    model, frozen, config = lora_model(), tiny_model(), settings(beta=0.5, num_iterations=2)
    tree = build_tree(PROMPTS, make_rollouts().completion_ids, torch.device("cpu"))
    with torch.no_grad():
        logprobs, base = (score(m, tree, temperature=0.8, vocab_size=40)[tree.mask] for m in (model, frozen))
    off, totals = gradient(model, config, reference=model, vocab_size=40)
    copied, totals_copied = gradient(lora_model(), config, reference=frozen, vocab_size=40)
    assert totals["kl"][0] == pytest.approx(2 * kl_estimate(logprobs, base).sum().item(), rel=1e-4)
    assert totals["kl"][0] > 1
    check_same(off | totals, copied | totals_copied, "the adapter must be off, and on again afterwards")


@pytest.mark.parametrize("make", [tiny_model, lambda: lora_model(0.0)], ids=["full", "lora"])
def test_every_trained_parameter_moves_and_no_other(make):
    """LoRA takes two updates: while B is zero no gradient reaches A."""
    model = make()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = make_optimizer(model.parameters(), settings(learning_rate=1e-3))
    for _ in range(2):
        update_policy(model, optimizer, make_rollouts(), ADVANTAGES, settings())
    still = {name for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert still == {name for name, p in before.items() if not p.requires_grad}


# --- edges ---


@pytest.mark.parametrize("why", ["flat", "truncated"])
def test_a_step_without_any_signal_has_a_gradient_of_exactly_zero_and_moves_nothing(why):
    model, rollouts = tiny_model(), make_rollouts()
    config, before = settings(learning_rate=1.0, mask_truncated_completions=True), copy.deepcopy(model.state_dict())
    rollouts = replace(rollouts, finished=[[why == "flat"] * 3] * 5)
    advantages = ADVANTAGES * (why == "truncated")
    totals = update_policy(model, make_optimizer(model.parameters(), config), rollouts, advantages, config)
    assert totals["grad_norm"] == (0.0, 1.0)
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters()), "zeros, not None"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())  # no 0 / 0 anywhere
