"""The course as exercises: empty the functions of a step, write them again, and compare.

    python -m tests.exercises list           the steps, and which are blank, being written, or whole
    python -m tests.exercises blank 16       keep signatures and docstrings of step 16, remove the bodies
    pytest -x                                steps before 16 are green; test_16 says what to write
    python -m tests.exercises bug 16         plant one silent bug of step 16 without saying which
    python -m tests.exercises restore 16     put the originals back (the bug too); your versions are saved aside

Nothing but the functions of the step is touched. What you wrote is copied to .exercises/saved/ before it is replaced.
"""

import argparse
import ast
import json
import random
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS: dict[
    int, tuple[str, dict[str, list[str]]]
] = {  # number -> its test, and what it builds that no earlier step uses
    1: ("rms_norm", {"model/qwen2.py": ["RMSNorm.forward"]}),
    2: ("rope", {"model/qwen2.py": ["rotary_angles", "rotate"]}),
    3: ("attention", {"model/attention.py": ["visible_keys", "attend_rows"]}),
    4: ("tree", {"model/attention.py": ["attend_step"], "model/cache.py": ["PromptCache.keep", "RowCache.append"]}),
    5: ("decoder", {"model/qwen2.py": ["Qwen2.forward"]}),
    6: ("weights", {"model/weights.py": ["load_model", "save_model", "weight_files", "read_tensors"]}),
    7: ("tokenizer", {"model/tokenizer.py": ["Tokenizer.render_chat", "default_system_prompt", "train_tokenizer"]}),
    8: ("sampling", {"model/sampling.py": ["generate", "prefill", "sampled_distribution", "draw"]}),
    9: ("lora", {"model/lora.py": ["LoRALinear.forward", "LoRALinear.merged_weight", "add_lora", "merge_lora"]}),
    10: ("sandbox", {"sqlenv/database.py": ["run_sql", "candidate_budget", "_Run.authorize", "_Run.tick"]}),
    11: ("compare", {"sqlenv/compare.py": ["compare_rows", "compare_rows_bird", "canonical_rows", "_columns_match"]}),
    12: ("prompt", {"sqlenv/prompt.py": ["build_messages", "neutralise"], "sqlenv/schema.py": ["render_schema"]}),
    13: ("synthetic", {"sqlenv/synthetic.py": ["compact", "make_name", "check_name_pools"]}),
    14: ("reward", {"sqlenv/reward.py": ["score_sql", "extract_sql", "sql_reward", "total_reward"]}),
    15: ("rollout", {"grpo/rollout.py": ["rollout", "completion_text", "question_order"]}),
    16: ("batch", {"grpo/batch.py": ["build_tree"]}),
    17: ("logprobs", {"grpo/batch.py": ["score", "token_logprobs"]}),
    18: ("advantage", {"grpo/advantage.py": ["centered", "grpo", "dr_grpo", "batch", "rloo", "maxrl"]}),
    19: ("loss", {"grpo/loss.py": ["policy_loss", "loss_normalizer", "kl_estimate"]}),
    20: ("update", {"grpo/update.py": ["update_policy", "micro_batches", "make_micro_batch", "learning_rate"]}),
    21: ("sft", {"grpo/sft.py": ["make_groups", "sft_loss"]}),
    22: ("resume", {"grpo/checkpoint.py": ["save_checkpoint", "last_checkpoint", "load_training_state"]}),
    23: ("end_to_end", {"evaluate.py": ["main"]}),
    24: ("votes", {"sqlenv/voting.py": ["majority_vote"], "evaluate.py": ["vote_is_right", "ask"]}),
}


def find(source: str, name: str) -> tuple[int, int, int]:
    """(first line, first line of the body after the docstring, line after the end) of a function, counted from 0."""
    nodes = ast.parse(source).body
    for part in name.split("."):
        node = next(n for n in nodes if getattr(n, "name", None) == part)
        nodes = getattr(node, "body", [])
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
    documented = ast.get_docstring(node) is not None
    return first, (node.body[0].end_lineno if documented else node.body[0].lineno - 1), node.end_lineno


def text_of(source: str, name: str) -> str:
    """The lines of a function, decorators included."""
    first, _, end = find(source, name)
    return "".join(source.splitlines(keepends=True)[first:end])


def replaced(source: str, name: str, text: str) -> str:
    """The source with other lines for a function."""
    first, _, end = find(source, name)
    lines = source.splitlines(keepends=True)
    return "".join([*lines[:first], text, *lines[end:]])


def blanked(source: str, name: str, file: str, number: int) -> str:
    """The function without its body: it raises and says what to write."""
    first, body, _ = find(source, name)
    lines = source.splitlines(keepends=True)
    indent = " " * (4 * name.count(".") + 4)
    test = f"tests/test_{number:02d}_{STEPS[number][0]}.py"
    words = f"step {number}: write {name} in {file}; its docstring and {test} say what it does"
    return "".join([*lines[first:body], f'{indent}raise NotImplementedError("{words}")\n'])


