"""Two models answer the same prompts, and a judge compares: verdicts, both orders, intervals, and what a crash leaves."""

import json
import math
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from lib.config.settings import Config
from lib.errors import UserError
from lib.evaluate import command as evaluate
from lib.evaluate import judges, score_file, win_rate
from lib.evaluate.judges import Question, judge_of
from lib.evaluate.score_file import StoredModel
from lib.system.terminal import Terminal
from tests import served
from tests.tiny import ROOT
from tests.tiny import read_jsonl as lines_of

MODEL = ROOT / "configs/quickstart/model"
PROMPTS = 12
WORDS = ["evaluate.batch_size=4", "evaluate.max_tokens=40"]


def settings(**evaluate: Any) -> Config:
    return Config.model_validate({"model": {"path": "-"}, "data": {"train": "-"}, "evaluate": evaluate})


def asked(*pairs: tuple[str, str], answer: str | None = None) -> list[Question]:
    record = {"prompt": "?"} if answer is None else {"prompt": "?", "answer": answer}
    return [Question(f"q.jsonl:{line}", "?", pair, record) for line, pair in enumerate(pairs, start=1)]


# ---- What is counted


@pytest.mark.parametrize(
    ("rate", "count", "low", "high"),
    [(0.5, 10, 0.2365931, 0.7634069), (0.0, 10, 0.0, 0.2775328), (1.0, 10, 0.7224672, 1.0)],
)
def test_the_interval_is_wilsons(rate: float, count: int, low: float, high: float) -> None:
    assert win_rate.wilson(rate, count) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(
    ("scores", "swapped", "verdict"),
    [
        ([1, 0], None, "win"),
        ([0, 1], None, "loss"),
        ([0.5, 0.5], None, "tie"),
        ([3, 2], [2, 1], "win"),
        ([0, 1], [0, 1], "loss"),
        ([1, 0], [0, 1], "tie"),  # whichever came first
        ([1, 0], [0.5, 0.5], "tie"),
        ([math.nan, math.nan], [1, 0], "unclear"),
    ],
)
def test_an_answer_wins_only_where_both_orders_say_so(
    scores: list[float], swapped: list[float] | None, verdict: str
) -> None:
    assert win_rate.verdict(scores, swapped) == verdict


# ---- Who judges


@pytest.mark.parametrize(
    ("judge", "text", "answer", "is_right"),
    [
        ("number", "12 + 30 = 42.", "42", True),
        ("number", "about 1,200 in all", "1200.0", True),
        ("number", "10-5", "5", True),
        ("number", "it is -5", "-5", True),
        ("number", "it is -5", "5", False),
        ("number", "42, or rather 43", "42", False),
        ("number", "1.5e3", "1500", True),
        ("number", "none", "0", False),
        ("number", "1,00,000 rupees", "100000", True),
        ("number", "12345678901234567890", "12345678901234567891", False),
        ("number", "a quarter: 1/4", "3/4", False),
        ("number", "a half: 2/4", "0.5", True),
        ("number", "the point (3,4)", "34", False),
        ("number", "it is \N{MINUS SIGN}5", "5", False),
        ("number", "it is \N{MINUS SIGN}5", "-5", True),
        ("number", "1e999", "2e999", False),
        ("number", "1/0", "2/0", False),
        ("number", "1e99999999999999999999", "1", False),
        ("number", "a version 2 of it: .5", "0.5", True),
        ("exact", " Paris \n", "Paris", True),
        ("exact", "Paris.", "Paris", False),
        (None, "the answer: Paris", "the answer: Paris", True),
    ],
)
def test_answers_are_checked(judge: str | None, text: str, answer: str, is_right: bool) -> None:
    assert judge_of(settings(judge=judge))(asked((text, "?"), answer=answer))[0][0] == is_right


