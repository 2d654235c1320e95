"""The whole run as one value: TOML file + `--set section.key=value` -> frozen dataclasses, checked strictly.

The dataclasses below are the documentation: one field, one default, one comment. Names and meanings are TRL's
(GRPOConfig, ModelConfig) wherever TRL has the setting. Departures: `advantage` replaces `scale_rewards`; a step is
`questions_per_step` x `num_generations` completions and micro-batches count groups, not rows.
Nothing is guessed: an unknown key, a wrong type or a contradiction is one ValueError that names file, key and fix.
"""

import difflib
import json
import math
import tomllib
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

Schedule = Literal["constant", "cosine", "linear", "constant_with_warmup"]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DEFAULT_WEIGHTS = {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 0.0}
# Checked below: every number is at least 0, these are more than 0 (by name, or in one section), these at most 1.
POSITIVE = set(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads rope_theta "
    "lora_alpha train_databases val_databases test_databases questions_per_database max_prompt_length databases "
    "groups_per_step max_branches questions_per_step grpo.num_generations max_completion_length temperature "
    "num_train_epochs num_iterations micro_batch_size batch_size max_grad_norm".split()
)
SHARES = {"sloppy", "epsilon", "top_p", "adam_beta1", "adam_beta2"}


@dataclass(frozen=True)
class ModelConfig:
    """[model]: which weights, and which of them train."""

    path: str = ""  # Hugging Face Qwen2 folder; empty with init = "random"
    init: Literal["load", "random"] = "load"  # "random" builds a new model of the sizes below
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the base weights; LoRA stays float32
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one, else cpu
    adapter: str = ""  # PEFT folder to start from, "" = none
    lora_r: int = 0  # rank; 0 = all parameters train
    lora_alpha: float = 32.0  # the update is scaled by lora_alpha / lora_r
    lora_target_modules: tuple[str, ...] = ALL_LINEAR  # names of the linear layers that get an adapter
    gradient_checkpointing: bool = False  # recompute layers in the backward pass: less memory, more time
    # The rest is read with init = "random" only (names of Qwen2Config; the defaults are the embedded tiny model).
    vocab_size: int = 512
    hidden_size: int = 128
    intermediate_size: int = 352
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = True


@dataclass(frozen=True)
class DataConfig:
    """[data]: questions, databases and how a prompt shows them."""

    source: str = "synthetic"  # "synthetic" or a dataset folder
    cache_dir: str = "runs/cache"  # synthetic databases and SFT stages, keyed by the hash of what made them
    train_databases: int = 200  # synthetic: databases of each split
    val_databases: int = 40
    test_databases: int = 100
    questions_per_database: int = 5  # synthetic: questions on each database
    train_limit: int = 0  # keep at most this many questions of a split, 0 = all
    val_limit: int = 0
    test_limit: int = 0
    prompt_style: Literal["compact", "ddl"] = "compact"  # how the schema is written
    sample_values: int = 0  # values shown per column
    system: str = ""  # system message, "" = the tokenizer's default
    max_prompt_length: int = 1024  # tokens; longer prompts are left out and counted


@dataclass(frozen=True)
class SftConfig:
    """[[sft]]: one supervised stage before RL; write the section again for another stage."""

    databases: int = 200  # synthetic databases made for this stage
    questions_per_database: int = 8
    sloppy: float = 0.0  # share of labels that break the convention of their question family on purpose
    max_steps: int = 100  # optimizer steps
    groups_per_step: int = 4  # databases per step
    max_branches: int = 8  # questions that share one schema prompt (branches of one tree)
    learning_rate: float = 2e-3
    lr_scheduler_type: Schedule = "linear"
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.98
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    prompt_loss_weight: float = 0.0  # weight of the question's tokens in the loss; SQL tokens weigh 1


