"""report.html: what it says of a run, what it survives, and that nothing a model wrote becomes markup.

Run: pytest tests/test_report_page.py; in a real browser, with chromium, chromedriver and selenium: add -m browser
"""

import json
import math
import re
import shutil
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from grpo import history
from grpo.curves import POINTS, evenly, thin
from grpo.history import read_groups
from grpo.report import embed, figure, main, write_report

EVIL = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\u2028\u2029\x00\ud800&lt;${title}"
VOID = {"meta", "link", "img", "br", "input"}
FLAT = {"frac_reward_zero_std": 1.0, "groups/all_wrong_ratio": 1.0, "groups/mixed_ratio": 0.0}


class Page(HTMLParser):
    """What a browser would make of the page: its elements with their attributes, and the text in each."""

    def __init__(self, file: Path):
        super().__init__()
        self.elements, self.texts, self.open = [], [], []
        self.feed(file.read_text(encoding="utf-8"))
        self.text = " ".join(text for tag, text in self.texts if tag not in ("script", "style"))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    @property
    def data(self) -> list[dict]:
        """The runs in the reader's JSON."""
        return json.loads(next(text for tag, text in self.texts if tag == "script"))["runs"]


def step(number: int, **changes) -> dict:
    metrics = {"reward": 0.1 * number, "rewards/correct/mean": 0.5, "entropy": 0.4, "grad_norm": 0.2}
    metrics |= {"completions/mean_length": 20.0, "completions/clipped_ratio": 0.0, "learning_rate": 1e-5}
    metrics |= {"frac_reward_zero_std": 0.25, "groups/mixed_ratio": 0.75, "groups/all_correct_ratio": 0.25}
    metrics |= {"groups/all_wrong_ratio": 0.0, "groups/all_failed_ratio": 0.0}
    return {"step": number} | metrics | changes


def val(number: int, accuracy: float, **others) -> dict:
    bounds = {"val/execution_accuracy_low": accuracy - 0.05, "val/execution_accuracy_high": accuracy + 0.05}
    return {"step": number, "val/execution_accuracy": accuracy} | bounds | others


def group(number: int, question: str = "how many?", text: str = "SELECT 1", completions: int = 2) -> dict:
    good = {"text": text, "sql": text, "status": "ok", "rows": [["1", text]], "reason": "", "reward": 1.0}
    good |= {"parts": {"correct": 1.0}, "advantage": 0.7, "tokens": [text, "\n"], "logprobs": [-0.5, -2.0]}
    bad = good | {"status": "sql_error", "rows": [], "reason": f"no such column: {text}", "advantage": -0.7}
    record = {"step": number, "question": question, "db_id": "d", "gold": text, "gold_rows": [["1"]]}
    return record | {"completions": ([good, bad] * completions)[:completions]}


ROWS = [val(0, 0.1, **{"val/pass@8": 0.5}), *(step(i) for i in range(1, 5)), val(4, 0.3)]
GROUPS = [group(i, f"question {i}.{q}?") for i in range(1, 5) for q in range(2)]
BEFORE = {"n": 50, "execution_accuracy": 0.1, "execution_accuracy_low": 0.05, "execution_accuracy_high": 0.2}
BEFORE |= {"pass@8": 0.5, "pass@8_low": 0.4, "pass@8_high": 0.6, "outcomes": {"other rows": 45, "correct": 5}}
AFTER = BEFORE | {"execution_accuracy": 0.42, "outcomes": {"correct": 21, "other rows": 28, "syntax error": 1}}


