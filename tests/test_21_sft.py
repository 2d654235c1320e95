"""Step 21: supervised fine-tuning over trees. `grpo/sft.py`: `make_groups`, `sft_loss`, `train_sft`.

What is built: the questions of one database become branches of what their prompts share, and one loss:

    loss = sum(w * -log p) / sum(w),  w = 1 on completion tokens, the end token included, prompt_loss_weight on the rest
                                      of a prompt, 0 on what the prompts share

Rule: the layout is ours, the numbers are a plain language model's. Needs steps 16 and 17; it makes the policy that RL
starts from. Command: pytest tests/test_21_sft.py
"""

import copy
import json
import math
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from helpers import check_close, gradients, tiny_model
from rl_helpers import TablePolicy, check_same, lora_model

from evaluate import load_split
from grpo.config import Config, SftConfig
from grpo.sft import SftGroup, make_groups, sft_loss, train_sft

END = 0
SCHEMA = [5, 6, 7]
# Three questions on one database, one on another; prompts end with an "assistant" token, 9.
PAIRS = [
    [([*SCHEMA, 11, 9], [21, 22, END]), ([*SCHEMA, 12, 13, 9], [23, END]), ([*SCHEMA, 14, 9], [24, 25, 26, END])],
    [([8, 6, 15, 9], [27, END])],
]


def train(model, pairs=PAIRS, seed: int = 0, **changes) -> list[dict[str, float]]:
    """Train in place; what was reported, step by step."""
    settings = {"max_steps": 4, "groups_per_step": 1, "max_branches": 2, "learning_rate": 3e-3} | changes
    stage, rows = SftConfig(**settings), []
    groups = make_groups(pairs, stage.max_branches)
    rows += [{"step": step} | row for step, row, _ in train_sft(model, groups, stage, seed)]
    return rows


# --- worked ---


def test_make_groups_worked_example():
    """Prompts 1 2 3 and 1 2 4 share 1 2; a branch is the rest of the prompt, one token, then the completion."""
    groups = make_groups([[([1, 2, 3], [9]), ([1, 2, 4], [8])]], max_branches=8)
    assert groups == [SftGroup(prefix=[1, 2], branches=[[3, 9], [4, 8]], question_lengths=[1, 1])]


def test_the_loss_of_one_question_by_hand():
    """Two ids, both logits 0, but after id 1 they are (log 3, 0). Prefix 0, question 1, completion 0 and then 1.

    -log p: question 1 after 0: log 2; completion 0 after 1: log 4/3; 1 after 0: log 2. Two completion tokens.
    """
    policy = TablePolicy(torch.tensor([[0.0, 0.0], [math.log(3), 0.0]]))
    group = SftGroup(prefix=[0], branches=[[1, 0, 1]], question_lengths=[1])
    log2, log43 = math.log(2), math.log(4 / 3)
    for weight, value in {0.0: (log43 + log2) / 2, 0.5: (0.5 * log2 + log43 + log2) / 2.5}.items():
        loss, tokens = sft_loss(policy, [group], prompt_loss_weight=weight)
        check_close(loss, value, f"question tokens weigh {weight}, and so in the denominator")
        assert tokens == 2


# --- the slow, obvious spec ---


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_tree_gives_the_loss_and_the_gradient_of_copied_prompts(weight):
    """Every pair as a plain row, schema copied; one weight per predicted token. The mean is over the whole step."""
    model, groups = tiny_model(), make_groups(PAIRS, max_branches=2)
    shared = [3, 3, 5, 4]  # two questions share the schema; the third, alone in its tree, all of its own prompt

    def copied() -> torch.Tensor:
        total, weights = 0.0, 0.0
        for (prompt, completion), start in zip([pair for pairs in PAIRS for pair in pairs], shared, strict=True):
            ids = torch.tensor(prompt + completion)
            logprobs = model(ids[None])[0].log_softmax(dim=1)
            for t in range(start, len(ids)):
                w = 1.0 if t >= len(prompt) else weight
                total, weights = total - w * logprobs[t - 1, ids[t]], weights + w
        return total / weights

    loss, tokens = sft_loss(model, groups, weight)
    check_close(loss, copied(), "the same tokens, weights and denominator")
    assert tokens == 11
    expected = gradients(model, copied)
    for name, slope in gradients(model, lambda: sft_loss(model, groups, weight)[0]).items():
        check_close(slope, expected[name], name, atol=1e-5)


def test_training_is_adamw_on_one_tree_after_another():
    """Three trees, of 2, 4 and 5 completion tokens, in a random order; the rate: one step of warm-up, then linear."""
    model, slow = tiny_model(), tiny_model()
    rows = train(model, max_steps=3, learning_rate=0.03, warmup_steps=1, max_grad_norm=0.5)
    groups, optimizer = make_groups(PAIRS, max_branches=2), torch.optim.AdamW(slow.parameters(), betas=(0.9, 0.98))
    order = torch.randperm(3, generator=torch.Generator().manual_seed(0)).tolist()
    for i, rate, row in zip(order, (0.03, 0.03, 0.015), rows, strict=True):
        optimizer.param_groups[0].update(lr=rate, weight_decay=0.0)
        optimizer.zero_grad()
        loss, tokens = sft_loss(slow, [groups[i]], 0.0)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(slow.parameters(), 0.5)
        optimizer.step()
        reported = [row["sft/" + name] for name in ("loss", "num_tokens", "grad_norm", "learning_rate")]
        assert reported == pytest.approx([loss.item(), tokens, norm.item(), rate])
    check_same(model.state_dict(), slow.state_dict(), "the same steps")