@dataclass(frozen=True)
class GrpoConfig:
    """[grpo]: sampling, advantages, loss and optimizer of the reinforcement steps."""

    questions_per_step: int = 16  # Q
    num_generations: int = 8  # G, completions per question
    max_completion_length: int = 128  # C, tokens
    temperature: float = 1.0  # of sampling and of the trained log-probabilities alike
    top_p: float = 1.0  # must stay 1.0: the policy that is scored must be the policy that was sampled
    top_k: int = 0  # must stay 0 (off), same reason
    max_steps: int = -1  # optimizer rounds; -1 = from num_train_epochs, 0 = no RL (SFT only)
    num_train_epochs: float = 1.0  # passes over the training questions, used when max_steps = -1
    num_iterations: int = 1  # mu, updates per batch of rollouts
    micro_batch_size: int = 4  # groups per forward and backward; changes memory, not the result (but for bnpo)
    learning_rate: float = 1e-6
    lr_scheduler_type: Schedule = "constant"
    warmup_steps: int = 0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    advantage: str = "grpo"  # grpo | dr_grpo | batch | rloo | maxrl | my_file.py:my_fn
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo"] = "dapo"  # how tokens are averaged (loss.py)
    importance_sampling_level: Literal["token", "sequence"] = "token"  # "sequence" is GSPO
    epsilon: float = 0.2  # the ratio is clipped below 1 - epsilon
    epsilon_high: float | None = None  # and above 1 + epsilon_high; omitted = epsilon; cispo: the absolute cap
    delta: float | None = None  # cap of the ratio for negative advantages (two-sided clipping); omitted = none
    beta: float = 0.0  # weight of the KL to the reference, the policy at the start of RL; 0 = no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    use_bias_correction_kl: bool = True  # multiply the KL by the ratio: its gradient is then that of KL(pi || ref)
    importance_sampling_cap: float = 0.0  # cap of the trainer/sampler weight (TIS), 0 = no correction
    mask_truncated_completions: bool = False  # completions cut at the limit count in the baseline, not in the loss


@dataclass(frozen=True)
class RewardConfig:
    """[reward]: what a completion earns."""

    function: str = "sql"  # "sql" or my_file.py:my_fn
    metric: Literal["spider", "bird"] = "spider"  # which comparison makes `correct`; both are always reported
    weights: dict[str, float] = field(default_factory=dict)  # per part, over the defaults DEFAULT_WEIGHTS


@dataclass(frozen=True)
class EvalConfig:
    """[eval]: greedy accuracy, and pass@k and vote@k from sampling."""

    eval_steps: int = 20  # evaluate val every so many steps; 0 = before and after only
    num_generations: int = 8  # k of pass@k and vote@k; 0 = greedy only
    temperature: float = 1.0  # of the k samples
    top_p: float = 1.0
    top_k: int = 0
    batch_size: int = 16  # groups decoded together


@dataclass(frozen=True)
class RunConfig:
    """[run]: where it goes and what can be reproduced."""

    name: str = ""  # folder under output_dir; omitted = the config file's name
    output_dir: str = "runs"
    seed: int = 0  # governs data, SFT and RL
    save_steps: int = 20  # checkpoint every so many steps; 0 = at the end only
    log_samples_steps: int = 5  # samples.jsonl holds every group of the first so many steps
    log_samples_groups: int = 2  # and so many groups of each later step


