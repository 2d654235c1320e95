"""The README's table of settings, made from grpo/config.py: python -m tests.config_table"""

import re
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "grpo" / "config.py"


def rows() -> list[str]:
    """One Markdown row for every field of every section, in the order of the file; its comment is the explanation."""
    found, section = [], ""
    for line in SOURCE.read_text(encoding="utf-8").splitlines():
        if head := re.match(r'    """\[+(\w+)\]+', line):
            section = head[1]
        elif line.startswith(("class Config", "def ")):
            section = ""
        elif section and (field := re.match(r"    (\w+): .+? = (.+?)  # (.+)$", line)):
            name, default, words = (part.replace("|", "\\|") for part in field.groups())
            default = {"get_args(Layer)": "all seven", "field(default_factory=dict)": "{}"}.get(default, default)
            found.append(f"| {section}.{name} | {default} | {words} |")
    return found


if __name__ == "__main__":
    print("| setting | default | what it is |\n|---|---|---|")
    print("\n".join(rows()))
