"""Students of teachers: a run whose loss compares with other runs' embeddings in place of labels."""

from dataclasses import replace

import pytest
import torch

from pfml.data.image_set import SeenClassError
from pfml.losses.distillation import RelaxedContrastiveLoss, combined
from pfml.models import TrainedOn, load_embedder
from pfml.runs.folder import RunFolder
from pfml.training import BatchConfig, LossConfig, train
from pfml.training.loop import Training
from pfml.training.shutdown import Interrupted
from pfml.training.teachers import Teachers, load_teachers, usual_dims
from small_data import InterruptAt, few_glyphs, small_config, small_embedder


@pytest.fixture(scope="module")
def taught(tmp_path_factory):
    """Two trained teachers, of other widths."""
    folders = []
    for number, dim in enumerate((8, 12)):
        torch.manual_seed(number)
        folder = tmp_path_factory.mktemp("teachers") / f"{number}"
        train(few_glyphs(), small_embedder(embedding_dim=dim), small_config(seed=number, epochs=1), out=folder)
        folders.append(str(folder))
    return tuple(folders)


def student_config(teachers, **changes):
    return small_config(**{"loss": LossConfig("relaxed-contrastive"), "teachers": teachers, **changes})


def weights_of(folder):
    return load_embedder(folder).state_dict()