def make_run(folder: Path, rows=ROWS, groups=GROUPS, config: str = "", **objects) -> Path:
    """A run directory by hand; objects: summary, before, after (none of them: a run that still goes on)."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(f"{config}[model]\npath = 'start'\n[grpo]\nmax_steps = 9\n", encoding="utf-8")
    for name, records in (("metrics", rows), ("samples", groups)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    names = {"summary": "summary.json", "before": "eval-test-before.json", "after": "eval-test-after.json"}
    for name, value in objects.items():
        (folder / names[name]).write_text(json.dumps(value), encoding="utf-8")
    return folder


def page_of(*folders: Path) -> Page:
    out = folders[0].parent / "page.html"
    write_report(list(folders), out)
    return Page(out)


@pytest.fixture
def _no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)


plain = pytest.mark.usefixtures("_no_matplotlib")


# --- what it says ---


@plain
def test_a_finished_run_shows_verdict_gate_intervals_and_outcomes(tmp_path):
    summary = {"verdict": "taught: +32.0 points"}
    page = page_of(make_run(tmp_path / "good", summary=summary, before=BEFORE, after=AFTER))
    assert "good" in page.text
    assert "taught: +32.0 points" in page.text
    assert "Gate: room: +40.0 points between greedy 0.100 and pass@8 0.500" in page.text
    assert re.search(r"execution_accuracy\s+0\.100 \[0\.050, 0\.200\]\s+0\.420 \[0\.050, 0\.200\]", page.text)
    assert re.search(r"syntax error\s+0\s+1", page.text)
    assert "running" not in page.text
    assert "missing" not in page.text
    assert "no config" not in page.text


@plain
def test_a_run_that_goes_on_says_how_far_it_is(tmp_path):
    page = page_of(make_run(tmp_path / "young", before=BEFORE))
    assert "running (or killed), step 4 of 9" in page.text
    assert "missing, empty or torn: summary.json, eval-test-after.json" in page.text
    assert re.search(r"other rows\s+45\s+–", page.text)  # not 0: there is no test after


@plain
def test_a_dead_run_says_why_and_since_when(tmp_path):
    rows = [step(1), step(2), *(step(i, **FLAT) for i in range(3, 7))]
    watch = "[watch]\nsteps = 3\n"
    page = page_of(make_run(tmp_path / "dead", rows, config=watch))
    assert "The last steps: flat_groups: 100% of the groups of the last 3 steps were flat" in page.text
    assert "4 of 6; the longest stretch from 3 to 6" in page.text
    halted = {"verdict": "halted at step 6: flat_groups: 100% of the groups"}
    page = page_of(make_run(tmp_path / "halted", rows, config=watch, summary=halted))
    assert "The last steps" not in page.text  # said once


@plain
def test_without_matplotlib_the_numbers_are_a_table(tmp_path):
    rows = [val(0, 0.1), *(step(i) for i in range(1, 201)), val(100, 0.2)]
    page = page_of(make_run(tmp_path / "run", rows))
    assert "pip install matplotlib" in page.text
    assert page.count("svg") == 0
    header = re.search(r"step ((?:\d+ )+)", re.sub(r"\s+", " ", page.text.partition("run: steps")[2]))[1].split()
    assert (header[0], header[-1], len(header)) == ("1", "200", 20)
    assert "0.200 [0.150, 0.250]" in page.text


def test_with_matplotlib_every_curve_is_a_panel_and_the_bytes_are_the_same(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [*ROWS, step(5, reward=None), step(6, **FLAT), step(7, kl=0.1)]
    runs = [make_run(tmp_path / "$a$", rows), make_run(tmp_path / "b", rows=[])]
    page = page_of(*runs)
    curves = ["reward", "rewards/correct/mean", "val/execution_accuracy", "entropy", "completions/mean_length"]
    curves += ["completions/clipped_ratio", "kl", "grad_norm", "learning_rate", f"groups of {tmp_path.name}/$a$"]
    assert [text for tag, text in page.texts if tag == "figcaption"] == curves
    assert page.count("svg") == len(curves)
    first = (tmp_path / "page.html").read_bytes()
    write_report(runs, tmp_path / "page.html")
    assert (tmp_path / "page.html").read_bytes() == first


@plain
def test_several_runs_share_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs = [make_run(tmp_path / name, before=BEFORE) for name in ("a/run", "b/run", "c/other")]
    assert main([str(run) for run in runs]) == 0
    assert capsys.readouterr().out == "report.html\n"
    page = Page(tmp_path / "report.html")
    assert [run["name"] for run in page.data] == ["a/run", "b/run", "c/other"]
    assert page.text.count("running (or killed)") == 3
    assert main([str(runs[0])]) == 0
    assert Page(runs[0] / "report.html").data[0]["name"] == "a/run"
    with pytest.raises(ValueError, match="11 runs; expected 1 to 10"):
        write_report(runs[:1] * 11, tmp_path / "report.html")


def test_a_figure_has_its_interval_and_thin_numbers_stay_readable():
    assert figure({"a": 0.5, "a_low": 0, "a_high": 1}, "a") == "0.500 [0.000, 1.000]"
    assert [figure({"a": a}, "a") for a in (0.00015, 27.46, None)] == ["0.00015", "27.460", "–"]


# --- what it survives ---


@plain
@pytest.mark.parametrize(
    "name", ["config.toml", "metrics.jsonl", "samples.jsonl", "eval-test-before.json", "summary.json"]
)
@pytest.mark.parametrize("damage", ["missing", "empty", "torn", "foreign"])
def test_missing_and_torn_files_are_named_and_never_raise(tmp_path, name, damage):
    folder = make_run(tmp_path / "run", summary={"verdict": "v"}, before=BEFORE, after=AFTER)
    file = folder / name
    text = file.read_text(encoding="utf-8")
    file.write_text({"empty": "", "torn": text[:-10], "foreign": "[1]\n"}.get(damage, ""), encoding="utf-8")
    if damage == "missing":
        file.unlink()
    text = page_of(folder).text
    said = {"config.toml": "no config, so its defaults"} if damage != "empty" else {}
    if damage == "torn" and name.endswith(".jsonl"):
        said = {name: f"{name}: 1 torn or foreign line(s) left out"}
    assert said.get(name, "" if name == "config.toml" else "missing, empty or torn") in text


@plain
def test_null_and_nan_values_are_gaps(tmp_path):
    rows = [step(1), step(2, reward=None, grad_norm=math.nan), {"step": 3}, step(4, entropy="?")]
    page = page_of(make_run(tmp_path / "run", rows, [group(1) | {"extra": math.nan}]))
    assert page.data[0]["groups"] == [group(1) | {"extra": None}]
    assert re.search(r"grad_norm\s+0\.200\s+–\s+0\.200", page.text)


@pytest.mark.parametrize("make", [lambda folder: folder.mkdir(), lambda folder: None])
def test_a_folder_that_is_no_run_is_one_line_and_exit_code_2(tmp_path, capsys, make):
    make(tmp_path / "x")
    with pytest.raises(ValueError, match=r"x is no run; expected a folder with config.toml or metrics.jsonl"):
        write_report([tmp_path / "x"], tmp_path / "page.html")
    assert main([str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@plain
def test_what_models_and_databases_wrote_is_never_markup(tmp_path):
    """In every place where it could stand; the reader still gets every character."""
    groups = [group(1, EVIL, EVIL) | {"db_id": EVIL}]
    name = "<img src=x onerror=hack()>"
    config = f"[data]\nsystem = {json.dumps(EVIL[:60])}\n"
    test = BEFORE | {"outcomes": {EVIL: 1}, f"{EVIL}": 0.5, f"{EVIL}_low": 0, f"{EVIL}_high": 1}
    evil, good = (
        make_run(tmp_path / name, ROWS, groups, config, summary={"verdict": EVIL}, before=test),
        tmp_path / "good",
    )
    rows = [step(1) | {f"rewards/{EVIL}/mean": 1.0}]
    page = page_of(evil, make_run(good, rows))
    tags = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "main",
        "h1",
        "h2",
        "section",
        "p",
        "div",
        "table",
        "caption",
    }
    tags |= {"tr", "th", "td", "details", "summary", "pre", "noscript", "span", "label", "select", "button", "script"}
    assert {tag for tag, _ in page.elements} == tags
    assert page.count("script") == 2
    assert not [
        attrs for _, attrs in page.elements if {"src", "href"} & set(attrs) or any(k[:2] == "on" for k in attrs)
    ]
    assert page.data[0] == {"name": f"{tmp_path.name}/{name}", "steps": 1, "groups": groups}
    assert page.text.count("window.hacked=1") == 9


def test_embedded_json_cannot_end_its_element():
    text = embed([EVIL])
    assert json.loads(text) == [EVIL]
    assert text.isascii()
    assert not set("<>&\0") & set(text)


# --- what bounds it ---


def test_evenly_keeps_the_ends():
    assert evenly([*range(5)], 3) == [0, 2, 4]
    assert evenly([*range(3)], 20) == [0, 1, 2]
    assert evenly([], 3) == []


def test_a_long_curve_is_means_of_bins_and_hides_no_dead_stretch():
    rows = [
        step(i, **({"groups/mixed_ratio": 0.0} if i == 1234 else {"groups/mixed_ratio": 1.0})) for i in range(1, 2001)
    ]
    steps, values = thin(rows, "groups/mixed_ratio")
    assert len(steps) == POINTS
    assert (steps[0], steps[-1]) == (1, 2000)
    assert [value < 0.9 for value in values].count(True) == 1
    assert thin(rows[:3], "reward")[0] == [1, 2, 3]  # a short one stays as it is
    steps, values = thin([step(1), step(2, reward=None), step(3)], "reward")
    assert [math.isnan(value) for value in values] == [False, True, False]
    assert thin([], "reward") == ([], [])


@plain
def test_a_run_of_2000_steps_makes_a_small_page(tmp_path):
    """24 MB of samples: a bounded, even choice of steps, with the first."""
    folder = make_run(tmp_path / "long", rows=[step(i) for i in range(1, 2001)], groups=[])
    line = json.dumps(group(1, text="SELECT <x> " * 10, completions=16)).partition(", ")[2]
    with (folder / "samples.jsonl").open("w") as file:
        file.writelines(f'{{"step": {i}, {line}\n' for i in range(1, 2001))
    assert (folder / "samples.jsonl").stat().st_size > 20_000_000
    page = page_of(folder)
    size = (tmp_path / "page.html").stat().st_size
    assert 2_000_000 < size < 10_000_000
    steps = [group["step"] for group in page.data[0]["groups"]]
    assert page.data[0]["steps"] == 2000
    assert len(steps) <= history.GROUPS
    gaps = {b - a for a, b in pairwise(steps)}
    assert (steps[0], len(gaps)) == (1, 1)


def test_one_step_too_large_is_cut(tmp_path):
    folder = make_run(tmp_path / "run", groups=[group(1)] * 10 + [group(2)])
    groups, steps, torn = read_groups(folder / "samples.jsonl", 4, 10**6)
    assert (groups, steps, torn) == ([group(1)] * 4, 2, 0)
    assert read_groups(folder / "samples.jsonl", 99, 10)[0] == []


# --- in a real browser ---


@pytest.fixture
def browser():
    """Headless Chromium by chromedriver; skipped where either, or selenium, is absent."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chrome = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if not chrome or not shutil.which("chromedriver"):
        pytest.skip("no chromium, or no chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()


@pytest.mark.browser
def test_the_reader_works_by_keyboard_and_mouse_and_nothing_hostile_runs(tmp_path, browser):
    from selenium.webdriver.common.keys import Keys

    groups = [group(i, f"question {i}.{q}?", EVIL + "x" * 300) for i in (1, 2, 3) for q in (1, 2)]
    groups[0]["completions"][0]["rows"] = [["wide " * 16] * 20]
    runs = [make_run(tmp_path / "evil", groups=groups, before=BEFORE), make_run(tmp_path / "other")]
    write_report(runs, tmp_path / "page.html")
    size = {"width": 400, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get((tmp_path / "page.html").as_uri())

    def run(script: str):
        return browser.execute_script(f"return {script}")

    def question() -> str:
        return run("document.querySelector('#shown h3').textContent")

    def press(*keys: str) -> None:
        for key in keys:
            browser.switch_to.active_element.send_keys(key)

    def click(selector: str) -> None:
        browser.find_element("css selector", selector).click()

    assert question() == "question 1.1?"
    assert run("document.documentElement.scrollWidth") <= 400
    press(Keys.RIGHT)
    assert question() == "question 1.2?"
    press(Keys.RIGHT, "j")  # no third group
    assert question() == "question 2.2?"
    press("k", Keys.LEFT)
    assert question() == "question 1.1?"
    press(Keys.DOWN)  # scrolls: the reader has no focus
    assert question() == "question 1.1?"
    for _ in range(60):  # by Tab alone
        if run("document.activeElement.id") == "shown":
            break
        press(Keys.TAB)
    assert run("getComputedStyle(document.activeElement).outlineStyle") == "solid"  # the focus is seen
    press(Keys.DOWN, Keys.DOWN, Keys.UP)
    assert question() == "question 2.1?"
    click("#group-on")
    click("#step-on")
    assert question() == "question 3.2?"
    click("#step-back")
    click("#step option:first-child")
    assert question() == "question 1.2?"
    assert run("document.querySelector('.tokens span').title") == "log-probability -0.500"
    assert run("document.querySelector('#shown pre').textContent.startsWith('</script><script>window.hacked=1')")
    click("#run option:last-child")
    assert question() == "question 1.0?"
    assert run("[window.hacked, document.scripts.length, document.images.length]") == [None, 2, 0]
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
