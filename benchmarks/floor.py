"""How far our step is from what the machine could do: operations and bytes of its shapes against measured rates.

    python benchmarks/floor.py
    python benchmarks/floor.py --device cuda --dtype bfloat16 --Q 8 --D 1536 --layers 28 --F 8960 --H 12 --V 151936

Counted is what the tree needs, at least (dimension key as everywhere; E = D / H; w numbers per value):

    W = 2 D H E + 2 D K E + 3 D F          weights of a layer's linear maps, and the adapter's:
    A = R (2 (D + H E) + 2 (D + K E) + 3 (D + F))

sampling, operations   one forward of P tokens a prompt and G C tokens: 2 (W + A) a token and layer, the head 2 D V a
                       completion token, attention 4 H E for every pair (query, visible key)
sampling, bytes        every step reads all weights once, each prompt's keys and values once per group, each row's own
                       so far, and writes and reads the logits; the prefill reads the weights once
update, operations     a token costs W 2 forward and 2 backward (the frozen weights need no gradient of their own, their
                       inputs do), A 2 and 4, the head 2 and 2 (and 2 again where its blocks are recomputed), attention
                       4 and 8 H E a pair; with --checkpointing a layer's forward counts twice
update, bytes          weights once forward and once backward; what each layer keeps for the backward pass (the inputs
                       of its linear maps, q, k, v, gate and up: 5 D + 3 H E + 2 K E + 4 F a token) and the logits
                       written once and read once

The floor of a phase is the larger of operations / rate and bytes / bandwidth (sampling: of the prefill, plus of the
steps); the share reached is floor / measured. Rate: best torch.mm of the model's shapes with 1,024 rows; bandwidth:
best copy of 256 MB, read and written bytes. Both are measured in the same run as the step.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
from step import Ours, Shape, medians, parse

from grpo.batch import MAX_LOGITS


@dataclass(frozen=True)
class Work:
    """Operations and bytes, at least."""

    operations: float
    bytes: float

    def seconds(self, rate: float, bandwidth: float) -> float:
        """Where one of the two is the limit."""
        return max(self.operations / rate, self.bytes / bandwidth)


def count(s: Shape) -> dict[str, Work]:
    """The work of prefill, decoding steps and update; the formulas of the module's docstring."""
    width, kv_width = s.D, s.K * (s.D // s.H)  # H E and K E
    size = 2 if s.dtype == "bfloat16" else 4
    weights = 2 * s.D * width + 2 * s.D * kv_width + 3 * s.D * s.F  # W
    adapter = s.R * (2 * (s.D + width) + 2 * (s.D + kv_width) + 3 * (s.D + s.F))  # A
    head, rows = s.D * s.V, s.Q * s.G
    tokens = s.Q * s.P + rows * s.C
    pairs_prompt, pairs_rows = s.Q * s.P**2 / 2, rows * s.C * (s.P + s.C / 2)
    layer_bytes = s.layers * (size * weights + 4 * adapter)
    cached = 2 * kv_width * size * s.layers  # keys and values of one token
    logits = 2 * 4 * rows * s.C * s.V  # written and read once
    prefill = s.layers * (2 * (weights + adapter) * s.Q * s.P + 4 * width * pairs_prompt)
    decode = rows * s.C * (s.layers * 2 * (weights + adapter) + 2 * head) + s.layers * 4 * width * pairs_rows
    read = s.C * (layer_bytes + size * head + cached * (s.Q * s.P + rows * s.C / 2)) + logits
    again = 2 if s.checkpointing else 1  # forwards of a layer
    blocks = 2 if rows * s.C > MAX_LOGITS // s.V else 1  # forwards of the head
    layers = tokens * (2 * weights * (again + 1) + 2 * adapter * (again + 2))
    layers += 4 * width * (pairs_prompt + pairs_rows) * (again + 2)
    kept = size * tokens * (5 * s.D + 3 * width + 2 * kv_width + 4 * s.F) * s.layers
    update = s.layers * layers + 2 * head * rows * s.C * (blocks + 1)
    return {
        "prefill": Work(prefill, layer_bytes + cached * s.Q * s.P),
        "decoding": Work(decode, read),
        "update": Work(update, 2 * (layer_bytes + size * head) + 2 * kept / again + logits),
    }


def best(shape: Shape, run: Callable[[], object], times: int) -> float:
    """The least seconds of several runs."""
    run()
    seconds = []
    for _ in range(times):
        start = shape.clock()
        run()
        seconds.append(shape.clock() - start)
    return min(seconds)


def machine(shape: Shape, times: int = 7) -> tuple[float, float]:
    """Operations a second of torch.mm, and bytes a second of a copy."""
    kind = {"dtype": getattr(torch, shape.dtype), "device": shape.device}
    rates = []
    for outputs, inputs in ((shape.F, shape.D), (shape.D, shape.F), (shape.V, shape.D)):
        x, weight = torch.randn(1024, inputs, **kind), torch.randn(outputs, inputs, **kind)
        rates.append(2 * 1024 * outputs * inputs / best(shape, lambda x=x, w=weight: torch.mm(x, w.t()), times))
    source = torch.ones(64 * 2**20, device=shape.device)
    target = torch.empty_like(source)
    return max(rates), 2 * source.nbytes / best(shape, lambda: target.copy_(source), times)


def main() -> None:
    """Measure the machine, then the step, then print the shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options, shape = parse(parser)
    rate, bandwidth = machine(shape)
    ours = Ours(shape)
    measured = medians([ours.step() for _ in range(options.rounds + 1)][1:])
    again = machine(shape)
    rate, bandwidth = max(rate, again[0]), max(bandwidth, again[1])
    work = count(shape)
    phases = {"sampling": ("prefill", "decoding"), "update": ("update",)}
    print(shape, f"threads={options.threads}", f"torch {torch.__version__}")
    print(f"machine: {rate / 1e9:,.0f} GFLOP/s, {bandwidth / 1e9:,.1f} GB/s")
    print(f"{'':10}{'GFLOP':>8}{'GB':>8}{'floor':>10}{'measured':>10}{'reached':>9}{'of FLOP/s':>11}{'of GB/s':>9}")
    for phase, parts in phases.items():
        operations, moved = (sum(getattr(work[part], kind) for part in parts) for kind in ("operations", "bytes"))
        floor, seconds = sum(work[part].seconds(rate, bandwidth) for part in parts), measured[phase]
        print(f"{phase:10}{operations / 1e9:8,.1f}{moved / 1e9:8,.1f}{floor:8.3f} s{seconds:8.3f} s", end="")
        print(f"{floor / seconds:9.0%}{operations / seconds / rate:11.0%}{moved / seconds / bandwidth:9.0%}")


if __name__ == "__main__":
    main()
