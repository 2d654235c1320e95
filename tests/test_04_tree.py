"""Step 4: the tree of a group. A prompt exists once, and its completions branch from its end.

Built here: model/attention.py `visible_keys` and `attend_rows` with a prompt, `attend_step`; model/cache.py
`PromptCache`, `RowCache`; model/qwen2.py `prefill`, `extend`, `step`.
Rule: a token sees the prompt that its row branches from, and its own row up to itself. Positions count on from the
prompt's length. Numbers and gradients are those of the usual layout, where every row has a copy of its prompt.
Run: pytest tests/test_04_tree.py
Later steps need it: sampling (8) takes `step`, scoring and training (16, 17) take `extend`.
"""

import pytest
import torch
from helpers import check_close, gradients, random_ids, tiny_model
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from model.attention import View, attend_rows, attend_step, visible_keys
from model.cache import PromptCache, RowCache

H, K, E = 4, 2, 8  # query heads, key/value heads, head dim
PROMPTS = {  # lengths of the prompts; every prompt has three completions, of 4, 1 and 6 tokens
    "one group": [5],
    "two groups of one length": [4, 4],
    "ragged groups": [7, 2, 5],
    "an empty prompt beside a longer one": [0, 3],
    "empty prompts": [0, 0],
}


def make_tree(lengths: list[int]) -> tuple[list[Tensor], list[list[Tensor]]]:
    prompts = [random_ids(n, seed=10 + i) for i, n in enumerate(lengths)]
    return prompts, [[random_ids(n, seed=50 + 3 * i + n) for n in (4, 1, 6)] for i in range(len(lengths))]