def assert_same_weights(one, other):
    one, other = weights_of(one), weights_of(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("compiling", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_teachers_say_what_their_embedders_would_side_by_side(taught, compiling):
    embedders = [load_embedder(folder) for folder in taught]
    teachers = Teachers(embedders, torch.device("cpu"), compiling=compiling)
    crops = torch.rand(5, 3, 16, 16)
    with torch.no_grad():
        wanted = combined([each(crops) for each in embedders])
    torch.testing.assert_close(teachers(crops), wanted, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(teachers.begin(crops)(), wanted, atol=1e-5, rtol=1e-4)
    assert len(teachers) == 2
    assert not teachers(crops).requires_grad


@pytest.mark.gpu
def test_what_is_embedded_beside_other_work_is_the_same(taught):
    device = torch.device("cuda")
    teachers = Teachers([load_embedder(folder) for folder in taught], device)
    batches = [torch.rand(5, 3, 16, 16, device=device) for _ in range(20)]
    wanted = [teachers(crops).clone() for crops in batches]
    work = torch.rand(2000, 2000, device=device)
    for crops, answer in zip(batches, wanted, strict=True):
        own = crops.clone()
        begun = teachers.begin(own)
        for _ in range(5):
            work = work @ work / 1000
        assert torch.equal(begun(), answer)
        del own


@pytest.mark.parametrize("reason", ["switch", "failure"])
def test_without_a_graph_teachers_embed_operation_by_operation(monkeypatch, reason):
    teachers = Teachers([small_embedder().eval()], torch.device("cpu"))
    crops = torch.rand(3, 3, 16, 16)
    if reason == "switch":
        monkeypatch.setenv("PFML_CUDA_GRAPHS", "0")
    else:
        monkeypatch.setattr(teachers, "_recorded", lambda crops: None)
    with torch.no_grad():
        assert torch.equal(teachers._replayed(crops), teachers(crops))


@pytest.mark.gpu
def test_a_graph_that_cannot_be_recorded_ends_no_run(caplog):
    teachers = Teachers([small_embedder().eval()], torch.device("cuda"))
    side_by_side = teachers._side_by_side
    teachers._side_by_side = lambda crops: side_by_side(crops * float(crops.sum().item() > 0))
    crops = torch.rand(3, 3, 16, 16, device="cuda")
    for _ in range(2):
        torch.testing.assert_close(teachers(crops), teachers.embeddings(crops))
    assert caplog.text.count("operation by operation") == 1


def test_reduced_teachers_keep_the_dimensions_in_which_images_differ_most(taught):
    teachers = Teachers([load_embedder(folder) for folder in taught], torch.device("cpu"))
    batches = torch.rand(4, 9, 3, 16, 16)
    whole = torch.cat([teachers(crops) for crops in batches])
    kept = teachers.reduce(3, iter(batches))
    reduced = torch.cat([teachers(crops) for crops in batches])
    assert reduced.shape == (36, 3)
    variances = torch.linalg.svdvals((whole - whole.mean(dim=0)).double()).square()
    assert kept == pytest.approx(float(variances[:3].sum() / variances.sum()), rel=1e-4)
    squares = [torch.pdist(points.double()).square().mean().item() for points in (whole, reduced)]
    assert squares[0] == pytest.approx(squares[1], rel=1e-4)
    best = (whole - whole.mean(dim=0)) @ torch.linalg.svd(whole - whole.mean(dim=0))[2][:3].T
    torch.testing.assert_close(torch.pdist(reduced), torch.pdist(best) / kept**0.5, rtol=1e-3, atol=1e-4)
    assert teachers.reduce(2, iter(batches)) < kept, "of all dimensions again"
    for dims in (0, 20):
        with pytest.raises(ValueError, match=f"below the 20 of all teachers, got {dims}"):
            teachers.reduce(dims, iter(batches))


def test_a_student_follows_reduced_teachers_and_resumes_to_the_bit(taught, tmp_path):
    plain, config = student_config(taught), student_config(taught, teacher_dims=4)

    def run(name, config, **options):
        torch.manual_seed(1)
        return train(few_glyphs(), small_embedder(), config, out=tmp_path / name, **options)

    run("plain", plain)
    run("whole", config)
    with pytest.raises(KeyboardInterrupt):
        run("broken", config, monitor=InterruptAt(3))
    run("broken", config, resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "broken")
    assert not torch.equal(*(weights_of(tmp_path / name)["head.linear.weight"] for name in ("plain", "whole")))
    with pytest.raises(ValueError, match="teacher_dims is about the teachers of a student"):
        run("alone", small_config(teacher_dims=4))


@pytest.mark.parametrize(
    ("teachers", "student", "dims"),
    [
        ([512] * 6, 512, 256),
        ([512] * 6, 64, 128),
        ([64] * 4, 64, 32),
        ([64] * 4, 8, 16),
        ([512], 512, None),
        ([1, 1], 8, None),
    ],
)
def test_teachers_are_reduced_to_what_was_best(teachers, student, dims):
    """The first four are those of docs/STUDENTS.md; a teacher alone keeps all that it has."""
    assert usual_dims(teachers, student) == dims


def test_several_teachers_are_reduced_unless_all_of_them_is_asked_for(taught, tmp_path):
    def run(name, **changes):
        torch.manual_seed(1)
        train(few_glyphs(), small_embedder(), student_config(taught, **changes), out=tmp_path / name)
        return weights_of(tmp_path / name)["head.linear.weight"]

    widths = [load_embedder(folder).embedding_dim for folder in taught]
    usual = usual_dims(widths, 8)
    assert torch.equal(run("default"), run("number", teacher_dims=usual))
    assert not torch.equal(run("default again"), run("all", teacher_dims=None))


def test_a_teacher_with_a_flip_test_embeds_each_crop_once():
    embedder = small_embedder(flip_test=True).eval()
    crops = torch.rand(5, 3, 16, 16)
    said = Teachers([embedder], torch.device("cpu"))(crops)
    assert embedder.config.flip_test, "it is left as it is"
    embedder.config = replace(embedder.config, flip_test=False)
    torch.testing.assert_close(said, embedder(crops).detach(), atol=1e-5, rtol=1e-4)


def test_a_teacher_of_another_resolution_sees_the_crops_resized():
    small = small_embedder().eval()
    large = small_embedder(embedding_dim=4, image_size=24).eval()
    teachers = Teachers([small, large], torch.device("cpu"))
    crops = torch.rand(3, 3, 16, 16)
    resized = torch.nn.functional.interpolate(crops, (24, 24), mode="bilinear", antialias=True)
    with torch.no_grad():
        torch.testing.assert_close(teachers(crops)[:, 8:] * 2**0.5, large(resized), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("name", ["relaxed-contrastive", "relational-kl", "soft-field", "equilibrium-field"])
def test_a_student_learns_from_its_teachers_and_never_asks_for_a_label(taught, tmp_path, name):
    torch.manual_seed(5)
    embedder = small_embedder()
    first = {key: value.clone() for key, value in embedder.state_dict().items()}
    config = student_config(taught, loss=LossConfig(name), batch=BatchConfig(32, 0, per_epoch=2), epochs=1)
    results = train(few_glyphs(), embedder, config, out=tmp_path / "student")
    assert any(not torch.equal(first[key], value) for key, value in embedder.state_dict().items())
    assert results["last"]["test"]["recall_at_1"] >= 0

    torch.manual_seed(5)
    labels = few_glyphs().train.labels.roll(7)
    assert not torch.equal(labels, few_glyphs().train.labels)
    mislabeled = replace(few_glyphs(), train=replace(few_glyphs().train, labels=labels))
    train(mislabeled, small_embedder(), config, out=tmp_path / "again")
    assert_same_weights(tmp_path / "student", tmp_path / "again")


def test_a_student_that_was_interrupted_resumes_to_the_bit(taught, tmp_path):
    def run(out, **more):
        torch.manual_seed(1)
        return train(few_glyphs(), small_embedder(), student_config(taught), out=tmp_path / out, **more)

    run("whole")
    with pytest.raises(Interrupted):
        run("parts", monitor=InterruptAt(3))
    run("parts", resume=True)
    assert_same_weights(tmp_path / "whole", tmp_path / "parts")


def test_a_student_does_not_resume_with_a_teacher_that_has_changed(taught, tmp_path):
    teacher = tmp_path / "teacher"
    load_embedder(taught[0]).save(teacher)
    with pytest.raises(Interrupted):
        train(
            few_glyphs(), small_embedder(), student_config((str(teacher),)), out=tmp_path / "s", monitor=InterruptAt(3)
        )
    small_embedder().save(teacher)
    with pytest.raises(ValueError, match="have changed since it was started"):
        train(few_glyphs(), small_embedder(), student_config((str(teacher),)), out=tmp_path / "s", resume=True)


def test_a_teacher_that_has_seen_the_test_classes_is_refused(tmp_path):
    cheat = small_embedder()
    cheat.save(tmp_path / "cheat", trained_on=TrainedOn("letters", few_glyphs().test.class_names))
    with pytest.raises(SeenClassError, match="test classes must be unseen"):
        train(few_glyphs(), small_embedder(), student_config((str(tmp_path / "cheat"),)), out=tmp_path / "student")


def test_what_teachers_have_learned_from_no_test_of_the_student_may_show(tmp_path):
    teacher = small_embedder()
    teacher.save(tmp_path / "teacher", trained_on=TrainedOn("elsewhere", ("a gull",)))
    student = small_embedder()
    train(few_glyphs(), student, student_config((str(tmp_path / "teacher"),), epochs=1), out=tmp_path / "student")
    assert student.trained_on is not None
    assert set(student.trained_on.class_names) == {*few_glyphs().train.class_names, "a gull"}


def test_a_loss_on_labels_takes_no_teachers_and_a_student_needs_some(taught):
    with pytest.raises(ValueError, match=r"follows teachers: give the runs that teach, --teachers RUN RUN"):
        small_config(loss=LossConfig("relaxed-contrastive"))
    with pytest.raises(ValueError, match="a student of teachers needs loss.name relaxed-contrastive or"):
        small_config(teachers=taught)
    with pytest.raises(FileNotFoundError, match="must be a saved model or a run"):
        load_teachers(student_config(("nowhere",)), few_glyphs(), small_embedder(), torch.device("cpu"), 1)
    with pytest.raises(ValueError, match="at least one teacher"):
        Teachers([], torch.device("cpu"))


def test_a_student_is_compared_with_what_its_teachers_say_of_the_same_crops(taught, tmp_path, monkeypatch):
    pixels, targets = [], []
    update, forward = Training.update, RelaxedContrastiveLoss.forward

    def updated(training, indices, crops):
        pixels.append(crops.clone())
        return update(training, indices, crops)

    def compared(loss, embeddings, teachers):
        targets.append(teachers)
        return forward(loss, embeddings, teachers)

    monkeypatch.setattr(Training, "update", updated)
    monkeypatch.setattr(RelaxedContrastiveLoss, "forward", compared)
    train(few_glyphs(), small_embedder(), student_config(taught, epochs=1, teacher_dims=None), out=tmp_path / "student")
    embedders = [load_embedder(folder) for folder in taught]
    assert len(pixels) == 4
    for crops, told in zip(pixels, targets, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(told, combined([each(crops) for each in embedders]), atol=1e-5, rtol=1e-4)


def test_a_student_comes_closer_to_its_teachers(taught, tmp_path):
    torch.manual_seed(10)
    config = student_config(taught, loss=LossConfig("relational-kl"), epochs=4)
    train(few_glyphs(), small_embedder(), config, out=tmp_path / "student")
    losses = [entry["loss"] for entry in RunFolder(tmp_path / "student").entries("evaluation")]
    assert losses[-1] < losses[0] / 2
