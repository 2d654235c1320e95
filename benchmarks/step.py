"""One whole GRPO step, ours against TRL's GRPOTrainer on transformers and PEFT: seconds and memory.

    python benchmarks/step.py                     # both in one process: ours, TRL, ours, TRL, ...
    python benchmarks/step.py --dtype bfloat16 --checkpointing --C 128
    python benchmarks/step.py --growth            # ours alone, one size at a time; needs nothing but the repository

Same random Qwen2 weights, same adapter (LoRA on every linear layer, alpha = 2 R), same prompts of P random ids, G
completions of exactly C tokens (the end token is no row of the embedding, so nobody can sample it), random rewards, so
that no group is flat, beta 0, one update. TRL has its defaults, but for what is named here and gradient checkpointing.

sampling  from prompts to completion ids; of TRL its `_generate_single_turn`
update    the rest of the step: advantages, log-probabilities, loss, backward, optimizer; of TRL tokenizing as well
memory    peak of a process that takes two steps, less that of one that only builds the model (Linux)

Before anything is timed both take their first update on the same completions, and the gradients are compared.
"""

import argparse
import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads on busy cores slow each other down
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from grpo.advantage import compute_advantages
from grpo.config import GrpoConfig
from grpo.rollout import Rollouts
from grpo.update import make_optimizer, update_policy
from model.config import Qwen2Config
from model.lora import add_lora, lora_parameters
from model.qwen2 import Qwen2
from model.sampling import generate

