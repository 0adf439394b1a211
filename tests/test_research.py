"""What was tried on CUB: every run has a line, every line a candidate; the docs' tables and plots come from them."""

import argparse
import importlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pfml.methods import METHODS, LossConfig, create_loss
from pfml.models import EmbedderConfig
from pfml.runs.config import BatchConfig, DataConfig, RunConfig
from pfml.runs.recipes import published_recipe
from small_data import few_glyphs

ROOT = Path(__file__).parents[1]
STORED = {stage: ROOT / "results" / f"cub-{stage}.jsonl" for stage in ("validation", "test")}


@pytest.fixture(scope="module")
def research():
    """The scripts as modules; `trial` adds a method to the table, which is taken off again."""
    before = dict(METHODS)
    sys.path.insert(0, str(ROOT / "research"))
    names = ("trial", "candidates", "tables", "plots", "choose", "cub", "transfer", "folders")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(ROOT / "research"))
        METHODS.clear()
        METHODS.update(before)
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def lines():
    return {stage: [json.loads(line) for line in path.read_text().splitlines()] for stage, path in STORED.items()}


def test_every_candidate_can_be_trained_unless_its_lines_say_why_not(research, lines):
    refused = {line["candidate"] for line in lines["validation"] if "beyond float32" in str(line["error"])}
    for name in research["candidates"].CANDIDATES:
        config = research["candidates"].candidate_config(name)
        try:
            create_loss(config.loss, 5, 8, 2048)
        except ValueError as error:
            assert "beyond float32" in str(error)
            assert name in refused


def test_every_line_is_a_run_of_a_candidate(research, lines):
    for stage, stored in lines.items():
        for line in stored:
            assert line["stage"] == stage
            assert line["candidate"] in research["candidates"].CANDIDATES
            assert line["commit"] != "unknown"
            assert line["device"]
            if line["status"] == "done":
                assert line["history"][-1]["epoch"] == line["epochs"], "the last epoch is evaluated"
            else:
                assert line["error"]


def test_other_methods_are_run_by_the_recipes_that_the_package_ships(research):
    candidates = research["candidates"]
    for method in candidates.AS_PUBLISHED:
        config = candidates.candidate_config(f"q {method}")
        recipe = published_recipe(method, "cub", "resnet50_he").recipe
        assert config.loss.name == method
        assert config.optimizer.lr == recipe.lr
        assert config.epochs == recipe.epochs or recipe.epochs is None
        assert config.batch.size == recipe.batch_size
        assert config.head_start == recipe.head_start
        assert config.average == 0.0


def test_runs_that_are_done_are_left_out(research, lines):
    done = research["cub"].already_done("test", [STORED["test"], STORED["validation"], ROOT / "no such file"])
    assert done == {(line["candidate"], line["seed"], line["noise"]) for line in lines["test"]}