class Desk:
    """The working tree, and what was taken from it: .exercises/<step>.json holds the originals."""

    def __init__(self, root: Path = ROOT):
        self.root, self.folder = root, root / ".exercises"

    def originals(self, number: int) -> dict:
        """{"functions": {file: {name: text}}} or {"bug": {file, whole, name}} of a step that was begun."""
        file = self.folder / f"{number}.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def read(self, file: str) -> str:
        """A file of the tree."""
        return (self.root / file).read_bytes().decode("utf-8")

    def write(self, file: str, text: str) -> None:
        """Replace a file of the tree."""
        (self.root / file).write_bytes(text.encode("utf-8"))

    def keep(self, number: int, taken: dict) -> None:
        """Remember the originals, before anything is changed."""
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{number}.json").write_text(json.dumps(taken, indent=1), encoding="utf-8")

    def blank(self, number: int) -> str:
        """Remove the bodies of a step's functions."""
        if self.originals(number):
            raise ValueError(f"step {number} is in work already; first: python -m tests.exercises restore {number}")
        sources = {file: self.read(file) for file in STEPS[number][1]}
        taken = {file: {n: text_of(sources[file], n) for n in names} for file, names in STEPS[number][1].items()}
        self.keep(number, {"functions": taken})
        for file, names in STEPS[number][1].items():
            for name in names:
                sources[file] = replaced(sources[file], name, blanked(sources[file], name, file, number))
            self.write(file, sources[file])
        what = "; ".join(f"{file}: {', '.join(names)}" for file, names in STEPS[number][1].items())
        return f"to write: {what}\nthen: pytest tests/test_{number:02d}_{STEPS[number][0]}.py"

    def bug(self, number: int, rng: random.Random) -> str:
        """Plant one of the silent bugs of tests/mutants.py that belong to the step."""
        from tests.mutants import MUTANTS

        if self.originals(number):
            raise ValueError(f"step {number} is in work already; first: python -m tests.exercises restore {number}")
        fitting = [m for m in MUTANTS if m.step == number and self.read(m.file).count(m.old) == 1]
        if not fitting:
            raise ValueError(f"no bug is known for step {number}; steps with bugs: {sorted({m.step for m in MUTANTS})}")
        mutant = rng.choice(fitting)
        whole = self.read(mutant.file)
        self.keep(number, {"bug": {"file": mutant.file, "whole": whole, "name": mutant.name}})
        self.write(mutant.file, mutant.plant(whole))
        return f"one line of step {number} is wrong now, and it runs; pytest tests/test_{number:02d}_*.py knows"

    def restore(self, number: int) -> str:
        """Put the originals back; what stood in their place is saved aside."""
        taken = self.originals(number)
        if not taken:
            raise ValueError(f"step {number} is whole; nothing was taken from it")
        files = taken.get("functions") or {taken["bug"]["file"]: {}}
        aside = self.folder / "saved" / f"step_{number}_{time.strftime('%Y%m%d_%H%M%S')}"
        for file in files:
            copy = aside / file
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes((self.root / file).read_bytes())
        told = ""
        if bug := taken.get("bug"):
            told = f"the bug was: {bug['name']} ({bug['file']})\n"
            self.write(bug["file"], bug["whole"])
        for file, functions in files.items():
            source = self.read(file)
            for name, text in functions.items():
                source = replaced(source, name, text)
            self.write(file, source)
        (self.folder / f"{number}.json").unlink()
        return f"{told}step {number} is whole again; the files as they were before that: {aside}"

    def state(self, number: int) -> str:
        """Where a step stands: whole, blank, being written, or with a bug."""
        taken = self.originals(number)
        if "functions" not in taken:
            return "with a bug" if taken else "whole"
        texts = [text_of(self.read(f), n) for f, names in taken["functions"].items() for n in names]
        count = sum("raise NotImplementedError(" in text for text in texts)
        return "blank" if count == len(texts) else f"being written, {count} of {len(texts)} left"


def main(arguments: list[str] | None = None, desk: Desk | None = None) -> int:
    """The command line; a mistake is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("list", "blank", "bug", "restore"))
    parser.add_argument("step", nargs="?", type=int)
    options, desk = parser.parse_args(arguments), desk or Desk()
    try:
        if options.command == "list":
            for number, (name, _) in STEPS.items():
                print(f"{number:2d}  {name:<12} {desk.state(number)}")
            return 0
        if options.step not in STEPS:
            raise ValueError(f"step = {options.step}; expected a number from 1 to {len(STEPS)}")
        arguments = [random.Random()] if options.command == "bug" else []
        print(getattr(desk, options.command)(options.step, *arguments))
    except (ValueError, StopIteration) as error:
        print(f"error: {error or 'a function of the step is gone from its file'}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