@dataclass(frozen=True)
class Config:
    """A complete run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: tuple[SftConfig, ...] = ()
    grpo: GrpoConfig = GrpoConfig()
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = EvalConfig()
    run: RunConfig = RunConfig()


def load_config(path: str | Path, overrides: list[str] | tuple[str, ...] = (), short: bool = False) -> Config:
    """Read a TOML file, apply overrides such as "grpo.beta=0.04" or "sft.0.max_steps=5", and check everything.

    Values of overrides are TOML; a bare word is a string. Raises ValueError naming the file and the key.
    Example: "grpo.bata=0.1" -> `a.toml (--set grpo.bata=0.1): unknown key grpo.bata; did you mean grpo.beta?`
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config file {path} not found (current directory: {Path.cwd()})")
    where = f"{path} (--set {' '.join(overrides)})" if overrides else str(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        shorter = table.pop("short", [])  # the config's own overrides for a short try
        for override in [*(shorter if short else []), *overrides]:
            _apply_override(table, override)
        config = _convert(table, Config, "")
        config = _resolve(config, path.stem)
        _check_ranges(config)
        _check_together(config)
    except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError are ValueErrors too
        raise ValueError(f"{where}: {error}") from None
    return config


def _resolve(config: Config, name: str) -> Config:
    """Fill in what depends on other fields, so that the written config shows every value as used."""
    high = config.grpo.epsilon if config.grpo.epsilon_high is None else config.grpo.epsilon_high
    if config.grpo.loss_type != "cispo":
        config = replace(config, grpo=replace(config.grpo, epsilon_high=high))
    weights = {**DEFAULT_WEIGHTS, **config.reward.weights}
    config = replace(config, reward=replace(config.reward, weights=weights))
    return replace(config, run=replace(config.run, name=config.run.name or name))


def to_toml(config: Config) -> str:
    """Every value as used, in a form that `load_config` reads back to an equal Config; unset values as comments."""
    lines = []
    for name, section in ((f.name, getattr(config, f.name)) for f in fields(config)):
        for part in section if isinstance(section, tuple) else (section,):
            lines.append(f"[[{name}]]" if isinstance(section, tuple) else f"[{name}]")
            for key, value in asdict(part).items():
                lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml_value(value)}")
            lines.append("")
    return "\n".join(lines)


def config_diff(old: Config, new: Config) -> list[str]:
    """One line per value that differs. Example: ["grpo.beta: 0.0 -> 0.04"]; equal configs -> []."""
    a, b = _flatten(asdict(old)), _flatten(asdict(new))
    keys = [*a, *(key for key in b if key not in a)]
    return [f"{k}: {a.get(k, 'absent')} -> {b.get(k, 'absent')}" for k in keys if a.get(k, k) != b.get(k, k)]


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    flat: dict[str, Any] = {}
    for key, item in items:
        nested = isinstance(item, dict) or (isinstance(item, tuple) and item and isinstance(item[0], dict))
        flat.update(_flatten(item, f"{prefix}{key}.") if nested else {f"{prefix}{key}": item})
    return flat


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # JSON's strings, numbers, booleans and lists are TOML's as well (DEL must be escaped in TOML only).
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _apply_override(table: dict, override: str) -> None:
    """Set one value in the parsed TOML table, in place; a number in the path selects a stage of a list."""
    path, equals, text = override.partition("=")
    *parents, key = path.strip().split(".")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    target: Any = table
    for parent in parents:
        if isinstance(target, list):
            target = target[int(parent)] if parent.isdigit() and int(parent) < len(target) else None
        elif isinstance(target, dict):
            target = target.setdefault(parent, {})
    if not (equals and isinstance(target, dict) and (parents or isinstance(value, list))):
        stages = len(table.get("sft", []))
        raise ValueError(f'override "{override}"; expected section.key=value (sft.0.key: one of {stages} stages)')
    target[key] = value