@pytest.mark.slow
def test_a_run_whose_time_is_up_is_resumed_by_the_same_command(research, monkeypatch, tmp_path, capsys):
    """DiVA, whose queue and momentum network belong to its state."""
    cub = research["cub"]
    config = RunConfig(
        data=DataConfig("glyphs"),
        model=EmbedderConfig("convnet", weights="none", embedding_dim=16, image_size=16, parts=4),
        loss=LossConfig("diva", {"queue_size": 64}),
        batch=BatchConfig(32, 4),
        epochs=3,
    )
    monkeypatch.setattr(cub, "candidate_config", lambda name: config)
    monkeypatch.setattr(cub, "extras_of", lambda name: {})
    monkeypatch.setattr(cub, "data_of", lambda *_: few_glyphs())

    def command(*more):
        argv = ["--stage=test", "--names=q diva", "--root=.", "--weights=none", "--device=cpu", "--workers=0"]
        argv += ["--evaluate-every=1", f"--out={tmp_path / 'lines.jsonl'}", *more]
        monkeypatch.setattr(sys, "argv", ["cub.py", *argv])
        cub.main()
        file = tmp_path / "lines.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    (whole,) = command()
    (tmp_path / "lines.jsonl").unlink()
    limited = [f"--keep={tmp_path / 'kept'}", f"--done={tmp_path / 'lines.jsonl'}", "--seconds"]
    for epoch in (1, 2):
        answers = iter([False, True])  # when the run starts, and after its first epoch
        with monkeypatch.context() as patch:
            patch.setattr(cub, "is_late", lambda deadline, answers=answers: next(answers))
            assert command(*limited, "1000") == []
        assert f"q diva: stopped after epoch {epoch} of 3; the same command resumes it" in capsys.readouterr().out
    assert command(*limited, "-1") == []  # no time at all
    assert "no time for q diva" in capsys.readouterr().out
    (line,) = command(*limited, "1000")
    assert line["seconds_from_epoch"] == 2
    assert not list((tmp_path / "kept").iterdir())

    def curve(line):
        return [(one["epoch"], one["loss"], one["test"]["recall_at_1"]) for one in line["history"]]

    assert curve(line) == curve(whole)
    assert len(command(*limited, "1000")) == 1
    with pytest.raises(SystemExit):
        command("--seconds=5")
    assert "--seconds needs --keep FOLDER" in capsys.readouterr().err


def test_no_test_run_was_made_twice(lines):
    made = [(line["candidate"], line["seed"], line["noise"]) for line in lines["test"]]
    assert len(set(made)) == len(made)


def test_the_tables_have_the_numbers_of_the_documentation(research, lines):
    three = [line for line in lines["test"] if line["seed"] in research["plots"].SEEDS]
    rows = {row[1:3]: row for row in research["tables"].rows_of(three)}
    text = (ROOT / "docs" / "REPRODUCTION.md").read_text(encoding="utf-8")
    for (noise, name), row in rows.items():
        if name.startswith(("f ", "g ")):
            runs, recall, precision = row[3:6]
            assert runs == "3", (name, noise)
            shown = any(recall in line and precision in line for line in text.splitlines() if line.startswith("|"))
            assert shown, f"{name} at {noise}: R@1 {recall}, MAP@R {precision} are not in docs/REPRODUCTION.md"


def test_the_tables_of_folders_have_the_numbers_of_the_documentation(research):
    printed = research["folders"].table(ROOT / "results" / "folders.jsonl")
    finer, held_out = (section.splitlines() for section in printed.split("\n\n")[1:4:2])
    assert len(finer) == len(held_out) == 2 + 2 * 7
    shown = (ROOT / "docs" / "FOLDERS.md").read_text(encoding="utf-8").splitlines()
    assert not {*finer, *(row for row in held_out if "**all**" in row)} - {*shown}


def test_the_recipe_is_what_validation_chose(research, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["choose.py", str(STORED["validation"]), "--among", "7 log"])
    research["choose"].main()
    assert capsys.readouterr().out.strip() == "7 log, trust .3, samples 1"
    monkeypatch.setattr(sys, "argv", ["choose.py", str(STORED["validation"]), "--among", "8 recipe, average"])
    research["choose"].main()
    assert capsys.readouterr().out.strip() == "8 recipe, average 0.99"


@pytest.mark.slow
def test_the_plots_are_written(research, monkeypatch, tmp_path):
    files = (STORED["test"], STORED["validation"], ROOT / "results" / "transfer-validation.jsonl")
    monkeypatch.setattr(sys, "argv", ["plots.py", *map(str, files), "--out", str(tmp_path)])
    research["plots"].main()
    assert {path.name for path in tmp_path.iterdir()} == {
        "cub-test.png", "cub-eq6.png", "cub-paper.png", "cub-ablation.png", "cub-students.png",
    }  # fmt: skip


