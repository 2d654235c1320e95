"""The config: `grpo/config.py` turns TOML and `--set section.key=value` into checked, frozen dataclasses.

Rule: nothing is guessed. Command: pytest tests/test_config.py
"""

import tomllib
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path

import pytest

from grpo.config import Config, load_config, to_toml

MINIMAL = '[model]\npath = "start"\n'


def load(tmp_path: Path, text: str = MINIMAL, overrides: tuple[str, ...] = ()) -> Config:
    file = tmp_path / "my run.toml"
    file.write_text(text, encoding="utf-8")
    return load_config(file, overrides)


def test_omitted_values_are_the_defaults_of_the_dataclasses(tmp_path):
    config = load(tmp_path)
    assert config.grpo.num_generations == 8
    assert config.model.lora_target_modules[-1] == "down_proj"
    assert config.sft == ()
    with pytest.raises(FrozenInstanceError):
        config.grpo.beta = 1.0


def test_values_that_depend_on_others_are_filled_in_as_used(tmp_path):
    config = load(tmp_path, MINIMAL + "[grpo]\nepsilon = 0.1\n[reward.weights]\nexact = 2\n")
    assert config.grpo.epsilon_high == 0.1
    assert config.reward.weights == {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 2.0}
    assert config.run.name == "my run"


def test_an_integer_is_a_float_and_a_bool_is_not_an_integer(tmp_path):
    beta = load(tmp_path, overrides=("grpo.beta=1",)).grpo.beta
    assert beta == 1.0
    assert type(beta) is float
    with pytest.raises(ValueError, match=r"grpo\.max_steps = True; expected an integer"):
        load(tmp_path, overrides=("grpo.max_steps=true",))


def test_overrides_are_toml_values_or_bare_words_and_reach_stages(tmp_path):
    text = MINIMAL + "[[sft]]\nmax_steps = 1\n[[sft]]\nmax_steps = 2\n"
    overrides = ("sft.1.max_steps=7", "grpo.advantage=my_file.py:fn", 'model.lora_target_modules=["q_proj"]')
    config = load(tmp_path, text, (*overrides, "data.system = be brief", "reward.weights.exact=1", "grpo.delta=4"))
    assert [stage.max_steps for stage in config.sft] == [1, 7]
    assert config.grpo.advantage == "my_file.py:fn"
    assert config.model.lora_target_modules == ("q_proj",)
    assert config.data.system == "be brief"
    assert config.reward.weights["exact"] == config.grpo.delta - 3 == 1.0


def test_the_written_config_reads_back_equal_and_names_every_field(tmp_path):
    text = (
        MINIMAL
        + '[[sft]]\nsloppy = 0.5\n[[sft]]\n[data]\nsystem = "a \\"b\\" \\\\ é\\n\\u007f"\n[reward.weights]\nexact = 3\n'
    )
    for overrides in ((), ("grpo.loss_type=cispo", "grpo.epsilon_high=5", "grpo.learning_rate=1e-6")):
        config = load(tmp_path, text, overrides)
        written = to_toml(config)
        assert load(tmp_path, written) == config
        assert tomllib.loads(written).keys() == {f.name for f in fields(Config)}
        for section in ("model", "data", "grpo", "reward", "eval", "run"):
            assert all(key in written for key in asdict(getattr(config, section)))


