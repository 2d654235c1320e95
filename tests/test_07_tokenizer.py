r"""Step 7: text to ids and back, and conversations in ChatML.

Built here: model/tokenizer.py `load_tokenizer`, `Tokenizer`, `train_tokenizer`, `default_system_prompt`.
Rules: byte-pair encoding joins, in each word, the pair that was learned first; a conversation is written as
<|im_start|>role\ntext<|im_end|>\n for each message; a chat template is recognised or refused, never guessed.
Run: pytest tests/test_07_tokenizer.py
"""

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from model.config import CheckpointError
from model.tokenizer import DEFAULT_CHATML, PLAIN_CHATML, load_tokenizer, template_tokens, train_tokenizer

SQL = ["SELECT name FROM singer WHERE age > 56", "SELECT count(*) FROM stadium", "How many singers are there?\n"] * 5
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path) -> Path:
    train_tokenizer(SQL, tmp_path, 320)
    return tmp_path


def edit(file: Path, **changes) -> None:
    raw = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(raw | changes), encoding="utf-8")


# --- the encoder ---


def test_three_merges_by_hand(tmp_path):
    """aaabdaaabac: aa occurs 4 times and becomes Z: ZabdZabac. Now (a,b) and (Z,a) occur twice; the pair of lower ids
    wins: Y = ab, ZYdZYac. Then X = ZY: XdXac. Ids: 3 control tokens, then 256 bytes, of which "!" comes first, so "a"
    is 3 + (97 - 33) = 67; the merges are 259 (aa), 260 (ab), 261 (aaab).
    """
    tokenizer = train_tokenizer(["aaabdaaabac"], tmp_path, 262)
    assert tokenizer.encode("aaabdaaabac") == [261, 70, 261, 67, 69]
    assert [tokenizer.decode([i]) for i in (259, 260, 261)] == ["aa", "ab", "aaab"]
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_ids) == (262, 0, (2,))


def test_words_keep_their_space_digits_stand_alone_and_line_ends_are_pieces(folder):
    backend = load_tokenizer(folder).backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("t.max_age  > 56\n\n it's")]
    visible = [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces]
    assert visible == ["t", ".max", "_age", " ", " >", " ", "5", "6", "\n\n", " it", "'s"]


def slow_encode(folder: Path, text: str) -> list[int]:
    """Split into words, then again and again join the earliest learned of the adjacent pairs. ASCII letters only."""
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    rank = {tuple(pair): i for i, pair in enumerate(model["merges"])}
    ids = []
    rule = r"[^\r\na-zA-Z0-9]?[a-zA-Z]+|[0-9]| ?[^\sa-zA-Z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for word in re.findall(rule, text):
        parts = list(word.replace(" ", "Ġ").replace("\n", "Ċ"))
        while len(parts) > 1:
            best = min(range(len(parts) - 1), key=lambda i: rank.get((parts[i], parts[i + 1]), len(rank)))
            if (parts[best], parts[best + 1]) not in rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        ids += [model["vocab"][part] for part in parts]
    return ids


def test_encoding_equals_the_slow_loop(folder):
    tokenizer = load_tokenizer(folder)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(
            rng.choice(["SELECT", "sing", "er", " ", "  ", "\n", "a", "count(*)", "7", ">", "_"]) for _ in "x" * 12
        )
        assert tokenizer.encode(text) == slow_encode(folder, text), text
    assert max(tokenizer.encode(SQL[0])) >= 259, "nothing was merged"


def test_any_text_has_ids_and_comes_back_the_same(folder):
    tokenizer = load_tokenizer(folder)
    for text in (
        "",
        "héllo",
        "e\u0301 is not é",
        "数据库\U0001f600\u200d",
        "\x00\x01\x7f\r\n\t",
        "".join(map(chr, range(900))),
    ):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    emoji = tokenizer.encode("\U0001f600")
    assert tokenizer.decode(emoji[:-1]) == "\ufffd", "bytes that are no character yet"


def test_training_twice_gives_the_same_bytes(tmp_path):
    """Many equal counts: an order that depends on hashing would show."""
    rng = random.Random(1)
    texts = ["".join(rng.choices("abcdefgh ", k=40)) for _ in range(60)]
    for run in "abc":
        train_tokenizer(texts, tmp_path / run, 400)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert len({(tmp_path / run / name).read_bytes() for run in "abc"}) == 1
    assert b"\r" not in (tmp_path / "a" / "tokenizer.json").read_bytes()


def test_a_vocabulary_without_room_for_the_bytes_is_refused(tmp_path):
    assert train_tokenizer([], tmp_path, 259).vocab_size == 259
    with pytest.raises(ValueError, match=r"vocab_size = 258; expected at least 259"):
        train_tokenizer(SQL, tmp_path, 258)


