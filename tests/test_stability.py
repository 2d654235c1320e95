"""Stability: a gold whose rows SQLite was free to choose is told from one that the data determines.

Run: pytest tests/test_stability.py
"""

import sqlite3
from contextlib import closing

import pytest

from sqlenv.stability import CUT, ORDER, SCAN, _order_bys, undetermined

TABLES = """
CREATE TABLE g(y INT); INSERT INTO g VALUES (2014), (2015), (2014), (2015), (2014), (2015);
CREATE TABLE t(a INT, b TEXT, v INT); INSERT INTO t VALUES (1, 'x', 5), (2, 'y', 5), (3, 'z', 4), (4, 'x', 1);
CREATE TABLE u AS SELECT * FROM t; CREATE INDEX i ON u(b, a); CREATE INDEX j ON u(b);
CREATE TABLE twin(a INT, v INT); INSERT INTO twin VALUES (1, 5), (1, 5), (2, 4);
CREATE TABLE f(x REAL); INSERT INTO f VALUES (0.1), (0.2), (0.3);
CREATE TABLE big(x INT); INSERT INTO big VALUES (-5), (9223372036854775807), (4);
"""

GOLDS = {
    # nothing is ordered
    "SELECT a FROM t": "",  # a bag: the order of the scan does not matter
    "SELECT a FROM t LIMIT 1": SCAN,
    "SELECT a FROM t LIMIT 9": "",
    "SELECT max(a) FROM t WHERE a IN (SELECT a FROM t LIMIT 2)": SCAN,
    "SELECT group_concat(a) FROM t": SCAN,
    "SELECT count(*), a FROM t": SCAN,  # the `a` of any row
    "SELECT b, a FROM u GROUP BY b ORDER BY b DESC": SCAN,  # the `a` of any row of the group
    "SELECT sum(x) FROM f": "",  # 0.6000000000000001 or 0.6
    "SELECT sum(x) FROM big": SCAN,  # backwards it overflows
    # ties under LIMIT
    "SELECT y FROM g GROUP BY y ORDER BY count(*) DESC LIMIT 1": CUT,
    "SELECT y FROM g GROUP BY y ORDER BY count(*) DESC LIMIT 2": ORDER,
    "SELECT count(*) FROM g WHERE y = (SELECT y FROM g GROUP BY y ORDER BY count(*) DESC LIMIT 1)": "",  # 3 either way
    "SELECT * FROM g WHERE y IN (SELECT y FROM g GROUP BY y ORDER BY count(*) LIMIT 1)": CUT,
    "SELECT a, b FROM t WHERE a IN (SELECT a FROM t ORDER BY v DESC LIMIT 1)": CUT,
    "SELECT a FROM (SELECT a FROM t ORDER BY v DESC LIMIT 1) ORDER BY a": CUT,
    "SELECT a FROM (SELECT a FROM t ORDER BY v DESC LIMIT 2)": "",  # both of them, in whatever order
    "SELECT a FROM t ORDER BY v DESC LIMIT 1": CUT,
    "SELECT a FROM t ORDER BY v DESC LIMIT 2": ORDER,
    "SELECT a FROM t ORDER BY v DESC LIMIT 2 OFFSET 1": CUT,
    "SELECT a FROM t ORDER BY v DESC LIMIT 2, 1": "",
    "SELECT a FROM t ORDER BY a DESC LIMIT 1": "",
    "SELECT b, a FROM t ORDER BY b LIMIT 1": CUT,  # the second column tells the tied rows apart
    "SELECT a FROM twin ORDER BY v DESC LIMIT 1": "",  # a tie between equal rows
    "SELECT DISTINCT b FROM t ORDER BY b LIMIT 1": "",
    "SELECT a FROM t WHERE a < 3 UNION SELECT a FROM t ORDER BY 1 LIMIT 2": "",
    "SELECT v, a FROM t WHERE a < 3 UNION ALL SELECT v, a FROM t ORDER BY 1 DESC LIMIT 1": CUT,
    "SELECT v, a FROM t WHERE a < 2 UNION ALL SELECT v, a FROM t WHERE a = 2 ORDER BY 1": ORDER,
    # the order of ties
    "SELECT a FROM t ORDER BY v": ORDER,
    "SELECT a FROM t ORDER BY v ; -- all": ORDER,
    "SELECT a FROM t ORDER BY v -- LIMIT 1\n": ORDER,
    "SELECT a FROM t ORDER BY v DESC /* a tie */ LIMIT 1 -- is cut": CUT,
    "SELECT v FROM t ORDER BY v": "",
    "SELECT v, a FROM t ORDER BY v, a": "",
    "WITH best AS (SELECT a, v FROM t ORDER BY v DESC LIMIT 1) SELECT v FROM best": "",  # 5 whoever it is
    # no ORDER BY of a statement
    "SELECT a, 'ORDER BY v LIMIT 1' FROM t": "",
    "SELECT a FROM t -- ORDER BY v LIMIT 1": "",
    'SELECT a AS "order", v AS "by" FROM t': "",
    "SELECT a, row_number() OVER (ORDER BY a) FROM t": "",
    "SELECT a FROM (SELECT a FROM t ORDER BY v)": "",
    # not ours to judge
    "SELECT a FROM t ORDER BY v /*".ljust(19_998, "*") + "*/": "",  # with a tie-break it is too long
    "SELECT nothing FROM t": "",
    "DROP TABLE t": "",
}


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    path = tmp_path_factory.mktemp("stability") / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(TABLES)
    return path


@pytest.mark.parametrize("gold", GOLDS, ids=lambda gold: gold[:90])
def test_what_sqlite_may_choose_is_told_from_what_the_data_determine(database, gold):
    assert undetermined(database, gold) == GOLDS[gold]


def test_a_database_that_cannot_be_used_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="No such file"):
        undetermined(tmp_path / "gone.sqlite", "SELECT 1")


@pytest.mark.parametrize(
    ("sql", "found"),
    [  # another term could stand at a | at the top level, at a ^ in a subquery; ! follows where there is a LIMIT
        ("SELECT a FROM t order\nby a|", 1),
        ("SELECT a FROM t ORDER BY a, b|! LIMIT 2 OFFSET 1", 1),
        ("SELECT a FROM t ORDER BY lower(a)| /* LIMIT", 1),
        ("SELECT a FROM t ORDER BY [order by ( limit]|; -- end", 1),
        ("SELECT a FROM t WHERE a = (SELECT b FROM u ORDER BY b^! LIMIT 1) ORDER BY c| --", 2),
        ("SELECT a FROM t ORDER BY (SELECT b FROM u ORDER BY b^! LIMIT 1)|! LIMIT 1", 2),
        ("SELECT a FROM (SELECT a FROM t ORDER BY b) LIMIT 1", 0),
        ("SELECT rank() OVER (PARTITION BY a ORDER BY b), group_concat(a ORDER BY a) FROM t LIMIT 1", 0),
    ],
)
def test_where_a_tie_break_can_stand(sql, found):
    plain, marks = "", []
    for character in sql:
        if character in "|^":
            marks.append((len(plain), character == "|", False))
        elif character == "!":
            marks[-1] = (*marks[-1][:2], True)
        else:
            plain += character
    assert list(_order_bys(plain)) == marks
    assert len(marks) == found
