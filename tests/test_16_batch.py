"""Step 16: groups become tensors. `grpo/batch.py`: `build_tree`.

What is built: a prefix that exists once, and its branches as rows that are shifted once and for all:

    prefix   p1 p2 ... pn      ->  prefix_ids  p1 ... p(n-1)
    branch   c1 c2 ... cS      ->  input_ids   pn c1 ... c(S-1)
                                   target_ids  c1 c2 ... cS

Rule: masks come from lengths, never from comparing ids with the pad id; the end token is a branch token like any other.
Step 17 scores the targets. Command: pytest tests/test_16_batch.py
"""

import copy

import pytest
import torch
from helpers import check_close
from rl_helpers import random_policy

from grpo.batch import TreeBatch, build_tree

CPU = torch.device("cpu")
END = 0  # also the id that `pad` fills with: the usual pad == eos trap
# Ragged in every way: prefixes of 1, 3 and 1 tokens (two of them equal), groups of 2, 3 and 1 branches of 1 to 4.
PREFIXES = [[5], [6, END, 3], [5]]
BRANCHES = [[[1, END], [2, 3, 4, END]], [[END], [END, 4, END], [6, 6, 6, 6]], [[1, END]]]


def tree() -> TreeBatch:
    return build_tree(PREFIXES, BRANCHES, CPU)


def rows() -> list[tuple[int, list[int], list[int]]]:
    """(prefix number, prefix, branch) of every row, in order."""
    return [(q, PREFIXES[q], branch) for q, group in enumerate(BRANCHES) for branch in group]


# --- worked ---


def test_the_docstring_example():
    """Prefix 1 2 with branches 3 and 4 5. The 2 is the first input of both rows, so the prefix keeps the 1 alone."""
    batch = build_tree([[1, 2]], [[[3], [4, 5]]], CPU)
    assert batch.prefix_ids.tolist() == [[1]]
    assert batch.prefix_lengths.tolist() == [1]
    assert batch.row_prefix.tolist() == [0, 0]
    assert batch.input_ids.tolist() == [[2, 0], [2, 4]]
    assert batch.target_ids.tolist() == [[3, 0], [4, 5]]
    assert batch.positions.tolist() == [[1, 2], [1, 2]]
    assert batch.mask.tolist() == [[True, False], [True, True]]


# --- the slow, obvious spec ---


def test_every_position_reads_one_token_and_is_scored_on_the_next():
    batch = tree()
    for b, (q, prefix, branch) in enumerate(rows()):
        sequence = prefix + branch
        assert batch.row_prefix[b] == q
        assert batch.prefix_ids[q, : batch.prefix_lengths[q]].tolist() == prefix[:-1]
        for s in range(len(branch)):
            place = len(prefix) + s  # of the token that is scored, in the whole sequence
            assert batch.positions[b, s] == place - 1
            assert batch.input_ids[b, s] == sequence[place - 1]
            assert batch.target_ids[b, s] == sequence[place]


def test_no_shift_is_off_by_one():
    """In a table policy the next token depends on the last one alone: log p(c_s) = table[c_(s-1)][c_s], c_0 = p_n.

    Any other shift reads another row or column, and the numbers of a random table are all different.
    """
    policy, batch = random_policy(), tree()
    logprobs = policy.table.detach().log_softmax(dim=1)[batch.input_ids, batch.target_ids]
    for b, (_, prefix, branch) in enumerate(rows()):
        before = [prefix[-1], *branch[:-1]]
        expected = [policy.logprob(previous, token) for previous, token in zip(before, branch, strict=True)]
        check_close(logprobs[b, : len(branch)], expected, "position s holds what comes before branch token s")


# --- properties ---


def test_masks_come_from_lengths_though_the_pad_id_is_an_end_token():
    """Prompt 6 0 3 and branches 0 and 0 4 0 hold the pad id; nothing of them may be masked."""
    batch = tree()
    assert batch.mask.dtype == torch.bool
    assert batch.mask.sum(dim=1).tolist() == [len(branch) for _, _, branch in rows()]
    assert batch.prefix_lengths.tolist() == [len(prefix) - 1 for prefix in PREFIXES]
    for b, (_, _, branch) in enumerate(rows()):
        assert batch.mask[b].tolist() == [s < len(branch) for s in range(batch.mask.shape[1])]


def test_the_end_token_is_under_the_mask():
    """A policy whose end token is left out of the loss never learns to stop."""
    batch = tree()
    for b, (_, _, branch) in enumerate(rows()):
        last = batch.mask[b].nonzero().max()
        assert batch.target_ids[b, last] == branch[-1]
    assert (batch.target_ids[batch.mask] == END).sum() == 6


def test_equal_prefixes_stay_two_groups():
    batch = tree()
    assert batch.prefix_ids.shape[0] == 3
    assert batch.row_prefix.tolist() == [0, 0, 1, 1, 1, 2]


def test_a_branch_starts_where_its_own_prefix_ends():
    """Not at the width that prefixes are padded to."""
    assert tree().positions[:, 0].tolist() == [0, 0, 2, 2, 2, 0]


def test_masked_targets_in_order_are_the_branches():
    batch = tree()
    assert batch.target_ids[batch.mask].tolist() == [token for _, _, branch in rows() for token in branch]


# --- edges ---


@pytest.mark.parametrize("length", [1, 5])
def test_prefixes_of_one_token_have_nothing_to_prefill(length):
    batch = build_tree([[3], [4]], [[[1] * length], [[2]]], CPU)
    assert batch.prefix_ids.shape == (2, 0)
    assert batch.input_ids[:, 0].tolist() == [3, 4]
    assert batch.positions[0].tolist() == list(range(length))


def test_the_lists_that_come_in_are_not_changed():
    prefixes, branches = copy.deepcopy(PREFIXES), copy.deepcopy(BRANCHES)
    build_tree(prefixes, branches, CPU)
    assert (prefixes, branches) == (PREFIXES, BRANCHES)
