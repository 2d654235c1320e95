"""Step 17: log-probabilities. `grpo/batch.py`: `token_logprobs` and `score`.

What is built: log p of every branch token under the distribution that it was sampled from,

    log p(c_s) = log_softmax(logits_s / temperature)[c_s]      over the ids that the tokenizer knows,

in float32, with a gradient, and never for more rows of logits at once than MAX_LOGITS allows. Needs steps 05, 08 and
16; steps 19 to 21 make losses of it. Command: pytest tests/test_17_logprobs.py
"""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import check_close, gradients, tiny_model
from rl_helpers import TablePolicy, lora_model, random_policy

import grpo.batch
from grpo.batch import build_tree, score, token_logprobs
from model.lora import lora_parameters
from model.sampling import generate

CPU = torch.device("cpu")
PREFIXES = [[5], [6, 0, 3], [5]]
BRANCHES = [[[1, 0], [2, 3, 4, 0]], [[0], [0, 4, 0], [6, 6, 6, 6]], [[1, 0]]]
ROWS = [(prefix, branch) for prefix, group in zip(PREFIXES, BRANCHES, strict=True) for branch in group]


def tree():
    return build_tree(PREFIXES, BRANCHES, CPU)


# --- worked ---


def test_worked_values():
    """Equal logits: log 1/2 = -0.6931. Logits (log 3, 0): probabilities 3 : 1, so log 3/4 = -0.2877."""
    logits = torch.tensor([[0.0, 0.0], [math.log(3), 0.0]])
    check_close(token_logprobs(logits, torch.tensor([1, 0])), [-0.693147, -0.287682], "log p, nats")


def test_temperature_divides_the_logits():
    """Logits (log 4, log 1): 4 : 1 at T = 1. At T = 2 the roots, 2 : 1, at T = 1/2 the squares, 16 : 1."""
    table = torch.tensor([[math.log(4), 0.0], [0.0, 0.0]])
    batch = build_tree([[0]], [[[0]]], CPU)
    for temperature, probability in {1.0: 4 / 5, 2.0: 2 / 3, 0.5: 16 / 17}.items():
        logprob = score(TablePolicy(table), batch, temperature=temperature)
        check_close(logprob, [[math.log(probability)]], "did you divide the logits by the temperature?")


def test_ids_that_the_tokenizer_does_not_know_take_no_probability():
    """Ids 0 and 1 are tokens with logits (log 3, 0), id 2 is a spare row of the embedding, with logit 100.

    The sampler never draws it, so log p(0) = log 3/4; counted in, it would take everything and leave about -99.
    """
    policy, batch = TablePolicy(torch.tensor([[math.log(3), 0.0, 100.0]] * 3)), build_tree([[1]], [[[0]]], CPU)
    check_close(score(policy, batch, vocab_size=2), [[math.log(3 / 4)]], "cut the logits at vocab_size")
    assert score(policy, batch) < -98
    slope = gradients(policy, lambda: score(policy, batch, vocab_size=2).sum())["model.embed_tokens.weight"]
    check_close(slope[1], [0.25, -0.25, 0.0], "d log p / d logits = onehot - p, and nothing for the spare row")


# --- against something slow or built in ---


def test_token_logprobs_is_minus_cross_entropy():
    logits, target = 5 * torch.randn(6, 9), torch.randint(9, (6,))
    check_close(token_logprobs(logits, target), -F.cross_entropy(logits, target, reduction="none"), "log p, not p")
    assert token_logprobs(torch.tensor([[1000.0, 0.0]]), torch.tensor([1])).item() == -1000  # no log of an underflow


def test_every_token_is_scored_on_what_comes_before_it():
    policy = random_policy()
    expected = torch.zeros(6, 4)
    for b, (prefix, branch) in enumerate(ROWS):
        for s, (previous, token) in enumerate(zip([prefix[-1], *branch], branch, strict=False)):
            expected[b, s] = policy.logprob(previous, token)
    check_close(score(policy, tree()), expected, "0 at padding, table[previous][token] elsewhere")


def test_the_tree_gives_what_plain_rows_give():
    """The slow way: every branch as a row of its own, prompt copied, the whole (T, V) log-softmax, then a slice."""
    model = tiny_model()
    logprobs = score(model, tree(), temperature=0.7)
    for b, (prefix, branch) in enumerate(ROWS):
        logits = model(torch.tensor([prefix + branch]))[0] / 0.7  # (T, V)
        places = range(len(prefix) - 1, len(prefix + branch) - 1)  # logits at t predict token t + 1
        expected = logits.log_softmax(dim=1)[places, branch]
        check_close(logprobs[b, : len(branch)], expected, "the tree must not change the numbers", atol=1e-5)


