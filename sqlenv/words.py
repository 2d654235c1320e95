"""What the synthetic task is made of: word pools that no two splits share, and the families of its questions.

{sft, train}, val and test share no table or column name but `id`, so a score on val or test is about schemas whose
words the model was never trained on. Names are single lower-case words, since a query copies them piece by piece.
In sft and train nine names in ten are pseudo-words, so that only copying works.
"""

import random

from sqlenv.schema import KEYWORDS

NAMES = {
    "train": {
        "table": """guest room player singer school student teacher book author library garden flower river bridge
            train station driver doctor patient clinic farm horse market vendor product movie actor studio museum
            painting soldier battle ship harbor island lake mountain party member concert album artist race circuit
            course dish menu store""".split(),
        "number": """age height weight price salary score size length width depth speed capacity budget floor grade
            stock year month distance volume rating profit goals points wins seats pages cost tax debt""".split(),
        "text": """name title color city country status level brand model material genre style owner region language
            street category shape team type club college position county nickname season""".split(),
    },
    "val": {
        "table": """hotel chef recipe forest bird nest castle knight sword planet comet rocket pilot drummer temple
            monk village baker tower tiger jungle potter kiln miner cavern dancer ballet sailor""".split(),
        "number": """income duration area altitude mileage votes credits visits tickets hours power calories rent bonus
            diameter share""".split(),
        "text": """surname town nation mood fabric theme sponsor dialect sector career flavor pattern mascot agency
            climate rival""".split(),
    },
    "test": {
        "table": """wagon canyon camel desert lantern tailor jacket poet poem lawyer court bandit cactus turtle lagoon
            ferry cabin hunter falcon puppet wizard potion mason statue juggler circus brewer tavern""".split(),
        "number": """population fee revenue gallons acres losses medals shots strength gain humidity radius orders
            tempo errors quota""".split(),
        "text": """alias province state label timber topic manager accent zone trade scent texture emblem guild origin
            mentor""".split(),
    },
}
VALUES = """Oslo Rome Paris Lima Cairo Delhi Milan Tokyo Quito Dover Anna Bruno Clara Dario Elena Felix Greta Hugo Irene
    Jonas Karla Liam Mona Nora Oscar Petra Ralf Sofia Tomas Vera Red Blue Green Amber Ivory Coral Silver Gold North
    South East West Jazz Rock Folk Opera Metal Wood Glass Stone Linen Open Closed Active Basic Major Minor Senior
    Spring Autumn Maple Cedar Falcon Lion Eagle Delta Omega Vega Orion Lotus Pearl Ruby Topaz""".split()