def test_control_tokens_in_a_text_become_control_ids_and_decoding_may_skip_them(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_start|>a<|im_end|>")
    assert ids == [1, 67, 2]
    assert tokenizer.decode(ids) == "<|im_start|>a<|im_end|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a"


def test_a_saved_truncation_or_padding_does_not_touch_prompts(folder):
    edit(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
    )
    assert len(load_tokenizer(folder).encode("a b c d e f")) > 2


def test_no_token_is_put_in_front_even_where_the_file_asks_for_it(folder):
    """A rendered conversation already has its control tokens: a second beginning would be trained on."""
    first = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    processor = {"type": "TemplateProcessing", "single": first, "pair": first, "special_tokens": special}
    edit(folder / "tokenizer.json", post_processor=processor)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.backend.encode("a").ids == [0, 67]
    assert tokenizer.encode("a") == [67]


# --- what the folder says ---


def test_every_file_that_names_an_end_token_counts(folder):
    """As Qwen2.5-Instruct: <|im_end|> in two files, [<|im_end|>, <|endoftext|>] in generation_config.json."""
    edit(folder / "config.json", eos_token_id=5)
    edit(folder / "generation_config.json", eos_token_id=[2, 0], temperature=0.7)
    edit(folder / "tokenizer_config.json", eos_token={"content": "<|im_end|>", "special": True}, pad_token=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == (2, 0, 5), "the tokenizer's own comes first, each once"
    assert tokenizer.pad_id == 2, "without a padding token the end token serves"


def broken_json(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")


REFUSED = {
    "no tokenizer.json": (lambda folder: (folder / "tokenizer.json").unlink(), r"tokenizer\.json: file: expected"),
    "broken": (broken_json, r"tokenizer\.json: file: expected a readable tokenizer"),
    "no settings": (lambda folder: (folder / "tokenizer_config.json").unlink(), r"tokenizer_config\.json: file: "),
    "no end token": (lambda folder: edit(folder / "tokenizer_config.json", eos_token=None), "expected an end-of-seq"),
    "unknown end token": (lambda folder: edit(folder / "tokenizer_config.json", eos_token="</s>"), "'</s>': expected"),
    "other numbering": (
        lambda folder: edit(folder / "tokenizer_config.json", added_tokens_decoder={"7": {"content": "<|im_end|>"}}),
        r"<\|im_end\|>: expected id 7, found 2",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_tokenizer_that_cannot_be_meant_is_refused(folder, kind):
    break_it, message = REFUSED[kind]
    break_it(folder)
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(folder)


# --- conversations ---


def test_chatml_by_hand(folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(HI) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    talk = [{"role": "system", "content": ""}, *HI, {"role": "assistant", "content": " SELECT 1 "}]
    text = (
        "<|im_start|>system\n<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n SELECT 1 <|im_end|>\n"
    )
    assert tokenizer.render_chat(talk, add_generation_prompt=False) == text


def test_a_model_own_default_system_prompt_is_used_where_the_conversation_has_none(folder):
    prompt = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    edit(folder / "tokenizer_config.json", chat_template=DEFAULT_CHATML.replace("DEFAULT", prompt))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.render_chat(HI).startswith(f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\nhi")
    assert prompt not in tokenizer.render_chat([{"role": "system", "content": "s"}, *HI])
    assert prompt in tokenizer.render_chat([*HI, {"role": "system", "content": "late"}])


def test_a_template_file_wins_over_the_settings(folder):
    (folder / "chat_template.jinja").write_text(DEFAULT_CHATML.replace("DEFAULT", "be brief"), encoding="utf-8")
    assert "be brief" in load_tokenizer(folder).render_chat(HI)


def test_template_tokens_by_hand():
    assert template_tokens('{{- "a" + "\\n" + m.role }}') == ["{{", "'a\n", "+", "m", "[", "'role", "]", "}}"]
    assert template_tokens("{{ m['role'] }} printed {{ x }}") == []


UNKNOWN = {
    "none": "",
    "not a program": "<|im_start|>",
    "another format": "{% for message in messages %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endfor %}",
    "content is changed": PLAIN_CHATML.replace("message['content']", "message['content'] | trim"),
    "no line end after the role": PLAIN_CHATML.replace("['role'] + '\n'", "['role'] + ' '"),
    "no line end after a turn": PLAIN_CHATML.replace("<|im_end|>\n'", "<|im_end|>'"),
    "another reply header": PLAIN_CHATML.replace("assistant\n'", "assistant\n<think>\n'"),
    "first message dropped": PLAIN_CHATML.replace("in messages", "in messages[1:]"),
    "last end dropped": PLAIN_CHATML.replace("{% endfor %}", "{% if loop.last %}{% endif %}{% endfor %}"),
    "default for every turn": DEFAULT_CHATML.replace("loop.first and ", ""),
    "text between the tags": PLAIN_CHATML.replace("{% endfor %}", "{% endfor %}\n\n"),
    "a space between the tags": PLAIN_CHATML.replace("{% endfor %}", " {% endfor %}"),
    "several templates": [{"name": "default", "template": PLAIN_CHATML}],
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_an_unknown_template_is_refused_not_guessed(folder, kind):
    edit(folder / "tokenizer_config.json", chat_template=UNKNOWN[kind])
    tokenizer = load_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template: expected .*, found "):
        tokenizer.render_chat(HI)


TALKS = [
    HI,
    [{"role": "system", "content": "s 'quoted' \\n"}, *HI],
    [*HI, {"role": "assistant", "content": "a\n"}, {"role": "system", "content": "late"}, *HI],
]


def test_every_spelling_that_is_recognised_renders_as_jinja_does(folder):
    """Random white space, dashes and quotes. Some spellings print white space; those must be refused."""
    jinja2 = pytest.importorskip("jinja2")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)  # transformers' settings
    plain = load_tokenizer(folder)
    rng = random.Random(2)
    accepted = 0
    for _ in range(200):
        template = rng.choice([PLAIN_CHATML, DEFAULT_CHATML.replace("DEFAULT", "you are \\\\boxed{}, it\\'s \u00e9")])
        rate = rng.choice([0, 0.05, 0.5])
        for tag, places in (("{%", 9), ("%}", 9), ("{{", 5), ("}}", 5)):
            parts = template.split(tag)
            for i in range(1, min(places, len(parts))):
                noise = rng.choice(["\n", " ", "\n  "]) if rng.random() < rate else ""
                dash = "-" if rng.random() < 0.5 else ""
                parts[i] = dash + parts[i] if tag[0] == "{" else noise + parts[i]
                parts[i - 1] = parts[i - 1] + noise if tag[0] == "{" else parts[i - 1] + dash
            template = tag.join(parts)
        template = rng.choice([template, template.replace("message['role']", "message.role").replace("\n'", "\\n'")])
        tokenizer = replace(plain, template=template)
        try:
            tokenizer.render_chat(HI)
        except CheckpointError:
            continue
        accepted += 1
        program = environment.from_string(template)
        for talk in TALKS:
            for more in (True, False):
                wanted = program.render(messages=talk, add_generation_prompt=more)
                assert tokenizer.render_chat(talk, more) == wanted, template
    assert 40 < accepted < 190, accepted


BAD_MESSAGES = [
    [], [{"role": "tool", "content": "1"}], [{"role": "User", "content": "1"}], [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}], [{"content": "a"}],
    [*HI, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_messages_that_chatml_cannot_hold_are_refused(folder, messages):
    with pytest.raises(ValueError, match=r"message = .*; expected only a role"):
        load_tokenizer(folder).render_chat(messages)


# --- against transformers ---


def test_qwen_tokenizer_equals_transformers_on_every_case(shared):
    """Encoding, decoding, bytes that are no character yet, and conversations without tools, exactly."""
    tokenizer = load_tokenizer(shared / "tokenizer")
    cases = json.loads((shared / "tokenizer" / "cases.json").read_text(encoding="utf-8"))
    assert tokenizer.vocab_size == cases["vocab_size"] == 151665
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((151645,), 151643)
    for case in cases["encode_cases"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids"]) == case["decoded"]
        assert tokenizer.decode(case["ids"], skip_special_tokens=True) == case["decoded_skip_special"]
    for case in cases["partial_utf8_decode"]:
        assert tokenizer.decode(case["ids"]) == case["decoded"]
    rendered = 0
    for case in cases["chat_cases"]:
        if not case["tools"]:
            text = tokenizer.render_chat(case["messages"], case["add_generation_prompt"])
            assert (text, tokenizer.encode(text)) == (case["text"], case["ids"]), case["name"]
            rendered += 1
    assert rendered >= 13


def test_qwen_template_with_another_default_or_another_program(shared, tmp_path):
    """Qwen2.5-Math has the same program with its own prompt; a changed program is not recognised."""
    train_tokenizer(SQL, tmp_path, 300)
    settings = json.loads((shared / "tokenizer" / "tokenizer_config.json").read_text(encoding="utf-8"))
    qwen = settings["chat_template"]
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    math = "Put your final answer within \\\\boxed{}."
    edit(tmp_path / "tokenizer_config.json", chat_template=qwen.replace(default, math))
    assert (
        load_tokenizer(tmp_path)
        .render_chat(HI)
        .startswith("<|im_start|>system\nPut your final answer within \\boxed{}.")
    )
    changes = [("not loop.first", "loop.first", -1), (default, "x y", 1), ("'<|im_start|>'", "'<|start|>'", -1)]
    for old, new, count in changes:
        edit(tmp_path / "tokenizer_config.json", chat_template=qwen.replace(old, new, count))
        with pytest.raises(CheckpointError, match="a ChatML template that we know"):
            load_tokenizer(tmp_path).render_chat(HI)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_a_trained_tokenizer(folder):
    transformers = pytest.importorskip("transformers")
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (2, 0, ours.vocab_size)
    for text in (*SQL, "héllo  数据库\n\n<|im_end|> x"):
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    for talk in TALKS:
        for more in (True, False):
            wanted = theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=more)
            assert ours.render_chat(talk, more) == wanted
