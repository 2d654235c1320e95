"""Step 15: rollouts. `grpo/rollout.py`: `completion_text`, `rollout`, `Rollouts`, `question_order`.

What is built: the questions of a step become Q x G completions; a group is a row, whatever its text. Rule: the ids that
were sampled are the ids that are trained on. Text, without its end token, is for whoever scores it and is never
tokenised again. Needs steps 07 and 08; step 16 lays the ids out. Command: pytest tests/test_15_rollout.py
"""

from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_model

from grpo.rollout import Rollouts, completion_text, question_order, rollout
from model.sampling import generate
from model.tokenizer import train_tokenizer

# Token 4 is "e"; ids 0 to 2 end a completion, as several do in Qwen; ids from 14 on are rows without a token.
LETTERS = SimpleNamespace(
    eos_ids=(0, 1, 2), vocab_size=14, decode=lambda ids: "".join("abcdefghijklmn"[i] for i in ids)
)
PROMPTS = [[3, 4, 5], [6], [3, 4, 5], [7, 8]]


def sample(prompts: list[list[int]] = PROMPTS, seed: int = 0, **changes) -> tuple[Rollouts, list[list[str]]]:
    """Four completions a prompt, of at most six tokens, from a random model with sixteen embedding rows."""
    settings = {"max_completion_length": 6, "generator": torch.Generator().manual_seed(seed)} | changes
    return rollout(tiny_model(vocab_size=16), LETTERS, prompts, 4, **settings)


def completions(rollouts: Rollouts) -> list[tuple[list[int], bool]]:
    """(ids, finished) of every completion, groups one after the other."""
    rows = zip(rollouts.completion_ids, rollouts.finished, strict=True)
    return [pair for ids, finished in rows for pair in zip(ids, finished, strict=True)]


@pytest.fixture
def tokenizer(tmp_path):
    """A byte-level tokenizer that has learned the word "select" as one token."""
    return train_tokenizer(["select select select"], tmp_path, vocab_size=266)


# --- worked ---


def test_text_has_no_end_token():
    """[4, 5, end] and [4, 5], cut at the limit, are both "ef"; the first id of the alphabet, "a", is an end token."""
    assert completion_text(LETTERS, [4, 5, 0]) == "ef"
    assert completion_text(LETTERS, [4, 5, 2]) == "ef"  # any of the end tokens
    assert completion_text(LETTERS, [4, 5]) == "ef"
    assert completion_text(LETTERS, [1]) == ""
    assert completion_text(LETTERS, [0, 1]) == "a"  # one end token goes, not two


def test_tokenising_a_decoded_text_again_gives_other_ids(tokenizer):
    """The policy may write "select" as six bytes. Encoding the text gives the one token that it did not sample."""
    letters = [tokenizer.encode(letter)[0] for letter in "select"]
    assert completion_text(tokenizer, letters) == "select"
    assert len(tokenizer.encode("select")) == 1 < len(letters)


