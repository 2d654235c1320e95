"""Step 8: sampling groups of completions, with the log-probability of every token.

Built here: model/sampling.py `generate`, `prefill`, `common_prefix`, `sampled_distribution`, `draw`, `pad`.
Rule: p = softmax(logits / temperature) over the ids that the tokenizer knows; a token is drawn by inverting the
cumulative p at one uniform number; a completion runs up to and including the first end token, or to the length limit.
Run: pytest tests/test_08_sampling.py
Later steps need it: rollouts (15) carry these ids and log-probabilities to training, which must find the same (17).
"""

import math

import pytest
import torch
from helpers import check_close, tiny_model

from model.cache import RowCache
from model.sampling import Samples, common_prefix, draw, generate, pad, prefill, sampled_distribution

PROMPTS = [[5, 6, 7, 8, 9, 10], [3], [11, 12, 13]]
VOCAB, ENDS, LIMIT, G = 40, {1, 2, 4, 8, 16}, 20, 3  # of 48 embedding rows, 40 are tokens; five ids end a completion
HOW = {"greedy": (0, {}), "plain": (1.0, {}), "hot": (2.0, {}), "cut": (1.5, {"top_k": 9, "top_p": 0.8})}


def sample(prompts=PROMPTS, **changes) -> Samples:
    how = {"max_completion_length": LIMIT, "eos_ids": ENDS, "vocab_size": VOCAB, "model": tiny_model()}
    how["generator"] = torch.Generator().manual_seed(0)
    return generate(prompts=prompts, num_generations=G, **how | changes)


def rows_of(samples: Samples):
    """(ids, log-probabilities, finished, entropy) of every row, question-major."""
    columns = (samples.ids, samples.logprobs, samples.finished, samples.entropy)
    return zip(*([row for group in column for row in group] for column in columns), strict=True)


def slow_distribution(logits: list[float], temperature, top_k=0, top_p=1.0) -> list[float]:
    """Probabilities by id: the top_k best, of those as few as reach top_p, renormalised. Temperature 0: untempered."""
    powers = [math.exp(logit / (temperature or 1)) for logit in logits]
    best = sorted(range(len(powers)), key=lambda i: -powers[i])[: top_k or None]
    kept, mass = [], 0.0
    while best and mass < top_p * sum(powers[i] for i in kept + best):
        kept.append(best.pop(0))
        mass += powers[kept[-1]]
    return [powers[i] / mass if i in kept else 0.0 for i in range(len(powers))]


def slow_generate(temperature, **cut):
    """One row at a time, one full forward pass a token; the same uniform numbers. Yields what `rows_of` yields."""
    model, generator = tiny_model(), torch.Generator().manual_seed(0)
    uniforms = torch.rand(len(PROMPTS) * G, LIMIT, generator=generator, dtype=torch.float64)
    for row, uniform in enumerate(uniforms.tolist()):
        prompt, ids, logprobs, entropies = PROMPTS[row // G], [], [], []
        while len(ids) < LIMIT and not ENDS.intersection(ids):
            logits = model(torch.tensor([prompt + ids]))[0, -1, :VOCAB].tolist()
            p = slow_distribution(logits, temperature, **cut)
            point, token = uniform[len(ids)], 0
            while p[token] <= point:
                point, token = point - p[token], token + 1
            ids.append(token if temperature else p.index(max(p)))
            logprobs.append(math.log(p[ids[-1]]))
            entropies.append(-sum(x * math.log(x) for x in p if x))
        yield ids, logprobs, ids[-1] in ENDS, sum(entropies) / len(entropies)


# --- worked numbers ---


def test_worked_distributions():
    """Temperature 2 takes square roots: (4, 1) / 5 becomes (2, 1) / 3. Of .5 .3 .2, top-k 2 leaves .5 .3, over .8:
    .625 .375. Top-p .6 keeps .3 too, the one that crosses .6; top-p .49 is reached by .5 alone.
    """
    check_close(sampled_distribution(torch.tensor([[4.0, 1.0]]).log(), 2.0).exp(), [[2 / 3, 1 / 3]], "logits / 2")
    logits = torch.tensor([[0.3, 0.5, 0.2]]).log() + 7
    expected = {(0, 1.0): [0.3, 0.5, 0.2], (99, 1.0): [0.3, 0.5, 0.2], (2, 1.0): [0.375, 0.625, 0.0]}
    expected |= {(0, 0.6): [0.375, 0.625, 0.0], (0, 0.49): [0.0, 1.0, 0.0], (1, 0.9): [0.0, 1.0, 0.0]}
    for cut, p in expected.items():
        check_close(sampled_distribution(logits, 1.0, *cut).exp(), [p], f"top-k, top-p {cut}: cut, then renormalise")


def test_worked_draws():
    """Probabilities .5 .3 .2 cut [0, 1) at .5 and .8; an id of probability 0 has no place, not even at 0."""
    points = torch.tensor([0.0, 0.49, 0.51, 0.6, 0.79, 0.81, 1 - 2**-53], dtype=torch.float64)
    assert draw(torch.tensor([[0.5, 0.3, 0.2]] * 7).log(), points).tolist() == [0, 0, 1, 1, 1, 2, 2]
    assert draw(torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]] * 7).log(), points).tolist() == [1, 1, 3, 3, 3, 3, 3]


