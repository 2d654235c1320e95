"""What is logged about a step, and how: exact means, the classes of groups, JSON lines, one console line.

Every average is one sum over one count for the whole step, never a mean of means. Names are TRL's where TRL has the
quantity. The four classes of a group say what it can teach:

    mixed        its rewards differ: the only kind that carries a gradient
    all_correct  equal rewards, every completion correct: too easy by now
    all_failed   equal rewards, no completion even executes: too hard, or broken prompts
    all_wrong    equal rewards otherwise: something executes, and the reward cannot tell the completions apart
"""

import json
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from grpo.advantage import centered
from model.config import write_text

STATUSES = ("ok", "rejected", "sql_error", "budget", "too_big")
CLASSES = ("mixed", "all_correct", "all_failed", "all_wrong")
SHOWN = {  # on the console, in this order
    "reward": "reward {:.3f}",
    "frac_reward_zero_std": "flat {:.2f}",
    "completions/mean_length": "length {:.1f}",
    "completions/clipped_ratio": "cut {:.2f}",
    "kl": "kl {:.4f}",
    "entropy": "entropy {:.3f}",
    "clip_ratio/region_mean": "clip {:.3f}",
    "grad_norm": "grad {:.2f}",
    "tokens_per_second": "tokens/s {:.0f}",
    "step_time": "seconds {:.1f}",
}


def means(pairs: dict[str, tuple[Tensor | float, Tensor | float]]) -> dict[str, float | None]:
    """{name: (sum, count)} -> {name: sum / count}; None where nothing was counted. Example: (3, 4) -> 0.75"""
    return {name: float(total) / float(count) if float(count) else None for name, (total, count) in pairs.items()}


def group_class(rewards: Tensor, correct: Tensor, executed: Tensor) -> str:
    """The class of one group, from (G,) total rewards, and (G,) bools: rows match, the query ran."""
    if (rewards != rewards[0]).any():  # exact, as in advantage.centered: a std of 1e-8 is still flat
        return "mixed"
    if correct.all():
        return "all_correct"
    return "all_wrong" if executed.any() else "all_failed"


def rollout_metrics(
    rewards: Tensor, parts: dict[str, Tensor], correct: Tensor, statuses: list[list], lengths: Tensor, truncated: Tensor
) -> dict[str, float]:
    """Metrics of one step's rollouts: rewards, parts, correct, lengths and truncated are (Q, G), statuses Q x G.

    reward_std is the mean of the groups' unbiased stds. Terminated lengths leave truncated completions out.
    Example: rewards [[1, 0], [0, 0]] -> reward .25, reward_std .3536, frac_reward_zero_std .5, groups/mixed_ratio .5
    """
    executed = torch.tensor([[status == "ok" for status in group] for group in statuses])
    classes = Counter(map(group_class, rewards, correct, executed))
    counts = Counter(status for group in statuses for status in group)
    stds = (centered(rewards).square().sum(dim=1) / max(rewards.shape[1] - 1, 1)).sqrt()
    metrics = {"reward": rewards.mean(), "reward_std": stds.mean()}
    metrics |= {f"rewards/{name}/mean": values.float().mean() for name, values in parts.items()}
    metrics["frac_reward_zero_std"] = 1 - classes["mixed"] / len(rewards)
    metrics |= {f"groups/{name}_ratio": classes[name] / len(rewards) for name in CLASSES}
    metrics |= {f"sql/{status}_ratio": counts[status] / rewards.numel() for status in STATUSES}
    for name, values in {"": lengths.flatten(), "terminated_": lengths[~truncated]}.items():
        for kind in ("mean", "min", "max") if len(values) else ():
            metrics[f"completions/{kind}_{name}length"] = getattr(values.float(), kind)()
    metrics["completions/clipped_ratio"] = truncated.float().mean()
    return {name: float(value) for name, value in metrics.items()}


def append_line(path: Path, record: dict) -> None:
    """Add one JSON object as a line. NaN and infinity, which JSON lacks, become null, and a warning names the keys."""
    values = {key: json.dumps(value, ensure_ascii=False) for key, value in record.items()}
    clean = {key: json.loads(text, parse_constant=lambda nan: None) for key, text in values.items()}
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(clean, ensure_ascii=False) + "\n")
    if broken := [key for key, value in clean.items() if json.dumps(value, ensure_ascii=False) != values[key]]:
        warnings.warn(f"{path.name}, step {record.get('step')}: not finite: {', '.join(broken)}", stacklevel=2)


def truncate_log(path: Path, step: int, stage: int = 0) -> None:
    """Cut a log back to a checkpoint: drop the lines of later steps, and a last line that a killed run left torn."""
    if path.is_file():
        *lines, _ = path.read_bytes().split(b"\n")  # bytes: a killed run may leave half a character
        rows = [(json.loads(line), line) for line in lines]
        kept = [line for row, line in rows if (row.get("stage", 0), row["step"]) <= (stage, step)]
        write_text(path, "".join(line.decode() + "\n" for line in kept))


def format_line(record: dict) -> str:
    """What the console shows of a step. Example: reward 0.512  flat 0.31  length 24.1  grad 0.81  seconds 1.4"""
    return "  ".join(text.format(record[name]) for name, text in SHOWN.items() if record.get(name) is not None)