@contextmanager
def server(answer: Callable[[dict[str, Any]], tuple[int, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An OpenAI-compatible server: its address, and the bodies that it got."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body | {"path": self.path, "key": self.headers.get("Authorization")})
            status, said = answer(body)
            text = json.dumps({"choices": [{"message": {"content": said}}]} if isinstance(said, str) else said).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}/v1", bodies
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def compared(address: str, *pairs: tuple[str, str]) -> list[list[float]]:
    return judge_of(settings(judge=address, judge_model="m"))(asked(*pairs))


def test_a_model_behind_a_server_is_a_judge(monkeypatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")

    def longer(body: dict[str, Any]) -> tuple[int, str]:
        text = body["messages"][0]["content"]
        first, second = (text.split(f"<answer_{name}>\n")[1].split("\n</")[0] for name in "AB")
        return 200, f"[[A]] or [[B]]? [[{'C' if len(first) == len(second) else 'AB'[len(second) > len(first)]}]]"

    with server(longer) as (address, bodies):
        scores = compared(address, ("long one", "short"), ("a {second}", "b {prompt} c"), ("x", "y"))
    assert scores == [[1.0, 0.0], [0.0, 1.0], [0.5, 0.5]]
    for body in bodies:
        asked_for = [body[key] for key in ("path", "model", "temperature", "key")]
        assert asked_for == ["/v1/chat/completions", "m", 0, "Bearer secret"]
    with server(lambda body: (200, "I cannot say")) as (address, _):
        assert all(math.isnan(score) for score in compared(address, ("a", "b"))[0])


def test_a_server_that_is_busy_is_asked_again_and_one_that_refuses_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(judges, "WAIT_SECONDS", 0.001)
    answers = iter([(503, "busy"), (429, "slowly"), (200, "[[B]]")])
    with server(lambda body: next(answers)) as (address, bodies):
        assert compared(address, ("a", "b")) == [[0.0, 1.0]] and len(bodies) == 3
    with server(lambda body: (401, "wrong key")) as (address, bodies):
        with pytest.raises(UserError, match="status 401: .*wrong key"):
            compared(address, ("a", "b"))
        assert len(bodies) == 1
    with server(lambda body: (200, {"choices": []})) as (address, _):  # noqa: SIM117
        with pytest.raises(UserError, match=r"no chat completion, but '{.choices.: \[\]}'"):
            compared(address, ("a", "b"))
    with pytest.raises(UserError, match=r"tried 4 times"):
        compared(address, ("a", "b"))  # nobody listens there any more


def test_a_judge_is_refused_before_anything_is_asked(tmp_path) -> None:
    with pytest.raises(UserError, match="needs evaluate.judge_model"):
        judge_of(settings(judge="http://127.0.0.1:9/v1"))
    (tmp_path / "judge.txt").write_text("Which is better? {first} {second}")
    with pytest.raises(UserError, match=r"judge.txt: \{prompt\} is missing in it"):
        judge_of(settings(judge="http://127.0.0.1:9/v1", judge_model="m", judge_prompt=str(tmp_path / "judge.txt")))
    with pytest.raises(UserError, match="compares two answers, for --against"):
        judge_of(settings(judge="http://127.0.0.1:9/v1", judge_model="m"))([Question("q:1", "?", ("a", "b", "c"), {})])
    with pytest.raises(UserError, match=r"q.jsonl:1: no 'answer' to check completions by \(columns: prompt\)"):
        judge_of(settings(judge="number"))(asked(("a", "b")))


# ---- A run against its base


def questions(folder: Path) -> Path:
    lines = (ROOT / "configs/quickstart/answers.jsonl").read_text().splitlines(keepends=True)
    (folder / "questions.jsonl").write_text("".join(lines[:PROMPTS]))
    return folder / "questions.jsonl"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the quickstart's model, `tiny`, and `questions.jsonl`."""
    folder = tmp_path_factory.mktemp("win_rate")
    served.finished_run(folder)
    questions(folder)
    return folder


def words(folder: Path, out: Path, against: str, *more: str) -> list[str]:
    data = ["--run", str(folder / "tiny"), "--data", str(folder / "questions.jsonl")]
    return [*data, "--against", against, "--out", str(out), *WORDS, *more]


@pytest.mark.long
def test_a_run_against_its_base_by_the_numbers_in_its_answers(folder, tmp_path, capsys) -> None:
    out = tmp_path / "out.jsonl"
    assert evaluate.main(words(folder, out, "base", "evaluate.judge=number")) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = lines_of(out)
    assert len(lines) == PROMPTS == told["prompts"] == told["wins"] + told["losses"] + told["ties"]
    assert any(line["answer"] != line["against"] for line in lines), "the adapter has to be heard"
    records = lines_of(folder / "questions.jsonl")
    for record, line in zip(records, lines, strict=True):
        right = [float(judges.same_number(line[name], str(record["answer"]))) for name in ("answer", "against")]
        assert (line["prompt"], line["scores"], line["swapped_scores"]) == (record["prompt"], right, None)
    assert told["order_decided"] is None and told["unclear"] == 0
    assert told["win_rate"] == (told["wins"] + told["ties"] / 2) / PROMPTS
    assert told["interval"] == list(win_rate.wilson(told["win_rate"], PROMPTS))
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.mpi(min_size=2, max_size=2)
def test_two_ranks_give_the_lines_of_one(world, tmp_path) -> None:
    folder = Path(world.broadcast_text(str(tmp_path)))
    evaluation = {"judge": "number", "batch_size": 4, "max_tokens": 12}
    data = {"train": "-", "cache_dir": str(folder)}
    own = Config.model_validate({"model": {"path": str(MODEL)}, "data": data, "evaluate": evaluation})
    other = own.model_copy(update={"model": own.model.model_copy(update={"random_init": True})})
    if world.rank == 0:
        questions(folder)
    world.gather_text("written")
    silent = Terminal(silent=world.rank != 0)
    records = score_file.evaluation_records(str(folder / "questions.jsonl"), own, "prompt", silent)
    first, second = (StoredModel(each, None) for each in (own, other))
    if world.rank == 0:
        alone = win_rate.compare(first, second, records, folder / "one.jsonl", world.alone())
    together = win_rate.compare(first, second, records, folder / "two.jsonl", world)
    assert (together is None) == (world.rank > 0)
    if world.rank == 0:
        assert together == alone and (folder / "one.jsonl").read_text() == (folder / "two.jsonl").read_text()
        assert any(line["answer"] != line["against"] for line in lines_of(folder / "two.jsonl"))


def test_against_itself_all_is_even_and_no_model_is_asked(folder, tmp_path, capsys) -> None:
    out, judge = tmp_path / "out.jsonl", ["evaluate.judge=http://127.0.0.1:9/v1", "evaluate.judge_model=m"]
    assert evaluate.main(words(folder, out, str(folder / "tiny"), *judge)) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["ties"], told["win_rate"]) == (PROMPTS, 0.5)
    assert {line["verdict"] for line in lines_of(out)} == {"tie"}


def test_what_is_finished_is_kept_and_no_judge_is_asked_twice(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "frail_judge.py").write_text(
        "import pathlib\n"
        "asked = pathlib.Path(__file__).with_name('asked')\n"
        "def judge(prompt, completions, record):\n"
        "    with asked.open('a') as file:\n"
        "        file.write('.')\n"
        "    if asked.stat().st_size == 9:\n"
        "        raise RuntimeError('no more money')\n"
        "    return [1, 0]\n"  # always the first
    )
    out = tmp_path / "out.jsonl"
    command = words(folder, out, str(folder / "model"), "evaluate.judge=frail_judge:judge")
    assert evaluate.main([*command[:-1], "evaluate.judge=frail_judge:absent"]) == 2
    assert not list(tmp_path.glob("out.jsonl*")), "a judge that is not there is reported before anything is answered"
    assert evaluate.main([*command[:-1], f"evaluate.judge={shlex.quote(sys.executable)} -c 1"]) == 2
    assert "wrote 0 lines for" in capsys.readouterr().err
    monkeypatch.setattr("lib.evaluate.score_file.StoredModel.load", None)  # another judge needs no new answers
    assert evaluate.main(command) == 2
    assert "RuntimeError: no more money" in capsys.readouterr().err
    before = len((tmp_path / "asked").read_text())
    assert evaluate.main(command) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    differ = sum(line["answer"] != line["against"] for line in lines_of(out))
    # A chunk is asked in both orders; of those before the failure none is asked again.
    count = len((tmp_path / "asked").read_text())
    assert count - before < 2 * differ <= count
    assert told["order_decided"] == differ and told["ties"] == PROMPTS and told["win_rate"] == 0.5