def test_worked_padding():
    assert [x.tolist() for x in pad([[5, 6], [7]], torch.device("cpu"))] == [[[5, 6], [7, 0]], [2, 1]]


def test_common_prefix():
    cases = [([[1, 2, 3], [1, 2, 4, 5]], 2), ([[1, 2], [1, 2, 4]], 2), ([[3, 1], [3, 1]], 2), ([[1], [2]], 0)]
    cases += [([[1, 9, 2], [1, 2, 9], [1, 9, 9]], 1)]  # the row in the middle differs first
    for rows, length in cases:
        assert common_prefix(rows) == common_prefix(rows[::-1]) == length


# --- the obvious loop ---


@pytest.mark.parametrize(("temperature", "cut"), HOW.values(), ids=HOW.keys())
def test_equals_a_loop_of_full_forward_passes(temperature, cut):
    samples = sample(temperature=temperature, **cut)
    for row, expected in zip(rows_of(samples), slow_generate(temperature, **cut), strict=True):
        for name, ours, slow in zip(("ids", "log-probabilities", "finished", "entropy"), row, expected, strict=True):
            assert ours == pytest.approx(slow, abs=1e-5), name


# --- properties ---


def test_log_probabilities_are_those_of_one_full_forward_pass():
    model = tiny_model()
    for row, (ids, logprobs, _, _) in enumerate(rows_of(sample(temperature=0.7))):
        logits = model(torch.tensor([PROMPTS[row // G] + ids]))[0, -len(ids) - 1 : -1, :VOCAB]
        full = (logits / 0.7).log_softmax(dim=-1)[range(len(ids)), ids]
        check_close(torch.tensor(logprobs), full, "log_softmax(logits / temperature) over the known ids", atol=1e-5)


@pytest.mark.parametrize("rests", [[[20], [21, 22, 23, 24], [25, 26]], [[], [20], [20, 21]], [[20, 21]] * 3])
def test_a_schema_that_most_prompts_consist_of_is_read_once(rests):
    """A trunk and what differs give the keys and values of every prompt alone: they differ at once, in length only, or
    not at all. The trunk ends early enough that each prompt has an id of its own left before its last."""
    model, schema = tiny_model(), [5, 6, 7, 8, 9, 10, 11, 12]
    prompts, read = [schema + rest for rest in rests], []
    model.model.embed_tokens.register_forward_hook(lambda _, ids, out: read.append(out.shape[:2].numel()))
    together = prefill(model, prompts, torch.device("cpu"))
    assert sum(read) < 2 * len(schema) + sum(map(len, rests)), "three prompts, but not three schemas"
    for i, ids in enumerate(prompts):
        alone = prefill(model, [ids], torch.device("cpu"))
        assert together.lengths[i] == alone.lengths[0] == len(ids) - 1
        for ours, expected in zip(together.layers, alone.layers, strict=True):
            for a, b in zip(ours, expected, strict=True):
                check_close(a[i, :, : len(ids) - 1], b[0], "positions go on after the trunk", 1e-5)
    generator = torch.Generator().manual_seed(0)
    alone = [row[0] for ids in prompts for row in rows_of(sample(prompts=[ids], generator=generator))]
    assert [row[0] for row in rows_of(sample(prompts=prompts))] == alone


def test_every_end_id_ends_and_belongs_to_the_completion():
    ends_seen = set()
    for ids, logprobs, finished, _ in rows_of(sample(prompts=PROMPTS * 10)):
        assert not ENDS.intersection(ids[:-1]), "nothing follows an end token"
        assert len(ids) == len(logprobs), "the end token has a log-probability too"
        assert finished == (ids[-1] in ENDS) == (len(ids) < LIMIT or ids[-1] in ENDS)
        ends_seen |= ENDS.intersection(ids)
    assert ends_seen == ENDS
    assert sample(eos_ids=range(VOCAB), max_completion_length=1).finished == [[True] * G] * 3, "in the last place too"
    assert sample(eos_ids=[]).finished == [[False] * G] * 3


def test_a_phantom_id_is_never_sampled_and_takes_no_probability():
    """Rows beyond the tokenizer with huge logits; the known ids have equal ones, so p = 1/40 and entropy log 40."""
    model = tiny_model(tie_word_embeddings=False)
    model.lm_head.weight.data[:VOCAB] = 0
    model.lm_head.weight.data[VOCAB:] *= 1000
    for ids, logprobs, _, entropy in rows_of(sample(model=model)):
        assert max(ids) < VOCAB
        assert logprobs == pytest.approx([-math.log(VOCAB)] * len(ids))
        assert entropy == pytest.approx(math.log(VOCAB))


def test_a_group_depends_on_no_neighbour_and_on_no_dropped_group(monkeypatch):
    """The same rows come out of one batch as group by group, however often the batch looks for finished groups."""
    generator = torch.Generator().manual_seed(0)
    alone = [row for prompt in PROMPTS * 3 for row in rows_of(sample(prompts=[prompt], generator=generator))]
    assert len({max(len(row[0]) for row in alone[i : i + G]) for i in range(0, 27, G)}) > 2, "groups end apart"
    for every in (1, 3, 1000):
        monkeypatch.setattr("model.sampling.CHECK_EVERY", every)
        for (ids, logprobs, *_), expected in zip(rows_of(sample(prompts=PROMPTS * 3)), alone, strict=True):
            assert ids == expected[0]
            assert logprobs == pytest.approx(expected[1], abs=1e-5)


def test_gradient_checkpointing_never_reaches_the_sampler(monkeypatch):
    """Nothing is differentiated here; a library that recomputes anyway loses its cache, and with it the speed."""
    model = tiny_model()
    model.gradient_checkpointing = True
    monkeypatch.setattr("model.qwen2.checkpoint", lambda *_, **__: pytest.fail("recomputed while sampling"))
    assert sample(model=model) == sample()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("how", HOW)
def test_a_fixed_cache_and_a_recorded_step_change_nothing(how, device, monkeypatch):
    """What a CUDA graph needs (model/graphs.py): slots that are not written yet are masked, whatever stands in them;
    groups leave by halves. On a CPU the step is called, on a card it is recorded and replayed.
    """
    temperature, cut = HOW[how]
    model, rows = tiny_model().to(device), []

    def filled(*arguments, **settings):
        cache = RowCache(*arguments, **settings)
        for store in (store for layer in cache.layers for store in layer):
            store.fill_(7.0)
        return cache

    monkeypatch.setattr("model.sampling.CHECK_EVERY", 2)
    monkeypatch.setattr("model.sampling.RowCache", filled)
    for model.cuda_graphs in (False, True):
        rows.append(rows_of(sample(prompts=PROMPTS * 3, model=model, temperature=temperature, **cut)))
    for (ids, logprobs, *_), expected in zip(*rows, strict=True):
        assert ids == expected[0]
        assert logprobs == pytest.approx(expected[1], abs=1e-5)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match=r"prompts have lengths \[1, 0\]; expected at least one prompt, each with a"):
        sample(prompts=[[5], []])