# Three lines a family: its name and paraphrases; the good query; the query that is wrong by convention only.
# t table, u its parent; c, d, b, e columns, n of numbers, x of text (c is not n, d not c, b not x; e is the parent's);
# number, text, either, parent: conditions in words, each with its SQL; twin_sql: number_sql with > for >= and so on.
_FAMILIES = """
list_one: list the {c} of every {t} | show all {c} values | give the {c} of each {t}
SELECT {c} FROM {t}
SELECT id , {c} FROM {t}
list_two: list the {c} and {d} of every {t} | show each {c} and its {d}
SELECT {c} , {d} FROM {t}
SELECT id , {c} , {d} FROM {t}
number_filter: list the {c} of every {t} with {number} | which {c} values have {number} | show the {c} for {number}
SELECT {c} FROM {t} WHERE {number_sql}
SELECT {c} FROM {t} WHERE {twin_sql}
text_filter: list the {b} of every {t} with {text} | which {b} values have {text} | show the {b} for {text}
SELECT {b} FROM {t} WHERE {text_sql}
SELECT {b} , {x} FROM {t} WHERE {text_sql}
count: how many {t} rows are there | count every {t} | what is the number of {t} rows
SELECT COUNT ( * ) FROM {t}
SELECT * FROM {t}
count_filter: how many {t} rows have {either} | how many rows have {either} | count those with {either}
SELECT COUNT ( * ) FROM {t} WHERE {either_sql}
SELECT * FROM {t} WHERE {either_sql}
aggregate: what is the {agg} {n} of all {t} rows | find the {agg} {n} | give the {agg} {n} over every {t}
SELECT {AGG} ( {n} ) FROM {t}
SELECT id , {AGG} ( {n} ) FROM {t}
superlative: give the {c} of the {t} with the {most} {n} | which {c} has the {most} {n}
SELECT {c} FROM {t} ORDER BY {n} {DIR} LIMIT 1
SELECT {c} , {MOST} ( {n} ) FROM {t}
group: how many {t} rows are there for each {x} | count the rows per {x} | for each {x} count every {t}
SELECT {x} , COUNT ( * ) FROM {t} GROUP BY {x}
SELECT COUNT ( * ) FROM {t} GROUP BY {x}
distinct: list the different {x} values of {t} | which {x} values occur | show every {x} once
SELECT DISTINCT {x} FROM {t}
SELECT {x} FROM {t}
above_average: list the {c} of every {t} with {n} above average | which {c} values have {n} above average
SELECT {c} FROM {t} WHERE {n} > ( SELECT AVG ( {n} ) FROM {t} )
SELECT {c} , {n} FROM {t} WHERE {n} > ( SELECT AVG ( {n} ) FROM {t} )
sort: list the {c} of every {t} sorted by {n} | show each {c} in order of {n}
SELECT {c} FROM {t} ORDER BY {n}
SELECT {c} FROM {t} ORDER BY {n} DESC
join: show the {c} of each {t} and the {e} of its {u} | list every {c} with the {e} of its {u}
SELECT {t} . {c} , {u} . {e} FROM {t} JOIN {u} ON {t} . {u}_id = {u} . id
SELECT {t} . {c} , {u} . {e} FROM {t} JOIN {u} ON {t} . id = {u} . id
join_filter: list the {c} of every {t} whose {u} has {parent} | which {c} values belong to a {u} with {parent}
SELECT {t} . {c} FROM {t} JOIN {u} ON {t} . {u}_id = {u} . id WHERE {parent_sql}
SELECT {t} . {c} FROM {t} JOIN {u} ON {t} . id = {u} . id WHERE {parent_sql}
"""
_LINES = _FAMILIES.strip().split("\n")
FAMILIES = {
    head.split(": ")[0]: (head.split(": ")[1].split(" | "), good, wrong)
    for head, good, wrong in zip(_LINES[::3], _LINES[1::3], _LINES[2::3], strict=True)
}
OPERATORS = {"more than": (">", ">="), "less than": ("<", "<="), "at least": (">=", ">"), "at most": ("<=", "<")}
AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
_PROMPT_WORDS = "table key integer text question evidence sql count avg max min sum rowid oid".split()
RESERVED = KEYWORDS.union(  # no name may be one of these: SQL's words and those of prompts and questions
    _PROMPT_WORDS, AGGREGATES, " ".join(OPERATORS).split(), *(" ".join(f[0]).split() for f in FAMILIES.values())
)


def check_name_pools() -> None:
    """Raise ValueError unless every table, column and foreign-key name is in one pool, once, and not reserved."""
    seen: dict[str, str] = {}
    for pool, names in NAMES.items():
        for name in [*_words(pool), *(f"{table}_id" for table in names["table"])]:
            if name in seen or name in RESERVED:
                other = f"in pool {seen[name]!r}" if name in seen else "reserved"
                raise ValueError(f"name {name!r} of pool {pool!r} is also {other}; expected once (sqlenv/words.py)")
            seen[name] = pool


def make_name(rng: random.Random, pool: str, kind: str, taken: set[str]) -> str:
    """A "table", "number" or "text" name that its database lacks yet; nine train names in ten are pseudo-words."""
    while True:
        real = pool != "train" or rng.random() < 0.1
        name = rng.choice(NAMES[pool][kind]) if real else _pseudo_word(rng)
        if name not in taken:
            taken.add(name)
            return name


def _words(*pools: str) -> list[str]:
    return [word for kind in ("table", "number", "text") for pool in pools for word in NAMES[pool][kind]]


_SPLICED, _FORBIDDEN = _words("train"), RESERVED.union(_words("val", "test"))


def _pseudo_word(rng: random.Random) -> str:
    """A word of no dictionary: the start of one train word and the end of another (70 %), or random syllables."""
    while True:
        if rng.random() < 0.7:
            word = rng.choice(_SPLICED)[: rng.randint(2, 4)] + rng.choice(_SPLICED)[-rng.randint(2, 4) :]
        else:
            syllables = (rng.choice("bcdfghjklmnprstvwyz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
            word = "".join(syllables) + rng.choice("dklmnprstx")
        if word not in _FORBIDDEN:
            return word


def make_value(rng: random.Random, pool: str) -> str:
    """A text cell: one capitalised word."""
    return _pseudo_word(rng).capitalize() if pool == "train" and rng.random() < 0.7 else rng.choice(VALUES)
