"""The whole run as one value: TOML file + `--set section.key=value` -> frozen dataclasses, checked strictly.

The dataclasses are the documentation. Names and meanings are TRL's (GRPOConfig, ModelConfig) where TRL has the setting,
but `advantage` replaces `scale_rewards`, and steps and micro-batches count questions (groups), not completions.
Nothing is guessed: an unknown key, a wrong type or a contradiction is one ValueError that names file, key and fix.
"""

import difflib
import json
import math
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# The type of a number says its range, in words and as a test; a plain int or float is at least 0.
Count = Annotated[int, "more than 0", lambda x: x > 0]
Positive = Annotated[float, "more than 0", lambda x: x > 0]
Share = Annotated[float, "at least 0 and at most 1", lambda x: 0 <= x <= 1]
TopP = Annotated[float, "more than 0 and at most 1", lambda x: 0 < x <= 1]
MaxSteps = Annotated[int, "at least -1", lambda x: x >= -1]
Weight = Annotated[float, "a finite number", math.isfinite]  # a penalty is negative
Schedule = Literal["constant", "cosine", "linear", "constant_with_warmup"]
Schema = Literal["full", "gold"]
Layer = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
DEFAULT_WEIGHTS = {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 0.0}


@dataclass(frozen=True)
class ModelConfig:
    """[model]: which weights, and which of them train."""

    path: str = ""  # Hugging Face Qwen2 folder; empty with init = "random"
    init: Literal["load", "random"] = "load"  # "random" builds a new model of the sizes below
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the base weights; to train, bfloat16 needs LoRA (float32)
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto: cuda if there is one, else cpu
    adapter: str = ""  # PEFT folder to start from, "" = none
    lora_r: int = 0  # rank; 0 = all parameters train
    lora_alpha: Positive = 32.0  # the update is scaled by lora_alpha / lora_r
    lora_target_modules: tuple[Layer, ...] = get_args(Layer)  # names of the linear layers that get an adapter
    gradient_checkpointing: bool = False  # recompute layers in the backward pass: less memory, more time
    cuda_graphs: bool = False  # replay the sampling step as a CUDA graph; not yet run on a card
    # The rest is read with init = "random" only (names of Qwen2Config; the defaults are the embedded tiny model).
    vocab_size: Count = 512  # rows of the embedding; the tokenizer is trained to this size
    hidden_size: Count = 128  # D
    intermediate_size: Count = 352  # F, width of the feed-forward layers
    num_hidden_layers: Count = 4  # decoder layers
    num_attention_heads: Count = 4  # H, query heads
    num_key_value_heads: Count = 2  # K, key/value heads that they share
    rope_theta: Positive = 10000.0  # base of the rotary angles
    tie_word_embeddings: bool = True  # the output head is the embedding matrix


@dataclass(frozen=True)
class DataConfig:
    """[data]: questions, databases and how a prompt shows them."""

    source: str = "synthetic"  # "synthetic" or a dataset folder (sqlenv/datasets.py)
    test_source: str = ""  # where the test questions come from, "" = source
    exclude_sft: bool = False  # RL trains only on questions that no [[sft]] stage has seen
    cache_dir: str = "runs/cache"  # synthetic databases, by their arguments; SFT stages, by the hash of what made them
    train_databases: Count = 200  # synthetic: databases made for training
    val_databases: Count = 40  # the same of val
    test_databases: Count = 100  # the same of test
    questions_per_database: Count = 5  # synthetic: questions on each database
    train_limit: int = 0  # keep at most so many training questions, drawn with run.seed; 0 = all
    val_limit: int = 0  # the same of val
    test_limit: int = 0  # the same of test
    prompt_style: Literal["compact", "ddl"] = "compact"  # how the schema is written
    schema: Schema = "full"  # of training prompts; "gold" shows only what the gold reads: an ablation, it leaks
    sample_values: int = 0  # values shown per column
    system: str = ""  # system message, "" = the tokenizer's default
    max_prompt_length: Count = 1024  # tokens; training leaves longer ones out and counts them, val and test refuse