BAD = {
    "grpo.num_generation=4": "unknown key grpo.num_generation; did you mean grpo.num_generations?",
    "gpro.beta=1": "unknown section gpro; did you mean grpo?",
    "sft.0.sloppyness=1": "unknown key sft.0.sloppyness; did you mean sft.0.sloppy?",
    "reward.weights.corect=1": "reward.weights: unknown ['corect']; expected some of correct",
    "grpo.loss_type=dpo": "grpo.loss_type = 'dpo'; expected one of grpo, dapo, bnpo, dr_grpo, cispo",
    "grpo.beta=yes": "grpo.beta = 'yes'; expected a finite number",
    "grpo.learning_rate=nan": "grpo.learning_rate = nan; expected a finite number",
    "grpo.num_generations=8.0": "grpo.num_generations = 8.0; expected an integer",
    "model.path=3": "model.path = 3; expected a string",
    "model.gradient_checkpointing=1": "expected true or false",
    "model.lora_target_modules=q_proj": "expected a list",
    "model.lora_target_modules=[1]": "model.lora_target_modules.0 = 1; expected one of q_proj",
    "model.lora_target_modules=['q']": "model.lora_target_modules.0 = 'q'; expected one of q_proj, k_proj",
    "reward.weights=3": "expected a section",
    "beta=1": "expected section.key=value",
    "grpo.beta": "expected section.key=value",
    "sft.1.sloppy=1": "expected section.key=value (sft.0.key: one of 1 stages)",
    "sft.sloppy=1": "expected section.key=value",
    "grpo.beta.x=1": "grpo.beta = {'x': 1}; expected a finite number",
    "grpo.num_generations=0": "grpo.num_generations = 0; expected more than 0",
    "grpo.learning_rate=-1": "grpo.learning_rate = -1.0; expected at least 0",
    "grpo.max_steps=-2": "grpo.max_steps = -2; expected at least -1",
    "sft.0.max_steps=-1": "sft.0.max_steps = -1; expected at least 0",
    "eval.top_p=0": "eval.top_p = 0.0; expected more than 0 and at most 1",
    "reward.weights.exact=inf": "reward.weights.exact = inf; expected a finite number",
    "sft.0.sloppy=1.5": "sft.0.sloppy = 1.5; expected at least 0 and at most 1",
    "model.path=''": 'model.path is empty; expected a Hugging Face folder, or init = "random"',
    "model.init=random": 'model.path = "start"; expected "" with init = "random"',
    "model.dtype=bfloat16": 'model.dtype = "bfloat16" with lora_r = 0; expected float32, or lora_r > 0',
    "model.num_key_value_heads=3": "model.num_attention_heads = 4; expected a divisor of hidden_size = 128",
    "grpo.temperature=0": "grpo.temperature = 0.0; expected more than 0",
    "grpo.top_p=0.9": "grpo.top_p = 0.9, top_k = 0; expected 1.0 and 0 in training",
    "grpo.top_k=50": "grpo.top_p = 1.0, top_k = 50; expected 1.0 and 0 in training",
    "grpo.num_generations=1": "a group of one has no baseline",
    "grpo.loss_type=cispo": "grpo.epsilon_high = None; expected the absolute cap of the ratio",
    "grpo.delta=1.2": "grpo.delta = 1.2; expected more than 1 + epsilon_high",
    "grpo.warmup_steps=5": "['grpo']: warmup_steps with a constant rate; expected constant_with_warmup",
    "run.name=a/b": 'run.name = "a/b"; expected one folder name',
}


@pytest.mark.parametrize("override", BAD)
def test_bad_input_is_one_clear_line_that_names_the_file(tmp_path, override):
    with pytest.raises(ValueError, match=r"my run\.toml") as error:
        load(tmp_path, MINIMAL + "[[sft]]\n", (override,))
    assert BAD[override] in str(error.value)
    assert "\n" not in str(error.value)


def test_an_adapter_on_a_random_base_is_refused_because_the_base_is_saved_nowhere(tmp_path):
    for override in ("model.lora_r=4", "model.adapter=folder"):
        with pytest.raises(ValueError, match="an adapter is saved without its base"):
            load(tmp_path, '[model]\ninit = "random"\n', (override,))


def test_bfloat16_weights_may_stand_under_an_adapter_or_be_measured_but_not_train(tmp_path):
    """Near .1 a bfloat16 is only precise to .0005: an update of 1e-6 is rounded away."""
    for fine in ("model.lora_r=4", "model.adapter=folder", "grpo.max_steps=0"):
        assert load(tmp_path, overrides=("model.dtype=bfloat16", fine)).model.dtype == "bfloat16"
    for text, steps in {MINIMAL: 1, MINIMAL + "[[sft]]\n": 0}.items():
        with pytest.raises(ValueError, match="bfloat16 weights do not move"):
            load(tmp_path, text, ("model.dtype=bfloat16", f"grpo.max_steps={steps}"))


def test_a_missing_file_and_broken_toml_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.toml not found"):
        load_config(tmp_path / "nowhere.toml")
    with pytest.raises(ValueError, match=r"my run\.toml: .*line 2"):
        load(tmp_path, "[grpo]\nbeta = = 1\n")
    with pytest.raises(ValueError, match=r"write \[\[sft\]\], not \[sft\]"):
        load(tmp_path, MINIMAL + "[sft]\nmax_steps = 1\n")


def test_a_file_saved_with_a_byte_order_mark_is_read(tmp_path):
    assert load(tmp_path, "\ufeff" + MINIMAL).model.path == "start"


def test_a_list_of_stages_can_be_replaced_whole_and_short_is_the_configs_own_list_of_changes(tmp_path):
    text = 'short = ["sft=[{max_steps = 3}]", "grpo.max_steps=2"]\n' + MINIMAL
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    assert load_config(path).sft == ()
    short = load_config(path, ["grpo.max_steps=1"], short=True)
    assert [stage.max_steps for stage in short.sft] == [3]
    assert short.grpo.max_steps == 1  # --set comes last
