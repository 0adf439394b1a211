import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stdout
from io import StringIO
from unittest import mock

import numpy
import pytest
import yaml
from PIL import Image

from pfml.cli import main
from pfml.data.datasets import DATASETS
from small_data import few_glyphs

SMALL = ["--epochs=1", "--loss.options.proxies_per_class=2", "--device=cpu", "--evaluate_every=1"]


@pytest.fixture(scope="module", autouse=True)
def _few_glyphs():
    """`glyphs` made small, so that commands take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pfml.data.datasets.read_glyphs", few_glyphs)
        patch.setitem(DATASETS, "glyphs", lambda root: few_glyphs())
        yield


@pytest.fixture(scope="module")
def training(tmp_path_factory, _few_glyphs):
    """The folder of a run, and what its training printed; options stand before and after the configuration."""
    run = tmp_path_factory.mktemp("training") / "run"
    with redirect_stdout(StringIO()) as printed:
        main(["train", "--batch.size=32", *SMALL, f"--out={run}", "--config", "glyphs", "--seed=4"])
    return run, printed.getvalue()


@pytest.fixture
def trained(training, tmp_path):
    """A copy of the run, to write to."""
    return shutil.copytree(training[0], tmp_path / "run")


def failure(capsys, *arguments):
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    return (
        (exit_.value.code, capsys.readouterr().err.strip())
        if isinstance(exit_.value.code, int)
        else (1, exit_.value.code)
    )


def test_training_prints_the_numbers_that_it_writes(training):
    run, printed = training
    results = json.loads((run / "results.json").read_text())
    assert f"{100 * results['last']['test']['recall_at_1']:.1f}" in printed
    assert "best on test (chosen on what it reports), epoch 1" in printed
    assert f"{results['alignment']['paper']:.3f}" in printed


def test_options_override_the_configuration_wherever_it_stands(training):
    resolved = yaml.safe_load((training[0] / "config.yaml").read_text())
    assert (resolved["batch"]["size"], resolved["seed"], resolved["epochs"]) == (32, 4, 1)
    assert resolved["optimizer"]["name"] == "adamw"


@pytest.mark.parametrize("given", [["--loss.name=proxy-anchor"], ["--loss.name", "proxy-anchor"]])
def test_another_loss_does_not_inherit_the_options_of_the_configuration_s(capsys, given):
    main(["train", *given, "--config", "cub-resnet50-512", "--loss.options.margin=0.2", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["loss"] == {"name": "proxy-anchor", "options": {"margin": 0.2}}


def test_naming_the_configuration_s_own_loss_keeps_its_options(capsys):
    main(["train", "--config=cub-resnet50-512", "--loss.name=pfml", "--loss.options.delta=0.3", "--print_config"])
    options = yaml.safe_load(capsys.readouterr().out)["loss"]["options"]
    assert options == {"proxies_per_class": 15, "delta": 0.3, "alpha": 3.0}


def test_the_written_configuration_can_be_trained_again(trained, tmp_path):
    main(["train", f"--config={trained / 'config.yaml'}", f"--out={tmp_path / 'again'}"])
    results = [json.loads((folder / "results.json").read_text()) for folder in (trained, tmp_path / "again")]
    assert results[0]["last"]["test"] == results[1]["last"]["test"]


def test_without_out_runs_get_free_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pfml.cli.train._run", lambda config, out, *_: out.mkdir(parents=True))
    for _ in range(2):
        main(["train", "--config=glyphs", "--batch.size=32", *SMALL])
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["glyphs-pfml-1", "glyphs-pfml-2"]


def test_a_configuration_that_would_take_all_memory_is_refused_before_it_is_read(tmp_path, capsys):
    lines = [
        "a0: &a0 [x, x, x, x, x, x, x, x]",
        *(f"a{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 8)}]" for k in range(1, 12)),
    ]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as end:
        main(["train", f"--config={tmp_path / 'bomb.yaml'}", "--loss.name=pfml"])
    assert end.value.code == 2
    assert "bomb.yaml must be a configuration: line 2 has the alias *a0" in capsys.readouterr().err


def test_the_configuration_can_be_printed(capsys):
    main(["train", "--config=glyphs", "--epochs=3", "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out)["epochs"] == 3


def test_a_run_stopped_by_ctrl_c_says_how_to_resume_and_resumes(tmp_path, capsys, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("pfml.training.progress.ProgressMonitor.step", lambda *_: os.kill(os.getpid(), signal.SIGINT))
        code, _ = failure(capsys, "train", "--config=glyphs", "--batch.size=32", f"--out={run}", *SMALL)
    assert code == 130
    assert not (run / "results.json").exists()
    main(["train", f"--resume={run}"])
    assert json.loads((run / "results.json").read_text())["last"]["epoch"] == 1


def test_resume_takes_no_other_options(trained, capsys):
    _, message = failure(capsys, "train", f"--resume={trained}", "--epochs=9")
    assert "give --resume alone" in message


def test_evaluating_a_run_gives_the_numbers_of_its_last_epoch(trained, capsys):
    main(["evaluate", str(trained), "--nmi"])
    printed = capsys.readouterr().out
    results = json.loads((trained / "results.json").read_text())
    assert f"{100 * results['last']['test']['recall_at_1']:.1f}" in printed
    assert "NMI" in printed


def test_evaluate_verifies_pairs_expands_queries_and_re_ranks(trained, capsys):
    main(["evaluate", str(trained), "--verification", "--expand", "3", "--rerank"])
    printed = capsys.readouterr().out
    assert "EER" in printed
    assert "FNMR at FMR 0.01" in printed
    main(["evaluate", str(trained), "--verification", "--expand", "--rerank", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert set(answer["reranked"]) == {"expanded by 5", "re-ranked"}
    assert answer["reranked"]["re-ranked"]["num_queries"] == answer["metrics"]["num_queries"]
    assert 0 <= answer["verification"]["eer"]["value"] <= 1


def test_evaluate_plots_verification(trained, tmp_path, capsys):
    plot = tmp_path / "new folder" / "verification.png"
    main(["evaluate", str(trained), "--verification", "--plot", str(plot)])
    assert f"{plot}: FNMR over FMR" in capsys.readouterr().out
    with Image.open(plot) as image:
        assert image.format == "PNG"
        assert image.width == 2 * 620
    assert [each.name for each in plot.parent.iterdir()] == [plot.name]


def test_a_plot_that_cannot_be_made_is_refused_before_anything_is_embedded(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("pfml.evaluation.embed_test", None)
    assert "give --verification, too" in failure(capsys, "evaluate", str(trained), "--plot=a.png")[1]
    (tmp_path / "folder.png").mkdir()
    for name in ("a.jpg", str(tmp_path / "folder.png")):
        _, message = failure(capsys, "evaluate", str(trained), "--verification", f"--plot={name}")
        assert f"--plot must be a file that ends in .png, got {name}" in message


def test_a_model_inside_of_a_run_is_evaluated_on_the_run_s_data(trained, capsys):
    main(["evaluate", str(trained / "model")])
    assert "64 images of 4 unseen classes" in capsys.readouterr().out


def test_evaluating_on_classes_that_were_trained_on_is_refused(trained, tmp_path, capsys):
    for name in (*few_glyphs().train.class_names[:2], "new", "newer"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (32, 32)).save(tmp_path / "data" / name / f"{number}.png")
    (tmp_path / "data" / "new").rename(tmp_path / "data" / "A")
    (tmp_path / "data" / "newer").rename(tmp_path / "data" / "B")
    code, message = failure(capsys, "evaluate", str(trained), f"--data={tmp_path / 'data'}")
    assert code == 1
    assert "test classes must be unseen" in message


def test_images_are_embedded_to_an_archive(trained, tmp_path):
    (tmp_path / "images" / "deep").mkdir(parents=True)
    for number in range(3):
        Image.new("L", (40, 50), 80 * number).save(tmp_path / "images" / "deep" / f"{number}.png")
    Image.new("L", (40, 50)).save(tmp_path / "other.png")
    main(
        [
            "embed",
            str(trained),
            str(tmp_path / "images"),
            str(tmp_path / "other.png"),
            "--out",
            str(tmp_path / "out.npz"),
        ]
    )
    with numpy.load(tmp_path / "out.npz", allow_pickle=False) as archive:
        assert archive["embeddings"].shape == (4, 64)
        assert numpy.allclose(numpy.linalg.norm(archive["embeddings"], axis=1), 1, atol=1e-5)
        assert [path.rsplit("/", 1)[-1] for path in archive["paths"]] == ["0.png", "1.png", "2.png", "other.png"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--epohcs=3"], 2, "did you mean 'epochs'"),
        (["train", "--optimizer.l=3"], 2, "did you mean 'optimizer.lr'"),
        (["train", "--config=glyph"], 2, "did you mean 'glyphs'"),
        (["train", "--epochs=many"], 2, "epochs"),
        (["train", "--config=glyphs", "--epochs=0"], 1, "epochs must be >= 1, got 0"),
        (["train", "--config=glyphs", "--loss.name=pfm"], 1, "did you mean 'pfml'"),
        (["train", "--config=cub-resnet50-512"], 1, "cub must have a root"),
        (["train", "--resume=nowhere"], 1, "no such folder: nowhere"),
        (["train", "--final=nowhere"], 1, "no such folder: nowhere"),
        (["evaluate", "nowhere"], 1, "no such folder: nowhere"),
        (["audit", "nowhere"], 1, "no such folder: nowhere"),
        (["search", "rums/birds-1", "--id=1"], 1, "no such folder: rums/birds-1"),
        (["calibrate", "runs/birds1"], 1, "no such folder: runs/birds1; did you mean 'birds-1'?"),
        (["embed", "runs/birds-1", "nothing.png"], 1, "nothing.png"),
        (["embed", "runs/birds-1", "nothing.png", "--out=x.csv"], 1, "must end in .npz"),
        (["trian"], 2, "there is no command 'trian'; did you mean 'train'?"),
        (["train", "--data"], 2, "--data must be followed by a folder with a folder per class in it, a CSV"),
        (["train", "--data="], 2, "--data must be followed by"),
        (["tune", "--data", ""], 2, "pfml tune: error: --data must be followed by"),
        (["train", "--data", "--epochs=3"], 2, "--data must be followed by"),
        (["train", "--data.name="], 1, "got an empty name"),
        (["train", "--data", "phots/"], 1, "error: no such folder or file: phots/"),
        (["theory", "--trials=0"], 1, "trials"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_ends_with_one_sentence(arguments, code, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/birds-1").mkdir(parents=True)
    got, message = failure(capsys, *arguments)
    assert got == code
    assert words in message
    assert len(message.splitlines()) <= 4
    assert "Traceback" not in message


def test_a_missing_package_of_a_method_is_named_before_any_image_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytorch_metric_learning", None)
    monkeypatch.setattr("pfml.training.runner.prepare_data", mock.Mock(side_effect=AssertionError("images were read")))
    code, message = failure(capsys, "train", "--config=glyphs", "--loss.name=triplet", f"--out={tmp_path / 'run'}")
    assert code == 1
    assert "needs pytorch-metric-learning" in message
    assert not (tmp_path / "run").exists()


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_said(trained, capsys):
    with pytest.raises(SystemExit, match="already holds a run"):
        main(["train", "--config=glyphs", "--out", str(trained)])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["train", "tune"])
def test_help_says_what_data_takes(command, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "--data DATA The images: a folder with a folder per class in it, a CSV with the columns path and" in text


def test_every_field_of_a_run_has_an_option_with_help(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    text = capsys.readouterr().out
    for option in ("--optimizer.proxy_lr", "--data.noise.rate", "--model.pooling", "--storage.cache", "--resume"):
        assert option in text


def test_tune_says_what_a_space_looks_like(capsys, tmp_path):
    with pytest.raises(SystemExit) as exit_:
        main(["tune", "--config", "glyphs", "--space", "lr", "--out", str(tmp_path / "tune")])
    assert "OPTION=LOW:HIGH" in str(exit_.value)
    with pytest.raises(SystemExit) as exit_:
        main(["tune", "--config", "glyphs", "--space", "optimizer.lr=5", "--out", str(tmp_path / "tune")])
    assert "got '5'" in str(exit_.value)


def test_a_command_that_ranks_cannot_share_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="1"):
        main(["tune", "--data.name", "glyphs"])
    said = "pfml tune: error: rank 1: 2 processes cannot share its work: start it without torch"
    assert capsys.readouterr().err.startswith(said)


def test_paths_that_are_not_utf_8_are_taken_as_arguments(trained, tmp_path, capsys):
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    for number in range(3):
        Image.new("L", (32, 32), 80 * number).save(folder / f"\udcff{number}.png")
    index = tmp_path / "index\udce9"
    main(["index", str(trained), str(folder), f"--out={index}"])
    main(["search", str(trained), str(folder / "\udcff0.png"), f"--index={index}", "--k=1"])
    main(["embed", str(trained), str(folder), f"--out={tmp_path / 'out.npz'}"])
    main(["index", str(trained), f"--out={index}", "--remove", str(folder / "\udcff1.png")])
    printed = capsys.readouterr().out
    assert "3 added" in printed
    assert r"caf\xe9/\xff0.png" in printed
    assert "1 removed" in printed
    with numpy.load(tmp_path / "out.npz", allow_pickle=False) as archive:
        assert len(archive["embeddings"]) == 3


def test_results_are_printed_as_json_alone_and_nothing_with_quiet(trained, tmp_path, capsys, monkeypatch):
    for name in "ab":
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(2):
            Image.new("L", (32, 32), 80 * number).save(tmp_path / "photos" / name / f"{number}.png")
    photos, out, run = tmp_path / "photos", tmp_path / "out.npz", str(trained)

    def answer(*arguments):
        main([*map(str, arguments), "--json", "--device=cpu"])
        content = json.loads(capsys.readouterr().out)
        main([*map(str, arguments), "--quiet", "--device=cpu"])
        assert capsys.readouterr() == ("", "")
        return content

    assert answer("evaluate", run)["metrics"]["num_queries"] == 64
    assert answer("embed", run, photos, "--out", out)["images"] == 4
    assert answer("index", run, photos)["added"] == 4
    monkeypatch.setattr("pfml.pages.audit.write_audit_page", mock.Mock())
    assert answer("audit", run, "--top=3")["suspects"][0].keys() >= {"image", "given", "suggested", "score"}
    assert answer("search", run, photos / "a" / "0.png", "--k=1")["results"][0]["hits"][0]["class_name"] in ("a", "b")
    assert answer("calibrate", run, "--false-accept-rate=0.4")["false_accepts"]
