"""Text to ids and back, and the ChatML conversation format, exactly as Hugging Face does them.

The byte-pair encoder itself is the `tokenizers` library. This file adds what a model folder says around it: which ids
end a completion (every file that names one counts: Qwen's generation_config.json names two), the padding id, and how a
conversation is written: <|im_start|>role, line end, text, <|im_end|>, line end.

Departure from transformers: a chat template is a Jinja program, and here it is not run but *recognised*: its tokens,
the model's own default system prompt cut out, must be those of one of three known programs. Anything else raises: a
guess would train the model on a format that it has never seen. Control tokens in a text become control ids, as there.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from model.config import mismatch, read_json, write_text

# Qwen's rule: a word keeps the space before it, digits stand alone, punctuation and line ends form own pieces.
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
WORDS += r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LITERAL = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""

_TURN = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
_REPLY = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_FIRST = "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nDEFAULT<|im_end|>\n' }}"
PLAIN_CHATML = "{% for message in messages %}" + _TURN + _REPLY  # no default system prompt
DEFAULT_CHATML = "{% for message in messages %}" + _FIRST + "{% endif %}" + _TURN + _REPLY  # Qwen2, SmolLM2
# Qwen2.5 (Instruct, Coder, Math, base): 2.5 kB, most of it tool calls; hence only the hash of its tokens.
QWEN25_SHA256 = "369c157980b5612df06a69786e5cc4fea7de1f95e9b2ace0ad21e9297d1e4c2e"


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """One loaded tokenizer: `encode`, `decode`, `render_chat`, and the ids that sampling needs."""

    backend: tokenizers.Tokenizer
    eos_ids: tuple[int, ...]  # any of these ends a completion; the tokenizer's own eos_token comes first
    pad_id: int  # fills batches; masks never come from comparing with it
    vocab_size: int  # ids from here on are padding rows of the embedding: never sampled
    template: str  # the folder's chat template, "" if it has none
    folder: Path

    def encode(self, text: str) -> list[int]:
        """Ids of a text, nothing added in front or behind."""
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Text of ids; bytes that form no character (yet) come out as U+FFFD, as in transformers."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        r"""Write messages, dicts of a role (system, user, assistant) and a content, as the folder's own template would.

        Without a system message in front, the template's default system prompt, if it has one, is put there.
        Raises CheckpointError for an unknown template, ValueError for messages it cannot write (tool calls).
        Example, no default: "hi" of a user gives "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n".
        """
        default = default_system_prompt(self.template, self.folder)
        for message in messages or [{}]:
            role, content = message.get("role"), message.get("content")
            if role not in ("system", "user", "assistant") or not isinstance(content, str) or len(message) != 2:
                raise ValueError(f"message = {message!r}; expected only a role (system, user, assistant) and a text")
        if default and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": default}, *messages]
        turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
        return "".join(turns) + "<|im_start|>assistant\n" * add_generation_prompt


def template_tokens(template: str) -> list[str]:
    r"""A Jinja template as a list of tokens in which spelling does not matter; [] if there is text between its tags.

    White space goes as under transformers' trim_blocks and lstrip_blocks; literals are decoded and marked with a
    leading ', added ones joined; `a.b` is read as `a['b']`.
    Example: '{{- "a" + "\\n" + m.role }}' gives ["{{", "'a\n", "+", "m", "[", "'role", "]", "}}"].
    """
    text = re.sub(r"\s*(\{[{%])-|-([%}]\})\s*", r"\1\2", template.removesuffix("\n"))
    text = re.sub(r"(?:\A|(?<=%\})\n)(?:[ \t]+(?=\{%))?", "", text)
    if re.sub(rf"\{{[{{%](?:{LITERAL}|[^'\"])*?[%}}]\}}", "", text, flags=re.DOTALL):  # not only tags
        return []
    tokens: list[str] = []
    for word in re.findall(rf"{LITERAL}|\{{[{{%]|[%}}]\}}|\.?\w+|\S", text, re.DOTALL):
        if word[0] == ".":
            tokens += ["[", "'" + word[1:], "]"]
        elif word[0] in "'\"":  # decoded by Jinja's own rule
            tokens.append("'" + word[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape", "replace"))
            if tokens[-2] == "+" and tokens[-3][0] == "'":
                tokens[-3:] = [tokens[-3] + tokens[-1][1:]]
        else:
            tokens.append(word)
    return tokens


def default_system_prompt(template: str, folder: Path) -> str:
    """The default system prompt in a recognised ChatML template, "" if it has none; else CheckpointError."""
    tokens = template_tokens(template)
    found = re.search("\0'<\\|im_start\\|>system\n([^\0]+)<\\|im_end\\|>\n\0", "\0".join(tokens))
    if found:
        tokens = [token.replace(found[1], "DEFAULT") for token in tokens]
    known = tokens in (template_tokens(PLAIN_CHATML), template_tokens(DEFAULT_CHATML))
    if not known and hashlib.sha256("\0".join(tokens).encode()).hexdigest() != QWEN25_SHA256:
        expected, given = "a ChatML template that we know", repr(template[:120])
        raise mismatch(folder / "tokenizer_config.json", "chat_template", expected, given)
    return found[1] if found else ""


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read a folder's tokenizer.json, tokenizer_config.json and, where present, the model's two config files.

    CheckpointError where they disagree or name no end token. Example: Qwen2.5 has vocab_size 151665, pad_id 151643
    """
    folder = Path(folder)
    file, settings = folder / "tokenizer.json", read_json(folder / "tokenizer_config.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for every kind of bad file
        raise mismatch(file, "file", "a readable tokenizer", error) from error
    backend.no_truncation()  # a saved truncation would cut prompts silently
    backend.no_padding()
    for number, token in (settings.get("added_tokens_decoder") or {}).items():
        if backend.token_to_id(token["content"]) != int(number):
            raise mismatch(file, token["content"], f"id {number}", backend.token_to_id(token["content"]))

    def ids(token: object) -> list[int]:
        """Ids of a config's entry: a token, {"content": token}, an id, a list of ids, or null."""
        if isinstance(token, list):
            return [number for part in token for number in ids(part)]
        token = token["content"] if isinstance(token, dict) else token
        found = backend.token_to_id(token) if isinstance(token, str) else token
        if token is not None and found is None:
            raise mismatch(file, repr(token), "a token of the vocabulary", "nothing")
        return [] if found is None else [found]

    eos, size = ids(settings.get("eos_token")), max(backend.get_vocab().values()) + 1
    for name in ("generation_config.json", "config.json"):
        eos += ids(read_json(folder / name).get("eos_token_id")) if (folder / name).is_file() else []
    if not eos:
        raise mismatch(folder / "tokenizer_config.json", "eos_token", "an end-of-sequence token", "none")
    jinja = folder / "chat_template.jinja"  # newer folders; it wins, as in transformers
    template = jinja.read_text(encoding="utf-8") if jinja.is_file() else str(settings.get("chat_template") or "")
    pad = ids(settings.get("pad_token")) or eos
    return Tokenizer(backend, tuple(dict.fromkeys(eos)), pad[0], size, template, folder)


def train_tokenizer(texts: Iterable[str], folder: str | Path, vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE from texts and write it as tokenizer.json and tokenizer_config.json (plain ChatML).

    Ids 0, 1, 2 are <|endoftext|> (pad), <|im_start|> and <|im_end|> (eos), 3 to 258 the bytes: any text has ids. Merges
    follow, while the texts have pairs. The same texts give the same bytes; chat markers in them would become words.
    """
    if vocab_size < 259:
        raise ValueError(f"vocab_size = {vocab_size}; expected at least 259 (3 control tokens and 256 bytes)")
    backend = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    backend.decoder = decoders.ByteLevel()
    tokens = {"special_tokens": list(SPECIALS), "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **tokens))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[2], "pad_token": SPECIALS[0]}
    settings |= {"clean_up_tokenization_spaces": False, "chat_template": PLAIN_CHATML}
    write_text(Path(folder) / "tokenizer.json", backend.to_str(pretty=True))
    write_text(Path(folder) / "tokenizer_config.json", json.dumps(settings, indent=2) + "\n")
    return load_tokenizer(folder)