@dataclass(frozen=True)
class SftConfig:
    """[[sft]]: one supervised stage before RL; write the section again for another stage."""

    source: str = ""  # "synthetic" or a dataset folder; "" = data.source
    share: Share = 1.0  # of its training questions, drawn with run.seed
    databases: Count = 200  # synthetic databases made for this stage
    questions_per_database: Count = 8  # synthetic: questions on each
    sloppy: Share = 0.0  # share of labels that break the convention of their question family on purpose
    max_steps: int = 100  # optimizer steps
    groups_per_step: Count = 4  # databases per step
    max_branches: Count = 8  # questions that share one schema prompt (branches of one tree)
    learning_rate: float = 2e-3  # of AdamW, at its highest
    lr_scheduler_type: Schedule = "linear"  # how it falls after the warm-up
    warmup_steps: int = 0  # steps in which it rises from 0
    adam_beta1: Share = 0.9  # decay of AdamW's mean gradient
    adam_beta2: Share = 0.98  # decay of AdamW's mean square
    weight_decay: float = 0.0  # of AdamW, decoupled
    max_grad_norm: Positive = 1.0  # the gradient is cut to this norm
    prompt_loss_weight: float = 0.0  # weight of the question's tokens in the loss; SQL tokens weigh 1


@dataclass(frozen=True)
class FilterConfig:
    """[filter]: before RL, keep the training questions that the starting policy answers sometimes (difficulty.py)."""

    num_generations: int = 0  # K, completions sampled per question; 0 = no filter
    low: Share = 0.2  # a question is kept if its pass rate is above low
    high: Positive = 0.8  # and below high; above 1, those that it always answers are kept too
    file: str = ""  # pass_rates.json of an earlier run with the same questions; "" = measure


@dataclass(frozen=True)
class GrpoConfig:
    """[grpo]: sampling, advantages, loss and optimizer of the reinforcement steps."""

    questions_per_step: Count = 16  # Q
    num_generations: Count = 8  # G, completions per question
    max_resampling: int = 0  # dynamic sampling: so many times a step's flat groups give way to further questions
    max_completion_length: Count = 128  # C, tokens
    temperature: Positive = 1.0  # of sampling and of the trained log-probabilities alike
    top_p: TopP = 1.0  # must stay 1.0: the policy that is scored must be the policy that was sampled
    top_k: int = 0  # must stay 0 (off), same reason
    max_steps: MaxSteps = -1  # optimizer rounds; -1 = from num_train_epochs, 0 = no RL (SFT only)
    num_train_epochs: Positive = 1.0  # passes over the training questions, used when max_steps = -1
    num_iterations: Count = 1  # mu, updates per batch of rollouts
    micro_batch_size: Count = 4  # groups per forward and backward; changes memory, not the result (but for bnpo)
    learning_rate: float = 1e-6  # of AdamW, at its highest
    lr_scheduler_type: Schedule = "constant"  # how it falls after the warm-up
    warmup_steps: int = 0  # steps in which it rises from 0
    adam_beta1: Share = 0.9  # decay of AdamW's mean gradient
    adam_beta2: Share = 0.999  # decay of AdamW's mean square
    weight_decay: float = 0.0  # of AdamW, decoupled
    max_grad_norm: Positive = 1.0  # the gradient is cut to this norm
    advantage: str = "grpo"  # grpo | dr_grpo | batch | rloo | maxrl | my_file.py:my_fn
    loss_type: Literal["grpo", "dapo", "bnpo", "dr_grpo", "cispo"] = "dapo"  # how tokens are averaged (loss.py)
    importance_sampling_level: Literal["token", "sequence"] = "token"  # "sequence" is GSPO
    epsilon: Share = 0.2  # the ratio is clipped below 1 - epsilon
    epsilon_high: float | None = None  # and above 1 + epsilon_high; omitted = epsilon; cispo: the absolute cap
    delta: float | None = None  # cap of the ratio for negative advantages (two-sided clipping); omitted = none
    beta: float = 0.0  # weight of the KL to the reference, the policy at the start of RL; 0 = no reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # of the KL to the reference (loss.py)
    use_bias_correction_kl: bool = True  # KL times the ratio: the gradient of k1 and k3 is then that of KL(pi || ref)
    importance_sampling_cap: float = 0.0  # cap of the trainer/sampler weight (TIS), 0 = no correction
    mask_truncated_completions: bool = False  # completions cut at the limit count in the baseline, not in the loss


@dataclass(frozen=True)
class RewardConfig:
    """[reward]: what a completion earns."""

    function: str = "sql"  # "sql" or my_file.py:my_fn
    metric: Literal["spider", "bird"] = "spider"  # which comparison makes `correct`; both are always reported
    weights: dict[str, Weight] = field(default_factory=dict)  # per part, over the defaults DEFAULT_WEIGHTS
    num_workers: int = 0  # processes that run queries, in training and evaluation; 0 or 1 = this one


