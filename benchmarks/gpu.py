"""One CUDA card in under eight minutes: parity with the CPU, then seconds and memory of a GRPO step at real sizes.

    python benchmarks/gpu.py --out gpu.json
    python benchmarks/gpu.py --device cpu --tiny     # the same path in seconds, where there is no card

parity  float32, small random model with a random adapter: log-probabilities of a tree on both devices (largest
        difference), and greedy completions (how many are equal; and with the sampling step as a CUDA graph)
step    the shapes of Qwen2.5-0.5B and 1.5B with random weights built on the device, bfloat16, LoRA R = 32 on every
        linear layer in float32, Q = 8, G = 8, P = 512, C = 64: sampling and update seconds (median of three steps after
        one), completion tokens a second, peak of torch.cuda.max_memory_allocated, the model included
TRL     beside it where trl, peft and transformers can be imported (--no-trl leaves it out): the same step as in
        benchmarks/step.py, after ours has left the card. TRL takes every card it sees: on a host of several, set
        CUDA_VISIBLE_DEVICES=0
"""

import argparse
import dataclasses
import gc
import importlib.util
import json
import platform
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from step import Ours, Shape, build_model, medians, run_peer

from grpo.batch import build_tree, score
from model.lora import add_lora, lora_parameters
from model.sampling import generate

QWEN = {"Q": 8, "V": 151_936, "K": 2, "R": 32, "dtype": "bfloat16"}
SHAPES = {
    "Qwen2.5-0.5B": Shape(**QWEN, D=896, layers=24, F=4864, H=14),
    "Qwen2.5-1.5B": Shape(**QWEN, D=1536, layers=28, F=8960, H=12),
}
SMALL = {"P": 24, "C": 8, "V": 300, "D": 64, "layers": 2, "F": 96, "H": 4}
PARITY = Shape(P=96, C=32, V=5_000, D=256, layers=4, F=704, H=8)


def parity(shape: Shape, device: str) -> dict:
    """The same float32 weights on the CPU and on the device."""
    prompts = [ids[: len(ids) - 5 * q] for q, ids in enumerate(shape.prompts())]  # of different lengths
    branches = torch.randint(shape.V, (shape.Q, shape.G, shape.C), generator=torch.Generator().manual_seed(5)).tolist()
    branches = [[ids[: len(ids) - g % 3] for g, ids in enumerate(group)] for group in branches]
    model, logprobs, greedy = build_model(shape), [], []
    add_lora(model, shape.R, 2 * shape.R, generator=torch.Generator().manual_seed(2))
    for parameter in lora_parameters(model).values():
        parameter.data.normal_(std=0.05, generator=torch.Generator().manual_seed(6))
    for where in ("cpu", device):
        model.to(where)
        with torch.no_grad():
            logprobs.append(score(model, build_tree(prompts, branches, torch.device(where))).cpu())
        for model.cuda_graphs in (False, True):
            samples = generate(model, prompts, 1, max_completion_length=shape.C, eos_ids=[], temperature=0.0)
            greedy.append([group[0] for group in samples.ids])
    cpu, _, eager, graphs = greedy
    return {
        "logprobs_max_difference": float((logprobs[0] - logprobs[1]).abs().max()),
        "greedy_equal": sum(a == b for a, b in zip(cpu, eager, strict=True)),
        "greedy_equal_with_graphs": sum(a == b for a, b in zip(eager, graphs, strict=True)),
        "greedy_of": len(prompts),
    }


def measure(shape: Shape, run: Callable[[], list[dict]]) -> dict:
    """Medians of the steps that `run` returns, without the first, and the peak of the device's memory in GB."""
    on_card = shape.device != "cpu"
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    try:
        steps = run()
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    result = {name: round(seconds, 4) for name, seconds in medians(steps[1:]).items()}
    tokens = steps[-1]["tokens"]
    result |= {"tokens": tokens, "tokens_per_second": round(tokens / result["total"], 1)}
    result["sampled_tokens_per_second"] = round(tokens / result["sampling"], 1)
    result["peak_gb"] = round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_card else None
    return result


def steps_of_ours(shape: Shape, steps: int, graphs: bool) -> list[dict]:
    """Our steps."""
    ours = Ours(shape)
    ours.model.cuda_graphs = graphs
    return [ours.step() for _ in range(steps)]


def main() -> None:
    """Parity, then every shape; print and write as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device found; try the script itself with --device cpu --tiny")
    on_card = options.device == "cuda"
    packages = ["torch", "trl", "transformers", "peft"]
    found = [name for name in packages if importlib.util.find_spec(name)]
    result = {
        "device": torch.cuda.get_device_name() if on_card else platform.processor() or "cpu",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {"python": platform.python_version(), "cuda": torch.version.cuda}
        | {name: version(name) for name in found},
    }
    shape = dataclasses.replace(PARITY, **SMALL) if options.tiny else PARITY
    result["parity"] = parity(shape, options.device)
    print(json.dumps(result), flush=True)
    for name, full in SHAPES.items():
        shape = dataclasses.replace(full, device=options.device, **(SMALL if options.tiny else {}))
        runs = {"ours": lambda s=shape: steps_of_ours(s, options.rounds + 1, graphs=False)}
        runs["ours, CUDA graphs"] = lambda s=shape: steps_of_ours(s, options.rounds + 1, graphs=True)
        if found == packages and not options.no_trl:
            runs["TRL"] = lambda s=shape: run_peer(s, options.rounds + 1)
        result[name] = {"shape": dataclasses.asdict(shape)}
        for who, run in runs.items():
            result[name][who] = measure(shape, run)
            print(name, who, json.dumps(result[name][who]), flush=True)
            gc.collect()
            if on_card:
                torch.cuda.empty_cache()
            if options.out:
                options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