# --- properties ---


@pytest.mark.parametrize("max_branches", [1, 2, 3, 8])
def test_groups_hold_every_pair_once_and_never_more_than_max_branches(max_branches):
    groups = make_groups(PAIRS, max_branches)
    pairs = [
        (group.prefix + branch[:length], branch[length:])
        for group in groups
        for branch, length in zip(group.branches, group.question_lengths, strict=True)
    ]
    assert pairs == [pair for database in PAIRS for pair in database]
    assert max(len(group.branches) for group in groups) == min(max_branches, 3)


def test_the_end_token_is_trained():
    """After token 1 comes the end token: training must raise its probability."""
    policy = TablePolicy(torch.zeros(3, 3))
    sft_loss(policy, make_groups([[([2], [1, END])]], max_branches=1), 0.0)[0].backward()
    check_close(policy.table.grad[1], [-1 / 3, 1 / 6, 1 / 6], "(p - onehot) / 2 tokens in the row after token 1")


def test_what_prompts_share_is_not_trained():
    """At full weight the question is learned, the schema still is not: nothing predicts tokens 6 and 7."""
    policy = TablePolicy(torch.zeros(48, 48))
    sft_loss(policy, make_groups(PAIRS[:1], max_branches=3), 1.0)[0].backward()
    assert (policy.table.grad[SCHEMA[:2]] == 0).all()
    assert (policy.table.grad[SCHEMA[2]] != 0).any()  # the last shared token predicts the first of each question


def test_the_same_seed_gives_the_same_weights():
    weights = []
    for seed in (0, 0, 1):
        model = tiny_model()
        train(model, seed=seed)
        weights.append(model.model.norm.weight.clone())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2]), "another order of the databases"


def test_the_loss_falls_to_nothing_on_a_task_that_can_be_learned_by_heart():
    model = tiny_model()
    rows = train(model, max_steps=40, groups_per_step=2, learning_rate=1e-2, warmup_steps=4)
    assert rows[0]["sft/loss"] > 3 > 0.05 > rows[-1]["sft/loss"]
    prompt, completion = PAIRS[0][1]
    for i, token in enumerate(completion):
        assert model(torch.tensor([prompt + completion[:i]]))[0, -1].argmax() == token


def test_only_the_adapter_trains_where_there_is_one():
    model = lora_model()
    before = copy.deepcopy(model.state_dict())
    train(model)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name in before if "lora_" in name}


# --- errors ---


def test_a_stage_without_examples_is_an_error():
    with pytest.raises(ValueError, match="the SFT stage has no examples"):
        train(tiny_model(), pairs=[])


# --- which questions a stage is taught ---


@pytest.fixture
def questions(tmp_path):
    """A folder of 40 training and 2 test questions on one small database."""
    with closing(sqlite3.connect(tmp_path / "shop.sqlite")) as connection:
        connection.executescript("CREATE TABLE item (price INTEGER); INSERT INTO item VALUES (1), (2);")
    for name, count in (("train", 40), ("val", 2), ("test", 2)):
        rows = [{"question": f"{name} {i}?", "gold": f"SELECT price + {i} FROM item"} for i in range(count)]
        text = "\n".join(json.dumps(row | {"db": "shop.sqlite"}) for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return tmp_path


def test_rl_can_be_kept_to_questions_that_no_stage_has_seen(questions):
    data = replace(Config().data, source=str(questions), cache_dir=str(questions / "cache"))
    stages = (SftConfig(source="synthetic", databases=1, questions_per_database=2), SftConfig(share=0.25))
    config = replace(Config(), data=data, sft=stages)
    foundation, domain = (load_split(config, "sft", stage) for stage in stages)
    assert (len(foundation), len(domain)) == (2, 10)
    assert {e.db_id for e in foundation} == {"sft_00000"}
    taught = {e.question for e in domain}
    assert taught < {e.question for e in load_split(config, "train")}  # 40: by default RL sees them too
    unseen = load_split(replace(config, data=replace(data, exclude_sft=True)), "train")
    assert len(unseen) == 30
    assert not taught & {e.question for e in unseen}
    assert taught == {e.question for e in load_split(config, "sft", stages[1])}  # the same in every run of a seed
    other = replace(config, run=replace(config.run, seed=1))
    assert taught != {e.question for e in load_split(other, "sft", stages[1])}


def test_the_test_set_can_come_from_elsewhere_and_an_empty_one_is_an_error(questions):
    data = replace(Config().data, source=str(questions / "test.jsonl"), cache_dir=str(questions / "cache"))
    config = replace(Config(), data=replace(data, source="synthetic", test_source=str(questions), train_databases=1))
    assert [e.question for e in load_split(config, "test")] == ["test 0?", "test 1?"]
    assert load_split(config, "train")[0].db_id == "train_00000"
    everything = replace(data, source=str(questions), exclude_sft=True)
    with pytest.raises(ValueError, match=r"has no train questions left; see data\.source, exclude_sft and sft\.share"):
        load_split(replace(config, data=everything, sft=(SftConfig(),)), "train")