def tree_logits(model, prompts: list[Tensor], groups: list[list[Tensor]], fill: int = 0) -> list[Tensor]:
    """Logits (S, V) of every completion's tokens, the prompt computed once; `fill` stands at all padding."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows, owner = [row for group in groups for row in group], torch.arange(len(groups)).repeat_interleave(3)
    cache = model.prefill(pad_sequence(prompts, batch_first=True, padding_value=fill), lengths)
    ids = pad_sequence(rows, batch_first=True, padding_value=fill)
    logits = model.logits(model.extend(ids, lengths[owner, None] + torch.arange(ids.shape[1]), cache, owner))
    return [logits[b, : len(row)] for b, row in enumerate(rows)]


def copied_logits(model, prompts: list[Tensor], groups: list[list[Tensor]]) -> list[Tensor]:
    """The same from one plain forward a row: prompt and completion in one piece, nothing shared, nothing padded."""
    pairs = [(prompt, row) for prompt, group in zip(prompts, groups, strict=True) for row in group]
    rows = [torch.cat([prompt, row])[None] for prompt, row in pairs]
    hidden = [model._run(ids, torch.arange(ids.shape[1])[None], View()) for ids in rows]  # plain causality
    return [model.logits(h)[0, len(prompt) :] for h, (prompt, _) in zip(hidden, pairs, strict=True)]


def loss_of(logits: list[Tensor]) -> Tensor:
    """A loss to which rows contribute with different signs, as advantages have them."""
    weights = torch.linspace(-1, 2, len(logits))
    return sum(w * row.log_softmax(dim=-1)[:, 7].sum() for w, row in zip(weights, logits, strict=True))


def random_cache(lengths: list[int]) -> PromptCache:
    shape = (len(lengths), K, max(lengths), E)
    return PromptCache([(torch.randn(shape), torch.randn(shape))], torch.tensor(lengths))


# --- worked masks ---


def test_worked_mask():
    """Two tokens, prompts of 1 and 2. Row 0 sees the first prompt (its padding never), row 1 the second.

    Columns: prompt, prompt | own, own.
    """
    mask = visible_keys(2, prompt=random_cache([1, 2]), row_prompt=torch.tensor([0, 1]))
    assert mask[0, 0].int().tolist() == [[1, 0, 1, 0], [1, 0, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


def test_without_padding_the_mask_is_the_causal_rule_at_the_lower_right():
    """Three prompt tokens, two own: the first query sees 3 + 1 keys, the second all. Flash kernels know this rule."""
    bias = visible_keys(2, prompt=random_cache([3]), row_prompt=torch.tensor([0, 0]))
    assert bias._materialize().int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]


def test_one_padded_prompt_still_hides_its_padding():
    """A cache cut down to one prompt keeps the width of the longest: one prompt is not always one without padding."""
    cache = random_cache([2, 1]).keep(torch.tensor([1]))
    assert visible_keys(1, prompt=cache, row_prompt=torch.tensor([0]))[0, 0].int().tolist() == [[1, 0, 1]]


# --- the obvious layout: every row has its own copy of the prompt ---


@pytest.mark.parametrize("lengths", PROMPTS.values(), ids=PROMPTS.keys())
def test_the_tree_equals_copied_prompts_in_values_and_gradients(lengths):
    model, tree = tiny_model(), make_tree(lengths)
    for row, copied in zip(tree_logits(model, *tree), copied_logits(model, *tree), strict=True):
        hint = "who sees whom; positions of a completion start at its prompt's length"
        check_close(row.log_softmax(dim=-1), copied.log_softmax(dim=-1), hint, rtol=1e-4, atol=1e-4)
    ours = gradients(model, lambda: loss_of(tree_logits(model, *tree)))
    theirs = gradients(model, lambda: loss_of(copied_logits(model, *tree)))
    for name, expected in theirs.items():  # sums of hundreds of terms in another order: relative to the largest
        assert (ours[name] - expected).abs().max() <= 1e-5 * expected.abs().max() + 1e-6, name


def test_a_step_equals_whole_rows():
    """The last of S own tokens, for ragged prompts and three rows each, with the past in a cache."""
    cache, owner, rows = random_cache([5, 2]), torch.tensor([0, 0, 0, 1, 1, 1]), 6
    q, k, v = (torch.randn(rows, heads, 4, E) for heads in (H, K, K))
    whole = attend_rows(q, k, v, View(visible_keys(4, prompt=cache, row_prompt=owner), cache, owner), layer=0)
    past = RowCache(1, (rows, K, 4, E), torch.float32, torch.device("cpu"))
    for t in range(4):
        now = slice(t, t + 1)
        own_k, own_v = past.append(0, k[:, :, now], v[:, :, now])
        step = attend_step(q[:, :, now], own_k, own_v, View(prompt=cache, past=past), layer=0)
        past.length += 1
        check_close(step, whole[:, :, now], f"own token {t}: fold rows and heads, one softmax over both", 1e-4, 1e-5)


# --- properties ---


@pytest.mark.parametrize("lengths", [[5], [7, 2]], ids=["flash rule", "dense mask"])
def test_changing_one_completion_changes_no_other(lengths):
    model, (prompts, groups) = tiny_model(), make_tree(lengths)
    before = tree_logits(model, prompts, groups)
    groups[0][2] = (groups[0][2] + 1) % 48
    after = tree_logits(model, prompts, groups)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [i != 2 for i in range(len(before))]


def test_changing_one_prompt_changes_its_own_group_only():
    model, (prompts, groups) = tiny_model(), make_tree([7, 2])
    before = tree_logits(model, prompts, groups)
    prompts[1] = (prompts[1] + 1) % 48
    after = tree_logits(model, prompts, groups)
    assert [torch.equal(a, b) for a, b in zip(after, before, strict=True)] == [True] * 3 + [False] * 3


def test_what_stands_at_padding_does_not_matter():
    model, tree = tiny_model(), make_tree([7, 2, 5])
    for zeros, nines in zip(tree_logits(model, *tree), tree_logits(model, *tree, fill=9), strict=True):
        assert torch.equal(zeros, nines)