def test_every_line_of_students_is_one_of_the_tried_and_the_documentation_has_its_numbers(research):
    transfer = research["transfer"]
    path = ROOT / "results" / "transfer-validation.jsonl"
    for text in (text for each in path.parent.glob("transfer-*.jsonl") for text in each.read_text().splitlines()):
        line = json.loads(text)
        assert line["commit"] != "unknown"
        known = {"student": transfer.STUDENTS, "ensemble": transfer.ENSEMBLES}.get(line["kind"])
        assert known is None or line["candidate"] in known
    for spec in transfer.STUDENTS.values():
        config = transfer.student_config(spec, "cub")
        create_loss(config.loss, 5, 8)
        assert set(config.teachers) == set(spec.teachers)
    table = transfer.table(path)
    assert "| student 1 rc | 0 % | 2 | 81.8 | 45.0 |" in table
    documentation = (ROOT / "docs" / "VARIANTS.md").read_text(encoding="utf-8")
    assert "| **student of these four, 30 epochs** | 2 | **81.8** | **45.0** |" in documentation
    assert (
        "| **student of two recipes and two Proxy Anchors with filtering** | 1 | **81.6** | **44.7** |" in documentation
    )
    assert "| student 1 rc, robust | 20 % | 1 | 81.6 | 44.7 |" in table


# research/transfer.py on a few glyphs


@pytest.fixture
def bench(research, tmp_path, monkeypatch, one_thread):
    """Runs tasks of a few glyphs: 8 classes in batches of 32, two epochs, in this process."""
    transfer = research["transfer"]
    monkeypatch.setattr(transfer, "data_of", lambda config, stage: few_glyphs())
    shipped = transfer.shipped_config("glyphs")
    small = replace(
        shipped,
        model=replace(shipped.model, embedding_dim=8, image_size=16),
        batch=replace(shipped.batch, size=32),
        augmentation=replace(shipped.augmentation, random_crop=True, scale=(0.5, 1.0)),
        deterministic=True,
    )
    monkeypatch.setattr(transfer, "shipped_config", lambda name: small)
    monkeypatch.setattr(transfer, "TOGETHER", 3)

    def run(*tasks, views=(), epochs=2):
        options = argparse.Namespace(
            stage="validation", data="glyphs", epochs=epochs, evaluate_every=1, root=None, weights=None, cache=None,
            models=str(tmp_path), keep=True, workers=0, threads=1, device="cpu", jobs=1, compile=False,
            save_every=1e9, out=[tmp_path / "new.jsonl", tmp_path / "again.jsonl"], done=[], commit="abc",
            begun=time.time(), deadline=time.time() + 600, tasks=tasks, views=views,
        )  # fmt: skip
        for path in options.out:
            path.touch()
        todo = queue.Queue()
        for task in [*transfer.to_do(list(tasks), transfer.already_done(*options.out), options.stage), None]:
            todo.put(task)
        transfer.work(todo, options)
        lines = [json.loads(text) for text in options.out[0].read_text().splitlines()]
        assert options.out[1].read_text() == options.out[0].read_text()
        return lines

    run.transfer, run.folder = transfer, tmp_path
    return run


def curves(lines):
    return {line["candidate"]: [epoch["loss"] for epoch in line["history"]] for line in lines}