@dataclass(frozen=True)
class EvalConfig:
    """[eval]: greedy accuracy, and pass@k and vote@k from sampling."""

    eval_steps: int = 20  # evaluate val every so many steps; 0 = before and after only
    num_generations: int = 8  # k of pass@k and vote@k; 0 = greedy only
    temperature: Positive = 1.0  # of the k samples
    top_p: TopP = 1.0  # smallest set of tokens with this probability
    top_k: int = 0  # so many likeliest tokens; 0 = all
    batch_size: Count = 128  # completions decoded together
    schema: Schema = "full"  # of val and test prompts; every figure made with "gold" is labelled as leaking
    hourly_price: float = 0.0  # of the machine, in any currency; 0 = evaluations show no price


@dataclass(frozen=True)
class WatchConfig:
    """[watch]: when a run that teaches nothing says so, and whether it ends (watch.py)."""

    steps: Count = 20  # so many steps in a row
    flat_groups: Share = 0.95  # a share of flat groups that is too large
    clipped_completions: Share = 0.5  # a share of truncated completions that is too large
    halt: bool = False  # end the run, with a checkpoint and an exit code of its own; false = a warning


@dataclass(frozen=True)
class RunConfig:
    """[run]: where it goes and what can be reproduced."""

    name: str = ""  # folder under output_dir; omitted = the config file's name
    output_dir: str = "runs"  # where run directories are made
    seed: int = 0  # governs data, SFT and RL
    num_threads: int = 0  # of torch on the CPU; 0 = its own choice
    save_steps: int = 20  # checkpoint every so many steps; 0 = at the end only
    log_samples_steps: int = 5  # samples.jsonl holds every group of the first so many steps
    log_samples_groups: int = 2  # and so many groups of each later step