GROWTH = {"G": (2, 4, 8, 16), "P": (128, 512, 1024), "C": (16, 64, 128), "V": (4_000, 16_000, 50_000, 150_000)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a step, under the names of the dimension key."""

    Q: int = 2  # questions
    G: int = 8  # completions of each
    P: int = 512  # prompt tokens
    C: int = 64  # completion tokens
    V: int = 32_000  # vocabulary
    D: int = 512  # hidden
    layers: int = 6
    F: int = 1408  # feed-forward
    H: int = 8  # query heads
    K: int = 2  # key/value heads
    R: int = 16  # LoRA rank
    groups: int = 4  # groups per forward and backward
    dtype: str = "float32"  # of the base weights; the adapter is float32
    device: str = "cpu"
    checkpointing: bool = False  # recompute layers in the backward pass

    def prompts(self) -> list[list[int]]:
        """Q prompts of P random ids."""
        return torch.randint(self.V, (self.Q, self.P), generator=torch.Generator().manual_seed(1)).tolist()

    def clock(self) -> float:
        """Seconds, once the device has done what it was asked."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter()


class Ours:
    """Our step: `sample`, then `update`."""

    def __init__(self, shape: Shape):
        self.shape, self.model = shape, build_model(shape)
        add_lora(self.model, shape.R, 2 * shape.R, generator=torch.Generator().manual_seed(2))
        self.model.gradient_checkpointing = shape.checkpointing
        sizes = {"questions_per_step": shape.Q, "num_generations": shape.G, "max_completion_length": shape.C}
        self.config = GrpoConfig(**sizes, micro_batch_size=shape.groups, epsilon_high=0.2)
        self.optimizer = make_optimizer(self.model.parameters(), self.config)
        self.generator = torch.Generator().manual_seed(3)

    def sample(self) -> Rollouts:
        """Q x G completions of C tokens."""
        prompts, settings = self.shape.prompts(), {"max_completion_length": self.shape.C, "eos_ids": []}
        samples = generate(self.model, prompts, self.shape.G, **settings, generator=self.generator)
        return Rollouts(prompts, samples.ids, samples.logprobs, samples.finished, samples.entropy)

    def update(self, rollouts: Rollouts, advantages: Tensor | None = None) -> dict:
        """One optimizer step, with random rewards where no advantages are given."""
        if advantages is None:
            rewards = torch.rand(self.shape.Q, self.shape.G, generator=self.generator)
            advantages = compute_advantages(rewards, "grpo")
        return update_policy(self.model, self.optimizer, rollouts, advantages, self.config)

    def step(self) -> dict:
        """One step: the seconds of its parts, and how many tokens it trained."""
        start = self.shape.clock()
        rollouts = self.sample()
        middle = self.shape.clock()
        stats = self.update(rollouts)
        end = self.shape.clock()
        return {"sampling": middle - start, "update": end - middle, "tokens": stats["tokens/with_gradient_ratio"][0]}


def build_model(shape: Shape) -> Qwen2:
    """Our decoder with random weights, without an adapter."""
    sizes = (shape.V, shape.D, shape.F, shape.layers, shape.H, shape.K, shape.D // shape.H)
    with torch.device("meta"):
        model = Qwen2(Qwen2Config(*sizes)).to(getattr(torch, shape.dtype))
    model.to_empty(device=shape.device).init_weights(torch.Generator(shape.device).manual_seed(0))
    return model


def build_peer(shape: Shape, weights: dict[str, Tensor]):
    """The decoder of transformers; takes over `weights` where there are any."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"vocab_size": shape.V, "hidden_size": shape.D, "intermediate_size": shape.F}
    sizes |= {"num_hidden_layers": shape.layers, "num_attention_heads": shape.H, "num_key_value_heads": shape.K}
    sizes |= {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "tie_word_embeddings": True}
    config = Qwen2Config(**sizes, bos_token_id=None, eos_token_id=None)
    with torch.device(shape.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, shape.dtype))
    unknown = model.load_state_dict(weights, strict=False).unexpected_keys
    assert not unknown, f"transformers does not know {unknown}"
    return model


def build_words(shape: Shape):
    """A tokenizer: words t0, t1, ... with the ids 0 ... V-1, and an end token that is no row of the embedding."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(shape.V)} | {"<end>": shape.V}
    backend = Tokenizer(models.WordLevel(words, unk_token="t0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="t0")


def run_peer(
    shape: Shape,
    steps: int,
    ours: Ours | None = None,
    before: Callable[[], None] = lambda: None,
    check: Callable[[dict, dict], None] = lambda batch, gradients: None,
) -> list[dict]:
    """Let TRL's trainer take `steps` steps, from our weights if they are given; what `Ours.step` returns, of each.

    before() is called in front of every step, check(batch, gradients by our names) in front of the first update.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    done, batch, generator = [], {}, torch.Generator().manual_seed(4)

    class Hooks(TrainerCallback):
        def on_step_begin(self, *_, **__):
            before()
            done.append({"sampling": 0.0, "update": shape.clock(), "tokens": 0})

        def on_pre_optimizer_step(self, *_, model, **__):
            if len(done) == 1:
                named = model.named_parameters()
                check(batch, {our_name(name): p.grad for name, p in named if p.grad is not None})

        def on_step_end(self, *_, **__):
            done[-1]["update"] = shape.clock() - done[-1]["update"] - done[-1]["sampling"]

    class Trainer(GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            start = shape.clock()
            result = super()._generate_single_turn(*args, **kwargs)
            done[-1]["sampling"] += shape.clock() - start
            return result

        def _generate_and_score_completions(self, inputs):
            batch.update(super()._generate_and_score_completions(inputs))
            return dict(batch)

        def _compute_loss(self, model, inputs):
            done[-1]["tokens"] += int(inputs["completion_mask"].sum())
            return super()._compute_loss(model, inputs)

    parts = -(-shape.Q // shape.groups)  # micro-batches of one optimizer step
    settings = {"per_device_train_batch_size": shape.Q * shape.G // parts, "gradient_accumulation_steps": parts}
    settings |= {"num_generations": shape.G, "max_completion_length": shape.C, "max_steps": steps}
    settings |= {"bf16": shape.dtype == "bfloat16", "gradient_checkpointing": shape.checkpointing}
    settings |= {"use_cpu": shape.device == "cpu", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    weights = dict(ours.model.state_dict()) if ours else {}
    adapter = {name: weights.pop(name) for name in lora_parameters(ours.model)} if ours else {}
    prompts = [{"prompt": " ".join(f"t{i}" for i in ids)} for ids in shape.prompts()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            build_peer(shape, weights),
            lambda completions, **_: torch.rand(len(completions), generator=generator).tolist(),
            GRPOConfig(folder, **settings),
            train_dataset=Dataset.from_list(prompts),
            processing_class=build_words(shape),
            peft_config=LoraConfig(r=shape.R, lora_alpha=2 * shape.R, target_modules="all-linear"),
            callbacks=[Hooks()],
        )
        trainer.remove_callback(PrinterCallback)
        with torch.no_grad():
            for name, parameter in trainer.model.named_parameters():
                if our_name(name) in adapter:
                    parameter.copy_(adapter[our_name(name)])
        if steps:
            trainer.train()
            assert trainer.state.global_step == steps, f"{trainer.state.global_step} optimizer steps for {steps}"
    return done


def our_name(name: str) -> str:
    """Our name of a parameter of PEFT's adapter: ...q_proj.lora_A.default.weight -> ...q_proj.lora_A"""
    return name.removeprefix("base_model.model.").removesuffix(".default.weight")


def compare(shape: Shape, rounds: int) -> dict[str, list[dict]]:
    """Our steps and TRL's in turn, one process; the first of each is the check and is not measured."""
    ours, steps = Ours(shape), []

    def before() -> None:
        if steps:
            steps.append(ours.step())

    def check(batch: dict, theirs: dict[str, Tensor]) -> None:
        prompts, completions = batch["prompt_ids"][:: shape.G].tolist(), batch["completion_ids"].tolist()
        by_group = [completions[i : i + shape.G] for i in range(0, len(completions), shape.G)]
        sampled = ours.sample()  # its log-probabilities and entropies are only logged
        rollouts = dataclasses.replace(sampled, prompt_ids=prompts, completion_ids=by_group)
        ours.update(rollouts, batch["advantages"].view(shape.Q, shape.G).cpu())
        mine = {name: p.grad for name, p in lora_parameters(ours.model).items()}
        assert mine.keys() == theirs.keys()
        norm = torch.stack([g.norm() for g in mine.values()]).norm()
        apart = torch.stack([(mine[name] - g).norm() for name, g in theirs.items()]).norm()
        print(
            f"the same {len(completions)} completions: adapter gradients, norm {norm:.4g}, differ by {apart / norm:.1e}"
        )
        steps.append({})

    theirs = run_peer(shape, rounds + 1, ours, before, check)
    return {"ours": steps[1:], "TRL": theirs[1:]}


def alone(who: str, shape: Shape, steps: int, threads: int) -> dict:
    """`who` in a process of its own: the steps that it took, and the process's peak memory in MB."""
    command = [sys.executable, __file__, "--alone", who, "--rounds", str(steps), "--threads", str(threads)]
    command += [f"--{key}={value}" for key, value in vars(shape).items() if key != "checkpointing"]
    done = subprocess.run(command + ["--checkpointing"] * shape.checkpointing, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def step_memory(who: str, shape: Shape, threads: int, steps: int = 2) -> tuple[float, list[dict]]:
    """MB that steps take beyond the model, and the steps."""
    built, stepped = (alone(who, shape, n, threads) for n in (0, steps))
    return stepped["peak"] - built["peak"], stepped["steps"]


def peak_memory(device: str) -> float:
    """MB that this process has taken at most, on the card if it works there."""
    if device != "cpu":
        return torch.cuda.max_memory_allocated() / 1e6
    status = Path("/proc/self/status").read_text(encoding="utf-8")  # ru_maxrss would begin at the parent's
    return int(re.search(r"VmHWM:\s*(\d+) kB", status)[1]) * 1024 / 1e6


def medians(steps: list[dict]) -> dict[str, float]:
    """Of the seconds. Example: steps of 1 + 2, 2 + 2 and 3 + 5 -> sampling 2, update 2, total 4"""
    columns = {part: [step[part] for step in steps] for part in ("sampling", "update")}
    columns["total"] = [step["sampling"] + step["update"] for step in steps]
    return {part: statistics.median(values) for part, values in columns.items()}


def print_comparison(shape: Shape, rounds: int, threads: int) -> None:
    """Both sides, and their ratios."""
    steps = compare(shape, rounds)
    counts = {who: {step["tokens"] for step in taken} for who, taken in steps.items()}
    assert counts["ours"] == counts["TRL"] == {shape.Q * shape.G * shape.C}, counts
    print(f"tokens trained in each of the {rounds} steps, by both: {shape.Q * shape.G * shape.C}")
    middle = {who: medians(taken) for who, taken in steps.items()}
    print(f"{'':10}{'ours':>26}{'TRL':>26}{'TRL / ours':>12}")
    for part in ("sampling", "update", "total"):
        cells = []
        for who, taken in steps.items():
            seconds = [step["sampling"] + step["update"] if part == "total" else step[part] for step in taken]
            cells.append(f"{middle[who][part]:.3f} s ({min(seconds):.3f} to {max(seconds):.3f})")
        print(f"{part:10}{cells[0]:>26}{cells[1]:>26}{middle['TRL'][part] / middle['ours'][part]:12.2f}")
    memory = [step_memory(who, shape, threads)[0] for who in ("ours", "TRL")]
    ratio = memory[1] / memory[0] if memory[0] else float("nan")  # sizes so tiny that loading took more
    print(f"{'memory':10}{memory[0]:>23,.0f} MB{memory[1]:>23,.0f} MB{ratio:12.2f}")


def print_growth(shape: Shape, rounds: int, threads: int) -> None:
    """Our step at sizes around the given one."""
    print(f"{'':12}{'sampling':>10}{'update':>10}{'memory':>12}")
    for factor, values in GROWTH.items():
        for value in values:
            memory, steps = step_memory("ours", dataclasses.replace(shape, **{factor: value}), threads, rounds + 1)
            middle = medians(steps[1:])
            print(
                f"{factor} = {value:<8,}{middle['sampling']:8.3f} s{middle['update']:8.3f} s{memory:9,.0f} MB",
                flush=True,
            )


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Shape]:
    """The options and the sizes: an argument for each, and for rounds and threads, which are set."""
    for field in fields(Shape):
        if field.type is bool:
            parser.add_argument(f"--{field.name}", action="store_true")
        else:
            parser.add_argument(f"--{field.name}", type=field.type, default=field.default)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    return options, Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})


def main() -> None:
    """Compare, or measure the growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--alone", choices=("ours", "TRL"), help="take steps here and print them with the peak memory")
    options, shape = parse(parser)
    if options.alone == "ours":
        ours = Ours(shape)
        steps = [ours.step() for _ in range(options.rounds)]
    elif options.alone:
        steps = run_peer(shape, options.rounds)
    if options.alone:
        print(json.dumps({"peak": peak_memory(shape.device), "steps": steps}))
        return
    print(shape, f"threads={options.threads}", f"torch {torch.__version__}")
    (print_growth if options.growth else print_comparison)(shape, options.rounds, options.threads)


if __name__ == "__main__":
    main()