@pytest.mark.slow
def test_answers_that_were_written_are_those_of_teachers_that_are_asked(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    student = transfer.Task("students", (name,), 0, 0.0)
    asked = curves(bench(two, student))
    for file in (*bench.folder.glob("*.jsonl"), *bench.folder.glob("*.answers")):
        file.unlink()
    shutil.rmtree(next(bench.folder.glob("*s:*")))
    written = curves(bench(two, transfer.Task("answers", (name, *two.names), 0, 0.0), student))
    assert len(list(bench.folder.glob("*.answers"))) == 2
    assert written[name] == pytest.approx(asked[name], rel=1e-5)


@pytest.mark.slow
def test_a_student_may_follow_its_teachers_in_fewer_dimensions(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    plain = transfer.STUDENTS[name]
    several = {f"{dims} of teachers": replace(plain, reduced=dims) for dims in (1, 15)}
    transfer.STUDENTS.update(several)
    try:
        two = transfer.Task("teachers", plain.teachers, 0, 0.0)
        lines = bench(two, *(transfer.Task("students", (each,), 0, 0.0) for each in (name, *several)))
    finally:
        for each in several:
            del transfer.STUDENTS[each]
    whole, one, most = curves(lines[2:]).values()
    assert [line["spec"]["reduced"] for line in lines[2:]] == [0, 1, 15]
    assert whole == pytest.approx(most, rel=1e-2)
    assert whole != pytest.approx(one, rel=1e-2)


@pytest.mark.slow
def test_a_student_is_also_tested_on_larger_images_and_their_mirror_images(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    *teachers, line = bench(two, transfer.Task("students", (name,), 0, 0.0), views=(16, 20))
    assert not any("views" in each for each in teachers)
    assert list(line["views"]) == ["16", "16, flip test", "20", "20, flip test"]
    recalls, last = [each["map_at_r"] for each in line["views"].values()], line["history"][-1]["test"]
    assert recalls[0] == last["map_at_r"]
    assert len(set(recalls)) == 4
    assert f"| student {name}, seen at 20, flip test | 0 % | 1 |" in transfer.table(bench.folder / "new.jsonl")


@pytest.mark.slow
def test_what_has_a_line_is_not_made_again_and_lost_weights_are(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    assert len(bench(two)) == 2
    for folder in bench.folder.glob("validation-0-*"):
        shutil.rmtree(folder)
    assert len(bench(two)) == 2, "a teacher that nobody needs is left alone"
    assert not list(bench.folder.glob("validation-0-*"))
    student = transfer.Task("students", (name,), 0, 0.0)
    lines = bench(two, student)
    assert [line["candidate"] for line in lines] == ["teacher pa", "teacher recipe", name]
    assert len(list(bench.folder.glob("validation-0-*"))) == 3
    assert len(bench(two, student)) == 3


@pytest.mark.slow
def test_what_ends_before_its_line_is_made_again(bench, monkeypatch):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    student = transfer.Task("students", (name,), 0, 0.0)

    def fails(*_):
        raise RuntimeError("no memory is left")

    for task, lines in ((two, 2), (student, 3)):
        with monkeypatch.context() as patch:
            patch.setattr(transfer, "header", fails)
            before = len(bench(task))
        for failed in bench.folder.glob("*.failed"):
            failed.unlink()  # as a new call does
        assert len(bench(task)) == lines > before


@pytest.mark.slow
def test_written_answers_that_end_too_early_are_not_used(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    student = transfer.Task("students", (name,), 0, 0.0)
    bench(two, transfer.Task("answers", (name, *two.names), 0, 0.0), student)
    assert list(bench.folder.glob("*.answers"))
    for file in bench.folder.glob("*.jsonl"):
        file.unlink()
    shutil.rmtree(next(bench.folder.glob("*s:*")))
    (line,) = bench(student, epochs=3)
    assert (line["candidate"], len(line["history"])) == (name, 3)


def test_rounds_with_the_same_tasks_make_them_once(research):
    transfer = research["transfer"]
    name = "1 rc, 2 teachers"
    two = transfer.STUDENTS[name].teachers
    tasks = [
        transfer.Task("teachers", two, 0, 0.0),
        transfer.Task("answers", (name, *two), 0, 0.0),
        transfer.Task("students", (name,), 0, 0.0),
    ]
    assert transfer.to_do([*tasks, *tasks], set(), "validation") == tasks
    again = replace(tasks[2], seed=1)
    assert transfer.to_do([*tasks, again], set(), "validation") == [*tasks, again]
    assert transfer.to_do([tasks[0], replace(tasks[0], names=("pa-9", *two))], set(), "validation") == [
        tasks[0],
        transfer.Task("teachers", ("pa-9",), 0, 0.0),
    ]


def test_the_drivers_refuse_what_would_fail_later(research, monkeypatch, tmp_path, capsys):
    def said(program, *argv):
        monkeypatch.setattr(sys, "argv", ["program", *argv])
        with pytest.raises(SystemExit):
            research[program].main()
        return capsys.readouterr().err

    there = ["--root", str(tmp_path), "--weights", "none"]
    out = ["--out", str(tmp_path / "lines.jsonl")]
    assert "students are teachers and judges only with --keep" in said("transfer", "--rounds", "10", *there, *out)
    assert "there is no no-weights" in said(
        "transfer", "--rounds", "1", "--root", str(tmp_path), "--weights", "no-weights", *out
    )
    assert "there is no lite2.safetensors" in said("transfer", "--rounds", "8", *there, *out, "--keep")
    assert "there is no no-folder" in said("cub", "--names", "g pa", "--root", "no-folder", "--weights", "none", *out)
    (name, *_) = (name for name in research["cub"].CANDIDATES if "anchor" in research["cub"].extras_of(name))
    limited = ["--seconds", "9", "--keep", str(tmp_path / "kept")]
    assert "--seconds cannot stop" in said("cub", "--names", name, *there, *out, *limited)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_student_whose_time_is_up_continues_where_it_was(bench):
    transfer, name = bench.transfer, "1 rc, 2 teachers"
    two = transfer.Task("teachers", transfer.STUDENTS[name].teachers, 0, 0.0)
    student = transfer.Task("students", (name,), 0, 0.0)
    whole = curves(bench(two, student))
    for file in bench.folder.glob("*.jsonl"):
        file.unlink()
    shutil.rmtree(next(bench.folder.glob("*s:*")))
    calls = iter([False, False, *[True] * 9])  # neither the task nor the student is late, but the first epoch's end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "start_over_time", lambda bench: next(calls))
        assert name not in curves(bench(student))
    (stopped,) = bench.folder.glob("*s:*.run")
    (line,) = (line for line in bench(student) if line["candidate"] == name)
    assert line["seconds_from_epoch"] == 1
    assert [epoch["loss"] for epoch in line["history"]] == whole[name]
    assert not stopped.exists()


@pytest.mark.slow
def test_teachers_correct_the_labels_of_others(bench, monkeypatch):
    transfer = bench.transfer
    true = few_glyphs()
    wrong = true.train.labels.roll(1)  # of the first image of each class
    noisy = replace(true, train=true.train.with_labels(wrong))
    monkeypatch.setattr(transfer, "data_of", lambda config, stage: noisy if config.noise.rate else true)
    shown = []
    begin = transfer.Bench.begin

    def watched(bench, base, task, *args, **options):
        run = begin(bench, base, task, *args, **options)
        shown.append((task.names[0], run.data.train.labels))
        return run

    monkeypatch.setattr(transfer.Bench, "begin", watched)
    monkeypatch.setattr(
        transfer, "embed", lambda *args, **options: torch.nn.functional.one_hot(true.train.labels) + 0.0
    )
    first = transfer.Task("teachers", transfer.JUDGES, 0, 0.2)
    lines = bench(first, transfer.Task("teachers", ("c:pa-0",), 0, 0.2))
    assert all(torch.equal(labels, wrong) for name, labels in shown if not name.startswith("c:"))
    assert torch.equal(dict(shown)["c:pa-0"], true.train.labels)
    assert lines[-1]["right_labels"]["given"] < 1 == lines[-1]["right_labels"]["corrected"]
    assert transfer.to_do([first], transfer.already_done(bench.folder / "new.jsonl"), "validation") == []
    needy = transfer.Task("teachers", ("c:pa-1",), 0, 0.2)
    assert transfer.to_do([first, needy], transfer.already_done(bench.folder / "new.jsonl"), "validation")[0] == first


@pytest.mark.slow
def test_a_student_corrects_the_labels_of_new_teachers(bench, monkeypatch):
    transfer = bench.transfer
    true = few_glyphs()
    noisy = replace(true, train=true.train.with_labels(true.train.labels.roll(1)))
    monkeypatch.setattr(transfer, "data_of", lambda config, stage: noisy if config.noise.rate else true)
    judge = transfer.JUDGE["validation"]
    spec = replace(transfer.STUDENTS[judge], reduced=4, teachers=("recipe-0",))
    second = transfer.rc(("j:pa-0", "j:recipe-0"), reduced=4)
    monkeypatch.setattr(transfer, "STUDENTS", transfer.STUDENTS | {judge: spec, "second": second})
    said = transfer.embed

    def embed(embedder, source, **options):  # a judge that knows
        points = said(embedder, source, **options)
        if embedder is not known.get("judge"):
            return points
        generator = torch.Generator().manual_seed(0)
        return torch.nn.functional.one_hot(true.train.labels) + 0.05 * torch.randn(128, 8, generator=generator)

    known = {}
    read = transfer.Bench.teacher

    def teacher(bench, name):
        embedder = read(bench, name)
        if name == f"s:{judge}-0":
            known["judge"] = embedder
        return embedder

    monkeypatch.setattr(transfer, "embed", embed)
    monkeypatch.setattr(transfer.Bench, "teacher", teacher)
    tasks = [
        transfer.Task("teachers", spec.teachers, 0, 0.2),
        transfer.Task("students", (judge,), 0, 0.2),
        transfer.Task("teachers", second.teachers, 0, 0.2),
        transfer.Task("students", ("second",), 0, 0.2),
    ]
    lines = {line["candidate"]: line for line in bench(*tasks)}
    right = lines["teacher j:pa"]["right_labels"]
    assert right == {"given": pytest.approx(0.9375), "corrected": 1.0}
    asked = curves(lines.values())["second"]
    (bench.folder / "new.jsonl").unlink()
    (bench.folder / "again.jsonl").unlink()
    shutil.rmtree(next(bench.folder.glob("*s:second*")))
    answers = transfer.Task("answers", ("second", *second.teachers), 0, 0.2)
    written = curves(bench(*tasks[:3], answers, tasks[3]))["second"]
    assert len(list(bench.folder.glob("*.answers"))) == 2
    assert written == pytest.approx(asked, rel=1e-4)
    assert transfer.of_students(tasks[2:3], "test") == list(second.teachers)


DEAF = """
import argparse, signal, time
from cub import divide

def deaf(queue, options):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(100)

if __name__ == "__main__":
    divide(range(20_000), deaf, argparse.Namespace(jobs=2))  # more than a pipe holds
"""


@pytest.mark.slow
def test_the_processes_of_a_driver_end_with_it(tmp_path):
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "research")}
    driver = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    for _ in range(2):
        driver.stdout.readline()
    driver.terminate()
    assert driver.wait(20) == 128 + signal.SIGTERM
    assert driver.stdout.read() == "", "the pipe ends when the last process does"


def test_a_test_has_teachers_of_its_own_for_each_seed(research):
    transfer = research["transfer"]
    for title, tasks in transfer.rounds().items():
        if not title.startswith("3 "):
            continue
        taught = {(name, task.noise) for task in tasks if task.kind == "teachers" for name in task.names}
        asked = [
            {
                (name, task.noise)
                for task in tasks
                if (task.kind, task.seed) == ("students", seed)
                for student in task.names
                for name in transfer.drawn(transfer.STUDENTS[student].teachers, seed)
            }
            for seed in range(3)
        ]
        assert set.union(*asked) <= taught
        assert sum(map(len, asked)) == len(set.union(*asked))


def test_every_task_has_an_estimate_and_every_teacher_a_configuration(research):
    transfer = research["transfer"]
    for tasks in transfer.rounds().values():
        for task in tasks:
            assert 0 < transfer.estimate(task, "test") < 1_500
            for name in task.names if task.kind == "teachers" else ():
                transfer.teacher_config(name.rsplit("-", 1)[0], "cub")
        assert "of an otherwise idle H200" in transfer.estimates(tasks, "validation")
