"""Guesses before results: `ask`, `result`, the file of answers, and the tables of progress."""

from __future__ import annotations

import json

import pytest

from ddp_notebook import lessons
from ddp_notebook.errors import UsageError
from ddp_notebook.lessons.questions import answers_file, guesses
from ddp_notebook.lessons.questions.ask_box import AskBox
from ddp_notebook.lessons.questions.catalogue import QUESTIONS, names
from ddp_notebook.lessons.questions.judging import Question
from tests.kernels import NotebookKernel

FIRST = Question(
    answer=0,
    why="rank 0 is first.",
    hint="Count from 0.",
    traps={1: "Rank 1 is second."},
    choices={"rank 0": 0, "rank 1": 1},
)
SIZES = Question(answer=[700, 14], why="of the ring.", hint="Count again.", placeholder="[0, 0]")
KINDS = Question(answer={"a": True, "b": False}, why="yes.", hint="no.", choices={"yes": True, "no": False})


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Keep answers in a file of this test. Return its path."""
    path = tmp_path / "answers.json"
    monkeypatch.setenv("DDP_NOTEBOOK_ANSWERS", str(path))
    for name, question in {"99/first": FIRST, "99/sizes": SIZES, "99/kinds": KINDS}.items():
        monkeypatch.setitem(QUESTIONS, name, question)
    monkeypatch.setitem(QUESTIONS, "99/exercise", Question(answer=3, why="1 + 2", hint="add"))
    answers_file.answers_file.cache_clear()
    yield path
    answers_file.answers_file.cache_clear()


def status(name: str) -> str:
    return answers_file.answers_file().of(name).status


# ---- texts, without a front end


def test_a_question_is_a_text_without_a_front_end(kept, capsys):
    lessons.ask("99/first")
    assert capsys.readouterr().out.splitlines() == [
        "One of:",
        "  rank 0",
        "  rank 1",
        "Guess:       lessons.ask('99/first', 'rank 0')",
        "Or give up:  lessons.ask('99/first', 'show me')",
    ]
    lessons.ask("99/kinds")
    assert "for each of:\n  a\n  b\nGuess:       lessons.ask('99/kinds', {'a': 'yes', ...})" in capsys.readouterr().out
    lessons.ask("99/sizes")
    assert capsys.readouterr().out.startswith("Guess:       lessons.ask('99/sizes', [0, 0])\n")
    assert not kept.exists(), "a question alone keeps nothing"


def test_a_result_is_hidden_until_a_guess(kept, capsys):
    drawn = []
    lessons.result("99/first", "it is 0", lambda: drawn.append(1))
    assert capsys.readouterr().out == "Guess first, in the cell above, or press 'Show me' there.\n" and not drawn

    lessons.ask("99/first", "Rank 1 ")
    assert capsys.readouterr().out == "Your guess is kept: rank 1. lessons.result shows the result.\n"
    lessons.result("99/first", "it is 0", lambda: drawn.append(1))
    verdict = "\N{BALLOT X} not right: rank 1. Rank 1 is second. Count from 0. The answer is rank 0: rank 0 is first."
    assert capsys.readouterr().out == f"it is 0\n{verdict}\n"
    assert drawn == [1]

    lessons.ask("99/first", 0)
    lessons.result("99/first")
    assert capsys.readouterr().out.endswith("\N{CHECK MARK} right: rank 0. Rank 0 is first.\n")
    lessons.ask("99/first")
    assert capsys.readouterr().out.endswith("Your first guess: rank 1.\n")


@pytest.mark.parametrize(
    ("why", "shown"),
    [("each rank has one.", "Each rank"), ("all_reduce adds.", "all_reduce"), ("gloo sends.", "gloo")],
)
def test_names_of_code_keep_their_small_letter(kept, capsys, monkeypatch, why, shown):
    monkeypatch.setitem(QUESTIONS, "99/first", Question(answer=1, why=why, hint="", placeholder="0"))
    lessons.ask("99/first", 1)
    lessons.result("99/first")
    assert f"right: 1. {shown} " in capsys.readouterr().out


def test_a_result_may_be_requested(kept, capsys):
    lessons.ask("99/sizes", "Show me")
    lessons.result("99/sizes", "numbers")
    assert capsys.readouterr().out.endswith("numbers\nThe answer is [700, 14]: of the ring.\n")
    lessons.ask("99/sizes", [700, 14])
    assert status("99/sizes") == "shown", "a right guess afterwards proves nothing"


def test_shown_displays_everything_and_writes_nothing(kept, monkeypatch, capsys):
    monkeypatch.setenv("DDP_NOTEBOOK_ANSWERS", "shown")
    monkeypatch.chdir(kept.parent)
    answers_file.answers_file.cache_clear()
    lessons.result("99/first", "it is 0")
    assert capsys.readouterr().out == "it is 0\nThe answer is rank 0: rank 0 is first.\n"
    lessons.ask("99/first", "rank 0")
    lessons.result("99/first")
    assert "\N{CHECK MARK} right" in capsys.readouterr().out
    assert list(kept.parent.iterdir()) == []


def test_answers_that_are_no_answers_are_not_kept(kept):
    for name, answer, message in (
        ("99/first", "rank 7", "the answer must be one of 'rank 0', 'rank 1', got 'rank 7'"),
        ("99/kinds", {"a": "yes"}, "give an answer for each of a, b; missing: b"),
        ("99/kinds", "yes", "give an answer for each of a, b; missing: a"),
        ("99/sizes", [..., 14], "put your answer in place of the dots"),
        ("99/exercise", 3, r"'99/exercise' is an exercise: check your result with lessons.check\('99/exercise', ...\)"),
        ("99/other", 3, "unknown question '99/other'; there are 99/exercise, 99/first, 99/kinds, 99/sizes"),
    ):
        with pytest.raises(UsageError, match=f"^{message}$"):
            lessons.ask(name, answer)
    with pytest.raises(UsageError, match=r"^unknown question '99/other'"):
        lessons.result("99/other")
    assert not kept.exists()


# ---- the file


def test_guesses_are_appended(kept, capsys):
    lessons.ask("99/kinds", {"a": "no", "b": "no"})
    lessons.ask("99/kinds", {"a": True, "b": False})
    lessons.ask("99/sizes", [700, 14])
    assert not lessons.check("99/exercise", ...) and status("99/exercise") == "open"
    assert not lessons.check("99/exercise", 2, keep=False) and status("99/exercise") == "open"
    assert not lessons.check("99/exercise", 2) and lessons.check("99/exercise", 3)

    of_kinds = json.loads(kept.read_text())["answers"]["99/kinds"]
    assert [guess["answer"] for guess in of_kinds["guesses"]] == ["a: no, b: no", "a: yes, b: no"]
    assert [guess["is_right"] for guess in of_kinds["guesses"]] == [False, True]
    assert of_kinds["guesses"][0]["reason"] == "look at a. no." and not of_kinds["is_shown"]
    assert [status(f"99/{one}") for one in ("kinds", "sizes", "exercise", "first")] == [
        "later",
        "first try",
        "later",
        "open",
    ]
    assert [one.name for one in kept.parent.iterdir()] == ["answers.json"], "no temporary file is left"


def test_a_file_that_is_something_else_is_reported(kept):
    kept.write_text('{"cells": []}')
    with pytest.raises(UsageError, match=r"answers.json is not a file of answers \(KeyError: 'answers'\); delete it"):
        lessons.ask("99/first")


def test_progress_counts_and_forget_deletes(kept, capsys):
    lessons.ask("99/first", "rank 0")
    lessons.ask("99/kinds", {"a": "no", "b": "no"})
    lessons.ask("99/sizes", "show me")
    table = lessons.progress()
    heads, *_, of_99, total = repr(table).splitlines()
    assert heads.split("  ")[0] == "lesson" and of_99.split() == ["99", "1", "0", "1", "1", "1"]
    assert total.split() == ["all", "1", "0", "1", "1", str(len(names()) - 3)]
    assert "<td>99</td><td>1</td><td>0</td><td>1</td><td>1</td><td>1</td>" in table._repr_html_()

    lessons.forget("99/first")
    assert status("99/first") == "open" and status("99/sizes") == "shown"
    lessons.forget("99")
    assert status("99/sizes") == "open"
    assert capsys.readouterr().out.endswith("1 answer deleted.\n2 answers deleted.\n")
    with pytest.raises(UsageError, match=r"lesson must be one of 0.*, 99 or the name of a question, got '98'"):
        lessons.forget("98")


def test_a_teacher_collects_files(kept, capsys):
    lessons.ask("99/first", "rank 1")
    kept.rename(kept.with_name("ann.json"))
    lessons.ask("99/first", "rank 1")
    lessons.ask("99/first", "rank 0")
    lessons.ask("99/sizes", [1, 1])
    kept.rename(kept.with_name("bo.json"))

    table = lessons.collect(str(kept.parent / "*.json"))
    assert [(row[0], *row[1:5]) for row in table.rows] == [("ann", 0, 0, 1, 0), ("bo", 0, 1, 1, 0)]
    assert table.notes == (
        "Most often wrong:",
        "  99/first: 2 of 2 wrong at first try; most often 2 x rank 1",
        "  99/sizes: 1 of 1 wrong at first try; most often 1 x [1, 1]",
    )
    of_lesson = lessons.collect(str(kept.parent / "*.json"), "99")
    assert of_lesson.rows == (("ann", 0, 0, 1, 0, 3), ("bo", 0, 1, 1, 0, 2))
    assert of_lesson.notes[1:4] == (table.notes[1], "    ann: rank 1", "    bo: rank 1")
    assert lessons.collect(str(kept.parent / "*.json"), "01").notes == ()
    with pytest.raises(UsageError, match="lesson must be one of 01"):
        lessons.collect(str(kept.parent / "*.json"), "98")
    with pytest.raises(UsageError, match="no file matches"):
        lessons.collect(str(kept.parent / "class/*.json"))


# ---- the widget


def test_the_widget_keeps_a_choice(kept):
    box = AskBox("99/first", FIRST)
    box.guess.click()
    assert "put your answer" in box.said.value and not kept.exists()
    box.controls[None].value = "rank 1"
    box.guess.click()
    assert "Your guess is kept: rank 1." in box.said.value and status("99/first") == "wrong"
    box.show_me.click()
    assert status("99/first") == "shown"


def test_the_widget_reads_fields_and_parts(kept):
    box = AskBox("99/sizes", SIZES)
    for text, said in (
        ("", "write your answer"),
        ("seven", "is not a Python value"),
        ("open('x')", "is not a Python value"),
    ):
        box.controls[None].value = text
        box.guess.click()
        assert said in box.said.value and not kept.exists()
    box.controls[None].value = "[2 * 7 / 8 * 400, 2 * 7]"
    box.guess.click()
    assert status("99/sizes") == "first try"

    box = AskBox("99/kinds", KINDS)
    box.controls["a"].value = "yes"
    box.guess.click()
    assert "missing: b" in box.said.value
    box.controls["b"].value = "no"
    box.guess.click()
    assert status("99/kinds") == "first try"


@pytest.mark.processes
def test_a_guess_updates_a_displayed_result(tmp_path):
    """In a real kernel: the result was displayed first, and the button is pressed later."""
    with_file = {"DDP_NOTEBOOK_ANSWERS": str(tmp_path / "answers.json")}
    kernel = NotebookKernel(env=with_file)
    try:
        kernel.run("from ddp_notebook import lessons\nfrom ddp_notebook.lessons.questions import ask_box, catalogue")
        kernel.run("box = ask_box.AskBox('04/world-size', catalogue.QUESTIONS['04/world-size'])")
        assert "lessons.ask('04/world-size', 12)" in kernel.run("box.display()").displays[0]["text/plain"]
        before = kernel.run("lessons.result('04/world-size', 'twenty-four', lambda: print('drawn'))")
        assert before.stdout == "" and [one["text/plain"] for one in before.displays][1].startswith("Guess first")

        after = kernel.run("box.controls[None].value = '3 * 8'\nbox.guess.click()")
        assert after.stdout == "twenty-four\ndrawn\n"  # the front end puts it into the Output widget
        [update] = after.updates.values()
        assert update["text/plain"].startswith("\N{CHECK MARK} right: 24. ")
        again = kernel.run("box.controls[None].value = '8'\nbox.guess.click()")
        assert again.stdout == "" and "not right: 8." in next(iter(again.updates.values()))["text/plain"]
    finally:
        kernel.close()


# ---- all questions


def test_choices_contain_the_answer_and_placeholders_do_not(monkeypatch):
    from ddp_notebook.lessons.questions import judging

    for size in (2, 3, 4):
        monkeypatch.setattr(judging, "_world_size", lambda size=size: size)
        for name, question in QUESTIONS.items():
            right, choices = question.right(), list(question.labelled_choices().values())
            parts = list(right.values()) if isinstance(right, dict) else [right]
            if choices:
                assert len(choices) >= 2 and all(part in choices for part in parts), (name, size)
            elif question.placeholder:
                given = guesses.value_of(question.placeholder, parts[0])
                assert not all(judging._is_equal(given, part, 1e-5) for part in parts), (name, size)