@dataclass(frozen=True)
class Config:
    """A complete run."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    sft: tuple[SftConfig, ...] = ()
    filter: FilterConfig = FilterConfig()
    grpo: GrpoConfig = GrpoConfig()
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = EvalConfig()
    watch: WatchConfig = WatchConfig()
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
        if short and not shorter:
            raise ValueError('--short, but the file has no `short = ["section.key=value", ...]`; expected that list')
        for override in [*(shorter if short else []), *overrides]:
            _apply_override(table, override)
        config = _resolve(_convert(table, Config, ""), path.stem + "-short" * short)
        _check_together(config)
    except ValueError as error:  # tomllib.TOMLDecodeError and UnicodeDecodeError are ValueErrors too
        raise ValueError(f"{where}: {error}") from None
    return config


def differences(saved: Config, given: Config) -> list[str]:
    """Every value in which two configs differ. Example: ["grpo.beta: 0.0 -> 0.1"]"""
    old, new = (dict(_flatten(asdict(config))) for config in (saved, given))
    return [f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in old | new if old.get(key) != new.get(key)]


def _flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted path, leaf) of nested dicts and tuples: {"a": {"b": 1}} -> ("a.b", 1)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ()
    if not items:
        yield path, value
    for key, item in items:
        yield from _flatten(item, f"{path}.{key}".lstrip("."))


def to_toml(config: Config) -> str:
    """Every value as used, in a form that `load_config` reads back to an equal Config; unset values as comments."""
    lines = []
    for name, section in vars(config).items():
        for part in section if isinstance(section, tuple) else (section,):
            lines.append(f"[[{name}]]" if isinstance(section, tuple) else f"[{name}]")
            for key, value in vars(part).items():
                lines.append(f"# {key} is not set" if value is None else f"{key} = {_toml_value(value)}")
            lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml_value(v)}" for k, v in value.items()) + "}"
    # JSON's strings, numbers, booleans and lists are TOML's as well (DEL must be escaped in TOML only).
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _resolve(config: Config, name: str) -> Config:
    """Fill in what depends on other fields, so that the written config shows every value as used."""
    grpo = config.grpo
    if grpo.epsilon_high is None and grpo.loss_type != "cispo":
        grpo = replace(grpo, epsilon_high=grpo.epsilon)
    reward = replace(config.reward, weights=DEFAULT_WEIGHTS | config.reward.weights)
    return replace(config, grpo=grpo, reward=reward, run=replace(config.run, name=config.run.name or name))


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


def _convert(value: Any, hint: Any, where: str) -> Any:
    """`value` from TOML as the annotated type `hint`, in its range; `where` is the dotted path that errors name."""
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint) and isinstance(value, dict):
        hints, prefix = get_type_hints(hint, include_extras=True), f"{where}." if where else ""
        for key in (key for key in value if key not in hints):
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.5)
            fix = f"did you mean {prefix}{near[0]}?" if near else f"expected one of {', '.join(hints)}"
            raise ValueError(f"unknown {'key' if where else 'section'} {prefix}{key}; {fix}")
        return hint(**{key: _convert(item, hints[key], f"{prefix}{key}") for key, item in value.items()})
    if origin is Literal:
        if value not in args:
            raise ValueError(f"{where} = {value!r}; expected one of {', '.join(args)}")
        return value
    if type(None) in args:
        return _convert(value, args[0], where)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(item, args[0], f"{where}.{i}") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(item, args[1], f"{where}.{key}") for key, item in value.items()}
    kind, words, in_range = args if origin is Annotated else (hint, "at least 0", lambda x: x >= 0)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind or (kind is float and not math.isfinite(value)):
        kinds = {int: "an integer", float: "a finite number", str: "a string", bool: "true or false"}
        expected = kinds.get(kind) or ("a list" if origin is tuple else "a section (table)")
        stages = "; write [[sft]], not [sft]" if where == "sft" else ""
        raise ValueError(f"{where} = {value!r}; expected {expected}{stages}")
    if kind in (int, float) and not in_range(value):
        raise ValueError(f"{where} = {value}; expected {words}")
    return value


def _check_together(config: Config) -> None:
    """Fields that contradict one another; the first violation is raised."""
    m, g, heads, name = config.model, config.grpo, config.model.num_attention_heads, config.run.name
    fresh, cispo, high = m.init == "random", g.loss_type == "cispo", g.epsilon_high
    weights = config.reward.weights.keys() - DEFAULT_WEIGHTS if config.reward.function == "sql" else ()
    stages = {"grpo": g} | {f"sft.{i}": stage for i, stage in enumerate(config.sft)}
    late = [key for key, stage in stages.items() if stage.warmup_steps and stage.lr_scheduler_type == "constant"]
    bfloat16_trains = m.dtype == "bfloat16" and not m.lora_r and not m.adapter and (g.max_steps or config.sft)
    alone = g.num_generations == 1 and ":" not in g.advantage
    low_delta = g.delta is not None and (cispo or g.delta <= 1 + high)
    violated = {
        'model.path is empty; expected a Hugging Face folder, or init = "random"': not fresh and not m.path,
        f'model.path = "{m.path}"; expected "" with init = "random"': fresh and m.path,
        'model.lora_r or model.adapter with init = "random"; expected neither: an adapter is saved without its base, '
        "and a random base could not be loaded again": fresh and (m.lora_r or m.adapter),
        'model.dtype = "bfloat16" with lora_r = 0; expected float32, or lora_r > 0: at a small learning rate bfloat16 '
        "weights do not move": bfloat16_trains,
        'no [[sft]] stage with init = "random"; expected one: the tokenizer learns from its text': fresh
        and not config.sft,
        f"model.num_attention_heads = {heads}; expected a divisor of hidden_size = {m.hidden_size} and a multiple of "
        f"num_key_value_heads = {m.num_key_value_heads}": m.hidden_size % heads or heads % m.num_key_value_heads,
        f"grpo.top_p = {g.top_p}, top_k = {g.top_k}; expected 1.0 and 0 in training: the policy that is scored must be "
        "the policy that was sampled (eval.top_p and eval.top_k are free)": g.top_p != 1 or g.top_k,
        "grpo.num_generations = 1; expected at least 2: a group of one has no baseline": alone,
        f"grpo.epsilon_high = {high}; expected the absolute cap of the ratio, such as 5.0": cispo and (high or 0) < 1,
        f"grpo.delta = {g.delta}; expected more than 1 + epsilon_high, and not with cispo": low_delta,
        f"{late}: warmup_steps with a constant rate; expected constant_with_warmup": late,
        f"filter.low = {config.filter.low}, high = {config.filter.high}; expected low < high": config.filter.low
        >= config.filter.high,
        f"reward.weights: unknown {sorted(weights)}; expected some of {', '.join(DEFAULT_WEIGHTS)}": weights,
        f'run.name = "{name}"; expected one folder name': Path(name).name != name,
    }
    for message, wrong in violated.items():
        if wrong:
            raise ValueError(message)