def _nearest(word: object, known: list[str], prefix: str = "") -> str:
    match = difflib.get_close_matches(str(word), known, n=1, cutoff=0.5)
    return f"did you mean {prefix}{match[0]}?" if match else f"expected one of {', '.join(known)}"


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` from TOML as the annotated type `hint`; `where` is the dotted path that errors name."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(value, dict):
        hints, prefix = get_type_hints(hint), f"{where}." if where else ""
        for key in value:
            if key not in hints:
                kind = "key" if where else "section"
                raise ValueError(f"unknown {kind} {prefix}{key}; {_nearest(key, list(hints), prefix)}")
        return hint(**{key: _convert(item, hints[key], f"{prefix}{key}") for key, item in value.items()})
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} = {value!r}; {_nearest(value, list(args))} (one of {', '.join(args)})")
        return value
    if type(None) in args:
        return _convert(value, args[0], where)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, args[0], f"{where}.{i}") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is hint and not (hint is float and not math.isfinite(value)):
        return value
    kinds = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}
    expected = kinds.get(hint) or ("a list" if origin is tuple else "a section (table)")
    hint_list = "; write [[sft]], not [sft]" if where == "sft" else ""
    raise ValueError(f"{where} = {value!r}; expected {expected}{hint_list}")


def _check_ranges(config: Config) -> None:
    """Numbers are >= 0 unless a rule says otherwise; reward weights are free (a penalty is negative)."""
    for key, value in _flatten(asdict(config)).items():
        name = key.rpartition(".")[2]
        if isinstance(value, bool) or not isinstance(value, int | float) or key.startswith("reward.weights."):
            continue
        low = -1 if key == "grpo.max_steps" else 0
        above = low == 0 and not {key, name}.isdisjoint(POSITIVE)
        if value < low or (above and value == 0):
            raise ValueError(f"{key} = {value}; expected {'more than' if above else 'at least'} {low}")
        if value > 1 and name in SHARES:
            raise ValueError(f"{key} = {value}; expected at most 1")


def _check_together(config: Config) -> None:
    """Fields that contradict one another; the first violation is raised."""
    m, g, heads = config.model, config.grpo, config.model.num_attention_heads
    parts = [] if config.reward.function != "sql" else list(DEFAULT_WEIGHTS)  # a custom reward names its own
    layers, weights = set(m.lora_target_modules) - set(ALL_LINEAR), config.reward.weights.keys() - parts
    late = [k for k, s in [("grpo", g), *((f"sft.{i}", s) for i, s in enumerate(config.sft))]
            if s.warmup_steps and s.lr_scheduler_type == "constant"]  # fmt: skip
    rules = {
        'model.path is empty; expected a Hugging Face folder, or init = "random"': m.init == "load" and not m.path,
        f'model.path = "{m.path}"; expected "" with init = "random"': m.init == "random" and m.path,
        f"model.num_attention_heads = {heads}; expected a divisor of hidden_size = {m.hidden_size} and a "
        f"multiple of num_key_value_heads = {m.num_key_value_heads}": (
            m.hidden_size % heads or heads % m.num_key_value_heads
        ),
        "model.lora_target_modules is empty; expected layers, or lora_r = 0": (m.lora_r and not m.lora_target_modules),
        f"model.lora_target_modules: unknown {sorted(layers)}; expected some of {', '.join(ALL_LINEAR)}": layers,
        f"grpo.top_p = {g.top_p}, top_k = {g.top_k}; expected 1.0 and 0 in training: a cut tail is sampled from "
        "one policy and scored under another (eval.top_p and eval.top_k are free)": g.top_p != 1 or g.top_k != 0,
        "grpo.num_generations = 1; expected at least 2: a group of one has no baseline": (
            g.num_generations == 1 and ":" not in g.advantage
        ),
        f"grpo.epsilon_high = {g.epsilon_high}; expected the absolute cap of the ratio, such as 5.0 (cispo)": (
            g.loss_type == "cispo" and (g.epsilon_high is None or g.epsilon_high < 1)
        ),
        f"grpo.delta = {g.delta}; expected more than 1 + epsilon_high, and not with cispo": g.delta is not None
        and (g.loss_type == "cispo" or g.delta <= 1 + g.epsilon_high),
        f"{late}: warmup_steps with a constant rate; expected constant_with_warmup": late,
        f"reward.weights: unknown {sorted(weights)}; expected some of {', '.join(DEFAULT_WEIGHTS)}": parts and weights,
        f'run.name = "{config.run.name}"; expected one folder name': Path(config.run.name).name != config.run.name,
    }
    for message, violated in rules.items():
        if violated:
            raise ValueError(message)