def test_the_policy_that_is_scored_is_the_policy_that_was_sampled():
    """The sampler's own log-probabilities come back: same temperature, same vocabulary, end tokens, ragged prompts."""
    model, settings = tiny_model(vocab_size=16), {"temperature": 0.7, "vocab_size": 13}
    prompts = [[3, 4, 5, 0], [6], [3, 4, 5, 0]]
    samples = generate(model, prompts, 4, max_completion_length=9, eos_ids={0, 1}, **settings)
    logprobs = score(model, build_tree(prompts, samples.ids, CPU), **settings)
    rows = [row for group in samples.logprobs for row in group]
    assert len({len(row) for row in rows}) > 2, "completions of several lengths"
    for b, row in enumerate(rows):
        check_close(logprobs[b, : len(row)], row, "sampler and trainer disagree", atol=1e-5)


def test_a_changed_adapter_reaches_the_sampler_at_once():
    """After an update the next samples are the new policy's: nothing is merged or copied that could be stale."""
    model, settings, sampled = lora_model(), {"temperature": 0.7, "vocab_size": 40}, []
    for _ in range(2):
        how = {"max_completion_length": 5, "eos_ids": {0}, "generator": torch.Generator().manual_seed(0)}
        samples = generate(model, [[3, 4, 5], [6]], 2, **how, **settings)
        logprobs = score(model, build_tree([[3, 4, 5], [6]], samples.ids, CPU), **settings)
        sampled.append([row for group in samples.logprobs for row in group])
        for b, row in enumerate(sampled[-1]):
            check_close(logprobs[b, : len(row)], row, "the sampler has another adapter than the trainer", atol=1e-5)
        for parameter in lora_parameters(model).values():
            parameter.data += 0.1
    assert sampled[0] != sampled[1]


def test_gradients_reach_everything_that_a_plain_row_would_train():
    """The prompt's keys and values, too: what a completion looks back at is learned with it."""
    model = tiny_model()

    def plain() -> torch.Tensor:
        rows = [(model(torch.tensor([prefix + branch]))[0], len(prefix) - 1, branch) for prefix, branch in ROWS]
        return sum(token_logprobs(logits[start:-1], torch.tensor(branch)).sum() for logits, start, branch in rows)

    expected = gradients(model, plain)
    for name, slope in gradients(model, lambda: score(model, tree()).sum()).items():
        check_close(slope, expected[name], f"{name}: part of its gradient is missing", rtol=1e-4, atol=1e-4)


# --- properties ---


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_vocabulary_blocks_change_neither_values_nor_gradients(monkeypatch, rows):
    """16 scored tokens; at most `rows` of them meet the 48 logits at once."""
    model, settings = tiny_model(), {"temperature": 0.7, "vocab_size": 40}
    weights = torch.randn(6, 4)

    def loss() -> torch.Tensor:
        return (score(model, tree(), **settings) * weights).sum()

    whole, slopes = score(model, tree(), **settings), gradients(model, loss)
    monkeypatch.setattr(grpo.batch, "MAX_LOGITS", rows * 48)
    sizes, logits = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: sizes.append(len(hidden)) or logits(hidden))
    check_close(score(model, tree(), **settings), whole, "a block must take its own targets")
    assert max(sizes) == rows, "MAX_LOGITS // config.vocab_size rows: a block holds the logits before they are cut"
    assert sum(sizes) == 16, "logits of the branch tokens only: no padding, no prompt"
    for name, slope in gradients(model, loss).items():
        check_close(slope, slopes[name], name, atol=1e-5)
    assert sum(sizes) == 3 * 16, "each block again in the backward pass (torch.utils.checkpoint)"


def test_a_vocabulary_larger_than_a_block_is_still_scored(monkeypatch):
    monkeypatch.setattr(grpo.batch, "MAX_LOGITS", 1)
    with torch.no_grad():
        check_close(score(random_policy(), tree()) < 0, tree().mask, "one row at a time")


def test_what_stands_in_the_padding_does_not_matter():
    model, batch, noisy = tiny_model(), tree(), tree()
    padding = torch.arange(batch.prefix_ids.shape[1]) >= batch.prefix_lengths[:, None]
    noisy.prefix_ids[padding] = torch.randint(48, (int(padding.sum()),))
    for ids in (noisy.input_ids, noisy.target_ids):
        ids[~batch.mask] = torch.randint(48, (int((~batch.mask).sum()),))
    slopes = [gradients(model, lambda b=b: score(model, b).sum()) for b in (batch, noisy)]
    assert torch.equal(score(model, batch), score(model, noisy))
    assert all(torch.equal(slopes[0][name], slopes[1][name]) for name in slopes[0])


def test_padding_scores_zero_and_the_result_is_float32():
    """A base in bfloat16 included: a ratio of two bfloat16 log-probabilities would be noise."""
    logprobs = score(tiny_model().to(torch.bfloat16), tree())
    assert logprobs.dtype == torch.float32
    assert (logprobs[~tree().mask] == 0).all()
    assert (logprobs[tree().mask] < 0).all()