def test_question_order_worked_example():
    """n = 3, two a step: places 0 1 | 2, then 0 of the second pass | 1 2 of the second pass."""

    def order_of_pass(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    first, second = (torch.randperm(3, generator=order_of_pass(number)).tolist() for number in (0, 1))
    assert question_order(3, 2, 0, order_of_pass) == first[:2]
    assert question_order(3, 2, 2, order_of_pass) == [first[2], second[0]]
    assert question_order(3, 2, 4, order_of_pass) == second[1:]


# --- properties ---


def test_sampled_ids_are_kept_as_they_are(tokenizer):
    model, prompts = tiny_model(vocab_size=280), [tokenizer.encode("select a"), tokenizer.encode("b")]
    settings = {"max_completion_length": 8, "temperature": 0.5}
    rollouts, texts = rollout(model, tokenizer, prompts, 3, generator=torch.Generator().manual_seed(0), **settings)
    settings |= {"eos_ids": tokenizer.eos_ids, "vocab_size": tokenizer.vocab_size}
    samples = generate(model, prompts, 3, generator=torch.Generator().manual_seed(0), **settings)
    assert rollouts.completion_ids == samples.ids
    assert rollouts.logprobs == samples.logprobs
    assert rollouts.prompt_ids == prompts
    again = [[tokenizer.encode(text) for text in group] for group in texts]
    assert again != samples.ids, "choose a seed whose texts do not survive, or this test shows nothing"


def test_the_end_token_is_part_of_the_completion_and_only_ever_last():
    rollouts, texts = sample()
    for ids, finished in completions(rollouts):
        assert finished == (ids[-1] in LETTERS.eos_ids), ids
        assert not set(ids[:-1]) & set(LETTERS.eos_ids), ids
    ends = {ids[-1] for ids, finished in completions(rollouts) if finished}
    assert len(ends) > 1, "more than one end token must have been sampled"
    assert texts == [[completion_text(LETTERS, ids) for ids in group] for group in rollouts.completion_ids]


def test_truncated_means_cut_by_the_limit_and_nothing_else():
    """A completion may end with the end token exactly at the limit: it is finished, not truncated."""
    rows = completions(sample()[0]) + completions(sample(seed=1)[0])
    kinds = {(len(ids) == 6, finished) for ids, finished in rows}
    assert kinds == {(False, True), (True, True), (True, False)}  # and never short but unfinished
    rollouts, _ = sample()
    assert rollouts.truncated.tolist() == [[not f for f in group] for group in rollouts.finished]
    assert rollouts.lengths.tolist() == [[len(ids) for ids in group] for group in rollouts.completion_ids]


def test_every_sampled_id_has_a_log_probability():
    rollouts, _ = sample()
    for ids, logprobs in zip(rollouts.completion_ids, rollouts.logprobs, strict=True):
        assert [len(row) for row in ids] == [len(row) for row in logprobs]
    assert all(value < 0 for group in rollouts.logprobs for row in group for value in row)
    assert all(0 < value < torch.tensor(14.0).log() for group in rollouts.entropy for value in group)


def test_ids_without_a_token_are_never_sampled():
    rollouts, _ = sample(seed=3)
    assert max(i for ids, _ in completions(rollouts) for i in ids) < LETTERS.vocab_size


def test_two_equal_prompts_are_two_groups():
    rollouts, _ = sample()
    assert rollouts.prompt_ids == PROMPTS
    assert rollouts.lengths.shape == (4, 4)
    assert rollouts.completion_ids[0] != rollouts.completion_ids[2]  # they drew numbers of their own
    greedy, _ = sample(temperature=0.0)
    assert greedy.completion_ids[0] == greedy.completion_ids[2]  # and still they are two rows
    assert len(greedy.completion_ids) == 4


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_how_groups_are_cut_into_batches_changes_nothing(batch_size):
    (together, texts), generator = sample(), torch.Generator().manual_seed(0)
    for start in range(0, len(PROMPTS), batch_size):
        part = slice(start, start + batch_size)
        apart, texts_apart = sample(PROMPTS[part], generator=generator)
        assert apart.completion_ids == together.completion_ids[part]
        assert texts_apart == texts[part]
        assert apart.finished == together.finished[part]
        for a, b in zip(apart.logprobs, together.logprobs[part], strict=True):
            assert [pytest.approx(row, abs=1e-5) for row in a] == b


def test_select_takes_whole_groups_in_the_given_order():
    rollouts, _ = sample()
    chosen = rollouts.select([3, 0])
    for name in ("prompt_ids", "completion_ids", "logprobs", "finished", "entropy"):
        column = getattr(rollouts, name)
        assert getattr(chosen, name) == [column[3], column[0]], name


def test_every_question_comes_once_in_a_pass():
    def order_of_pass(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    steps = [question_order(10, 4, 4 * step, order_of_pass) for step in range(5)]  # two passes of ten
    flat = [question for step in steps for question in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert question_order(10, 4, 12, order_of_pass) == steps[3], "a step's questions depend on nothing before it"
