"""Sampling alone, our `generate` against that of transformers: completion tokens a second.

    python benchmarks/sampler.py
    python benchmarks/sampler.py --G 16 --C 128

Both read the same Hugging Face folder of random weights (no adapter) and sample, at temperature 1, G completions of
exactly C tokens for each of Q prompts: ours from the prompts, transformers from each prompt repeated G times (of one
length, so that padding on the left is none). They take turns; the first turn of each is not measured. Ours also returns
log-probabilities and entropies, transformers ids only. Greedy completions of both are compared first: rounding may part
two rows at a near tie, anything more is a fault.
"""

import argparse
import statistics
import tempfile

import torch
from step import Shape, build_model, parse

from model import load_model
from model.sampling import generate
from model.weights import save_model


def sample_ours(model, shape: Shape, temperature: float, generator: torch.Generator | None = None) -> list[list[int]]:
    """Q x G completions, flat."""
    settings = {"max_completion_length": shape.C, "eos_ids": [], "temperature": temperature, "generator": generator}
    return [ids for group in generate(model, shape.prompts(), shape.G, **settings).ids for ids in group]


def sample_peer(model, shape: Shape, temperature: float) -> list[list[int]]:
    """The same with transformers: without top-k, which is its default."""
    prompts = torch.tensor(shape.prompts(), device=shape.device).repeat_interleave(shape.G, dim=0)
    settings = {"max_new_tokens": shape.C, "min_new_tokens": shape.C, "pad_token_id": 0, "eos_token_id": None}
    settings |= (
        {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
    )
    with torch.no_grad():
        ids = model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)
    return ids[:, shape.P :].tolist()


def main() -> None:
    """Check, alternate, print."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options, shape = parse(parser)
    dtype, generator = getattr(torch, shape.dtype), torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        save_model(build_model(shape), folder)
        ours = load_model(folder, dtype=dtype, device=shape.device)
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(shape.device)
    greedy = zip(sample_ours(ours, shape, 0.0), sample_peer(peer, shape, 0.0), strict=True)
    print(shape, f"threads={options.threads}", f"torch {torch.__version__}")
    print(f"greedy completions that are equal: {sum(a == b for a, b in greedy)} of {shape.Q * shape.G}")
    runs = {
        "ours": lambda: sample_ours(ours, shape, 1.0, generator),
        "transformers": lambda: sample_peer(peer, shape, 1.0),
    }
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(options.rounds + 1):
        for name, run in runs.items():
            start = shape.clock()
            tokens = sum(map(len, run()))
            rates[name].append(tokens / (shape.clock() - start))
            assert tokens == shape.Q * shape.G * shape.C
    middle = {name: statistics.median(values[1:]) for name, values in rates.items()}
    for name, values in rates.items():
        print(f"{name:14}{middle[name]:10,.0f} tokens/s ({min(values[1:]):,.0f} to {max(values[1:]):,.0f})")
    print(f"{'ratio':14}{middle['ours'] / middle['transformers']:10.2f}")


if __name__ == "__main__":
    main()
