"""A run that teaches nothing says so while it runs: a named reason, the evidence, and what to do about it.

Both published failures had healthy-looking curves. What gave them away is looked at here, over the last steps in a row:

    flat_groups     nearly all groups earn equal rewards: advantage zero, gradient zero. Which kind says why.
    zero_gradient   groups differ, and still nothing reaches the weights: all masked, or advantages of zero
    truncation      most completions are cut at the limit: what is scored is half a query
"""

from dataclasses import dataclass

from grpo.config import WatchConfig

EXIT_CODES = {"flat_groups": 3, "zero_gradient": 4, "truncation": 5}  # of train.py, where watch.halt is true
KINDS = {
    "all_correct": "too easy by now: keep questions of middling pass rate ([filter]), or add harder ones",
    "all_failed": "too hard, or broken prompts: nothing executes; read samples.jsonl, supervise first ([[sft]])",
    "all_wrong": "right and wrong ones earn the same: the reward cannot tell the completions apart",
}


@dataclass(frozen=True)
class Finding:
    """Why a run teaches nothing."""

    reason: str  # a key of EXIT_CODES
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.evidence}; {self.advice}"


class Halted(Exception):
    """The run was ended by a finding, after its checkpoint was saved."""


def diagnose(rows: list[dict], config: WatchConfig, weights: dict[str, float] | None = None) -> Finding | None:
    """What is wrong with the last `config.steps` steps, if anything; rows are the metrics of steps, the newest last.

    weights: of the reward's parts; one that varies but weighs nothing is named, too.
    Example: 20 rows of frac_reward_zero_std 1.0 and groups/all_correct_ratio 1.0 -> reason "flat_groups", too easy
    """
    rows = rows[-config.steps :]
    if len(rows) < config.steps:
        return None

    def mean(name: str) -> float:
        return sum(row.get(name) or 0.0 for row in rows) / len(rows)

    def always(name: str, low: float, high: float) -> bool:
        return all(low <= (row.get(name) or 0.0) <= high for row in rows)

    last = f"of the last {len(rows)} steps"
    if always("frac_reward_zero_std", config.flat_groups, 1.0):
        kind = max(KINDS, key=lambda name: mean(f"groups/{name}_ratio"))
        parts = {n.split("/")[1]: mean(n) for n in rows[-1] if n.startswith("rewards/") and n.endswith("/mean")}
        why = {"parts that never vary": [f"{n} {value:.3f}" for n, value in parts.items() if not 0.01 < value < 0.99]}
        why["parts that weigh nothing"] = [n for n in parts if (weights or {}).get(n, 1) == 0]
        words = "".join(f"; {title}: {', '.join(names)}" for title, names in why.items() if names)
        share = f"{mean('frac_reward_zero_std'):.0%} of the groups {last} were flat, most of them {kind}{words}"
        return Finding("flat_groups", share, KINDS[kind])
    if always("grad_norm", 0.0, 0.0):
        mixed = f"the gradient {last} was exactly zero, though {mean('groups/mixed_ratio'):.0%} of the groups differ"
        return Finding("zero_gradient", mixed, "see mask_truncated_completions, advantage and reward.weights")
    if always("completions/clipped_ratio", config.clipped_completions, 1.0):
        share = f"{mean('completions/clipped_ratio'):.0%} of the completions {last} were cut at the length limit"
        return Finding("truncation", share, "raise grpo.max_completion_length, or supervise until answers end")
    return None
