"""The loss as a module: every option acts, and it lives well in other people's training loops."""

import copy
import io
import math

import pytest
import torch

from oracle import potential_energy as loop_energy
from pfml import LabelMap, PotentialFieldLoss, PowerLaw
from pfml.sphere import unit
from processes import CONTEXT
from states import EVERYWHERE, Yukawa, relative_error

C, D = 5, 8


def make(**options):
    torch.manual_seed(1)
    return PotentialFieldLoss(C, D, **{"proxies_per_class": 3, **options})


def batch(n=12, spread=0.4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    center = torch.randn(D, generator=generator)
    embeddings = center + spread * torch.randn(n, D, generator=generator) * center.norm() / D**0.5
    return embeddings.to(dtype).requires_grad_(), torch.arange(n) % C


def crowd_proxies(loss, spread=0.2):
    """Move the proxies close together, so that repulsion acts among them."""
    with torch.no_grad():
        loss.proxies.copy_(unit(loss.proxies.mean(dim=(0, 1)) + spread * unit(loss.proxies)))


def value_and_gradients(loss, embeddings, labels):
    value = loss(embeddings, labels)
    return value, *torch.autograd.grad(value, (embeddings, loss.proxies))


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_default_loss_has_the_gradients_of_eq_6(backend):
    loss = make(backend=backend).double()
    embeddings, labels = batch(dtype=torch.float64)

    def literal(moved_embeddings, moved_proxies):
        points = torch.cat([unit(moved_embeddings), unit(moved_proxies).flatten(0, 1)]).tolist()
        return loop_energy(points, torch.cat([labels, loss.proxy_labels]).tolist())

    _, on_embeddings, on_proxies = value_and_gradients(loss, embeddings, labels)
    step = 1e-6
    for gradient, point in ((on_embeddings, (3, 2)), (on_proxies, (1, 2, 4)), (on_proxies, (4, 0, 0))):
        moved = [embeddings.detach().clone(), loss.proxies.detach().clone()]
        which = 0 if len(point) == 2 else 1
        moved[which][point] += step
        up = literal(*moved)
        moved[which][point] -= 2 * step
        assert gradient[point].item() == pytest.approx((up - literal(*moved)) / (2 * step), rel=1e-4)
    expected = literal(embeddings.detach(), loss.proxies.detach())
    assert loss.literal_energy(embeddings, labels).item() == pytest.approx(expected, rel=1e-12)


def test_the_defaults_are_the_papers_text():
    loss = PotentialFieldLoss(100, 512)
    assert loss.proxies.shape == (100, 15, 512)
    assert loss.field.law == PowerLaw(delta=0.2, alpha=3.0)
    assert loss.field.normalization == "none"
    assert loss.reduction == "sum"
    assert loss.weights == type(loss.weights)(1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "option",
    [
        {"delta": 0.3},
        {"alpha": 2.0},
        {"delta_rep": 0.6},
        {"potential": "cpml"},
        {"potential": Yukawa()},
        {"normalization": "log"},
        {"normalization": "anchor"},
        {"reduction": "pairs"},
        {"reduction": "points"},
        {"proxy_space": "free"},
        {"proxy_space": "projected"},
        {"proxy_attraction": False},
        {"proxy_repulsion": False},
        {"sample_sample": False},
        {"normalize_embeddings": False},
        {"proxies_per_class": 2},
    ],
    ids=lambda option: "-".join(f"{k}={v}" for k, v in option.items()),
)
def test_every_option_changes_the_loss_and_its_gradients(option):
    embeddings, labels = batch()
    plain, changed = make(), make(**option)
    for loss in (plain, changed):
        crowd_proxies(loss)
        with torch.no_grad():
            loss.proxies *= 2  # off the sphere, so that spaces differ
    if option.get("proxy_space") == "projected":
        changed(embeddings, labels)
        torch.testing.assert_close(changed.proxies.norm(dim=-1), torch.ones(C, 3))
        return
    value, on_embeddings, on_proxies = value_and_gradients(plain, embeddings, labels)
    other_value, other_on_embeddings, other_on_proxies = value_and_gradients(changed, embeddings, labels)
    assert relative_error(other_value.detach(), value.detach()) > 1e-3
    if "proxy_attraction" not in option and "proxy_repulsion" not in option:
        assert relative_error(other_on_embeddings, on_embeddings) > 1e-3
    if "sample_sample" not in option and "proxies_per_class" not in option:
        assert relative_error(other_on_proxies, on_proxies) > 1e-3


@pytest.mark.parametrize(
    "option",
    [
        {"delta": 0.3},
        {"alpha": 2.0},
        {"delta_rep": 0.6},
        {"normalization": "log"},
        {"proxy_attraction": 0.5},
        {"proxy_repulsion": False},
        {"sample_sample": False},
    ],
    ids=str,
)
def test_an_option_that_is_set_during_training_is_that_of_a_new_loss(option):
    ((name, value),) = option.items()
    loss, expected = make(), make(**option)
    embeddings, labels = batch()
    for one in (loss, expected):
        crowd_proxies(one)
    loss(embeddings, labels)
    setattr(loss, name, value)
    assert getattr(loss, name) == getattr(expected, name) == value
    assert torch.equal(loss(embeddings, labels), expected(embeddings, labels))
    assert loss.hyperparameters() == expected.hyperparameters()


def test_an_option_that_does_not_fit_cannot_be_set_either():
    loss = make(proxy_sample=4)
    for name, value, message in (
        ("delta", -1.0, "delta must be a positive number, got -1.0"),
        ("normalization", "logs", "normalization must be one of"),
        ("normalization", "anchor", "proxy_sample needs proxies that are anchors"),
        ("proxy_attraction", -1, "proxy_attraction must not be negative or infinite, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            setattr(loss, name, value)
    with pytest.raises(AttributeError, match="delta must be an option of the decay law, and Yukawa has none"):
        make(potential=Yukawa()).delta = 0.3
    assert loss.hyperparameters() == make(proxy_sample=4).hyperparameters()


def test_reductions_divide_by_ordered_pairs_and_by_points():
    embeddings, labels = batch()
    n = len(labels) + C * 3
    total = make()(embeddings, labels)
    torch.testing.assert_close(make(reduction="pairs")(embeddings, labels) * n * (n - 1), total)
    torch.testing.assert_close(make(reduction="points")(embeddings, labels) * n, total)


def test_switched_off_pairs_exert_no_force():
    embeddings, labels = batch()
    no_samples = make(proxies_per_class=0, sample_sample=False)
    value = no_samples(embeddings, labels)
    assert value.item() == 0
    (gradient,) = torch.autograd.grad(value, embeddings)
    assert gradient.abs().max() == 0
    quiet = make(proxy_attraction=False, proxy_repulsion=False)
    crowd_proxies(quiet)
    quiet(embeddings[:0], labels[:0]).backward()
    assert quiet.proxies.grad.abs().max() == 0


def test_without_proxies_the_field_is_that_of_the_batch():
    embeddings, labels = batch()
    loss = make(proxies_per_class=0)
    assert loss.proxies.shape == (C, 0, D)
    assert loss.param_groups(lr=0.1) == []
    expected = loop_energy(unit(embeddings.detach().double()).tolist(), labels.tolist())
    assert loss.literal_energy(embeddings.double(), labels).item() == pytest.approx(expected, rel=1e-12)
    loss(embeddings, labels).backward()
    assert embeddings.grad.abs().max() > 0
    with pytest.raises(ValueError, match="class_potentials needs proxies"):
        loss.class_potentials(embeddings)


def test_proxies_start_with_the_length_that_was_asked_for():
    torch.testing.assert_close(make(proxy_init_norm=2.5).proxies.norm(dim=-1), torch.full((C, 3), 2.5))
    torch.testing.assert_close(make(proxy_space="free").proxies.norm(dim=-1), torch.ones(C, 3))


def test_free_proxies_are_used_as_they_are_and_normalized_ones_only_by_direction():
    embeddings, labels = batch()
    for space, same in (("normalized", True), ("free", False)):
        loss = make(proxy_space=space)
        before = loss(embeddings, labels)
        with torch.no_grad():
            loss.proxies *= 3
        after = loss(embeddings, labels)
        assert torch.isclose(before, after).item() is same


def test_projected_proxies_go_back_to_the_sphere_at_each_training_step_only():
    embeddings, labels = batch()
    loss = make(proxy_space="projected")
    optimizer = torch.optim.SGD(loss.param_groups(lr=1e-3))
    for _ in range(3):
        optimizer.zero_grad()
        loss(embeddings, labels).backward()
        optimizer.step()
    assert (loss.proxies.norm(dim=-1) - 1).abs().max() > 1e-4  # the last step has left the sphere
    moved = loss.proxies.detach().clone()
    loss.eval()(embeddings, labels)
    assert torch.equal(loss.proxies, moved)
    first, second = loss.train()(embeddings, labels), loss(embeddings, labels)  # as when gradients are accumulated
    (first + second).backward()
    torch.testing.assert_close(loss.proxies.norm(dim=-1), torch.ones(C, 3))


def test_projected_proxies_mean_the_same_in_training_in_evaluation_and_in_reports():
    embeddings, labels = batch()
    loss = make(proxy_space="projected")
    with torch.no_grad():
        loss.proxies *= 1.7  # as after a step
    moved = loss.proxies.detach().clone()
    loss.diagnostics(embeddings, labels)
    loss.literal_energy(embeddings, labels)
    with torch.no_grad():
        loss(embeddings, labels)
    assert torch.equal(loss.proxies, moved)  # to look is not to touch
    torch.testing.assert_close(loss.eval()(embeddings, labels), loss.train()(embeddings, labels))


@pytest.mark.parametrize("method", ["samples", "kmeans"])
def test_proxies_from_data_work_in_half_precision_without_proxies_and_off_the_sphere(method):
    embeddings, labels = batch(40)
    half = make(proxy_init=method).half()
    half.initialize_proxies(embeddings.half(), labels)
    assert torch.isfinite(half.proxies).all()
    make(proxy_init=method, proxies_per_class=0).initialize_proxies(embeddings, labels)
    free = make(proxy_init=method, proxy_space="free", normalize_embeddings=False)
    free.initialize_proxies(50 * embeddings, labels)
    lengths = free.proxies.norm(dim=-1) / (50 * embeddings.norm(dim=1).mean())
    assert lengths.min() > 0.5
    with pytest.raises(RuntimeError, match="needs loss.initialize_proxies"):
        make(proxy_init=method).class_potentials(embeddings)


@pytest.mark.parametrize("method", ["samples", "kmeans"])
def test_proxies_from_data_start_at_the_data_of_their_class(method):
    loss = make(proxy_init=method)
    embeddings, labels = batch(40)
    with pytest.raises(RuntimeError, match="needs loss.initialize_proxies"):
        loss(embeddings, labels)
    loss.initialize_proxies(embeddings, labels)
    points = unit(embeddings.detach())
    for c in range(C):
        distance = torch.cdist(loss.proxy_points()[c], points[labels == c]).min(dim=1).values
        other = torch.cdist(loss.proxy_points()[c], points[labels != c]).min(dim=1).values
        assert (distance < 1e-3).all() if method == "samples" else (distance < 0.5).all()
        assert other.min() > 1e-2
        assert torch.cdist(loss.proxy_points()[c], loss.proxy_points()[c]).sum() > 0.1  # not all the same sample
    torch.testing.assert_close(loss.proxies.norm(dim=-1), torch.full((C, 3), 3.0))
    assert torch.isfinite(loss(embeddings, labels))


@pytest.mark.parametrize("method", ["samples", "kmeans"])
def test_proxies_of_a_class_without_samples_start_anywhere_and_it_is_said(method):
    loss, again = (make(proxy_init=method) for _ in range(2))
    embeddings, _ = batch()
    labels = torch.arange(12) % 2 * 3
    for one in (loss, again):
        with pytest.warns(UserWarning, match=r"3 of 5 classes have no samples .* \(1, 2, 4\): theirs start anywhere"):
            one.initialize_proxies(embeddings, labels, generator=torch.Generator().manual_seed(1))
    assert torch.equal(loss.proxies, again.proxies), "drawn by the generator that was given"
    placed, points = loss.proxy_points(), unit(embeddings.detach())
    nearest = torch.cdist(placed.flatten(0, 1), points).min(dim=1).values.view(len(placed), -1).amax(dim=1)
    assert (nearest[[0, 3]] < 0.5).all(), "where their samples are"
    assert (nearest[[1, 2, 4]] > 0.5).all()
    assert torch.cdist(placed[1], placed[1]).sum() > 0.1, "not all in one place"
    assert torch.isfinite(loss(embeddings, labels))


def test_param_groups_give_proxies_their_own_learning_rate_and_no_weight_decay():
    loss = make()
    (group,) = loss.param_groups(lr=0.01)
    assert group["params"] == [loss.proxies]
    assert (group["lr"], group["weight_decay"]) == (0.01, 0.0)
    assert loss.param_groups(lr=0.01, weight_decay=0.1)[0]["weight_decay"] == 0.1
    optimizer = torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": 1e-4}, *loss.param_groups(0.01)]
    )
    assert [g["lr"] for g in optimizer.param_groups] == [1e-4, 0.01]


def test_class_potentials_are_lowest_for_the_class_whose_proxies_are_near():
    loss = make()
    potentials = loss.class_potentials(loss.proxies.detach()[:, 0])
    assert potentials.shape == (C, C)
    assert potentials.argmin(dim=1).tolist() == list(range(C))


def test_training_brings_positives_together_and_keeps_classes_apart():
    torch.manual_seed(0)
    points = torch.nn.Parameter(torch.randn(30, D))
    labels = torch.arange(30) % C
    loss = make(normalization="log", delta=0.6, delta_rep=1.2, alpha=6.0, proxy_attraction=False)
    optimizer = torch.optim.Adam([{"params": [points], "lr": 0.02}, *loss.param_groups(lr=0.05)])

    def positives_next_to_each_other():
        r = torch.cdist(unit(points), unit(points)).fill_diagonal_(9.0)
        return (labels[r.argmin(dim=1)] == labels).float().mean().item()

    assert positives_next_to_each_other() < 0.5
    for _ in range(80):
        optimizer.zero_grad()
        loss(points, labels).backward()
        optimizer.step()
    assert positives_next_to_each_other() > 0.9
    r = torch.cdist(unit(points), unit(points))
    assert r[labels[:, None] != labels[None, :]].min() > 0.9  # and classes keep their distance


# --- in other people's loops ---


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_under_autocast_the_loss_stays_in_float32(dtype):
    model = torch.nn.Linear(D, D)
    loss = make()
    images, labels = torch.randn(12, D), torch.arange(12) % C
    with torch.autocast("cpu", dtype=dtype):
        embeddings = model(images)
        assert embeddings.dtype == dtype
        value = loss(embeddings, labels)
    assert value.dtype == torch.float32
    value.backward()
    assert loss.proxies.dtype == loss.proxies.grad.dtype == torch.float32
    torch.testing.assert_close(value, loss(embeddings.detach().float(), labels))


@pytest.mark.parametrize(
    ("backend", "option"),
    [
        ("dense", {"normalization": "log"}),
        ("tiled", {}),
        ("tiled", {"normalization": "log", "proxy_space": "projected"}),
    ],
    ids=str,
)
def test_torch_compile_keeps_one_graph_and_the_same_numbers(backend, option):
    torch._dynamo.reset()
    loss = make(backend=backend, **option)
    embeddings, labels = batch()
    expected = value_and_gradients(loss, embeddings, labels)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for got, want in zip(value_and_gradients_of(compiled, loss, embeddings, labels), expected, strict=True):
        torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match=r"labels must lie in \[0, 5\), got 5 at index 3"):
        compiled(embeddings, labels.clone().index_fill_(0, torch.tensor([3]), 5))


def value_and_gradients_of(compiled, loss, embeddings, labels):
    value = compiled(embeddings, labels)
    return value, *torch.autograd.grad(value, (embeddings, loss.proxies))


def test_double_precision_stays_double():
    embeddings, labels = batch(dtype=torch.float64)
    assert make()(embeddings, labels).dtype == torch.float64
    assert make().double()(embeddings.float(), labels).dtype == torch.float64


def test_deep_copies_are_equal_and_independent():
    embeddings, labels = batch()
    loss = make()
    twin = copy.deepcopy(loss)
    assert torch.equal(twin(embeddings, labels), loss(embeddings, labels))
    with torch.no_grad():
        twin.proxies += 1
    assert not torch.equal(twin(embeddings, labels), loss(embeddings, labels))


def test_state_dicts_hold_tensors_only_and_travel_through_weights_only_files():
    loss = make(proxy_init="samples")
    embeddings, labels = batch(40)
    loss.initialize_proxies(embeddings, labels)
    state = loss.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    twin = make(proxy_init="samples")
    twin.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(twin(embeddings, labels), loss(embeddings, labels))


def test_a_state_dict_of_other_hyper_parameters_is_refused_by_name_before_anything_is_loaded():
    stored = make(delta=0.3, normalization="log").state_dict()
    loss = make()
    before = loss.proxies.detach().clone()
    with torch.no_grad():
        stored["proxies"].zero_()
    with pytest.raises(ValueError, match="delta: stored 0.3, here 0.2; normalization: stored 'log', here 'none'"):
        loss.load_state_dict(stored)
    assert torch.equal(loss.proxies, before)
    torch.nn.ModuleDict({"loss": loss}).load_state_dict({f"loss.{k}": v for k, v in make().state_dict().items()})
    with pytest.raises(RuntimeError, match="_extra_state"):
        loss.load_state_dict({"proxies": before})
    with pytest.raises(ValueError, match="cannot be read"):
        loss.load_state_dict({"proxies": before, "_extra_state": torch.zeros(3, dtype=torch.uint8)})


@pytest.mark.parametrize("assign", [False, True])
def test_a_loss_made_on_the_meta_device_has_the_classes_of_its_proxies_once_it_is_loaded(assign):
    embeddings, labels = batch()
    stored = make(proxy_init="samples")
    stored.initialize_proxies(*batch(40))
    with torch.device("meta"):
        loss = make(proxy_init="samples")
    if not assign:
        loss.to_empty(device="cpu").proxy_labels.fill_(-7)  # as memory that nobody has written
    loss.load_state_dict(stored.state_dict(), assign=assign)
    assert torch.equal(loss.proxy_labels, stored.proxy_labels)
    assert torch.equal(loss(embeddings, labels), stored(embeddings, labels))


def test_a_loss_made_on_the_meta_device_starts_like_any_other():
    with torch.device("meta"):
        loss = make()
    loss.to_empty(device="cpu").proxy_labels.fill_(-7)
    torch.manual_seed(1)
    loss.reset_parameters()
    assert torch.equal(loss.proxies, make().proxies)
    assert torch.equal(loss.proxy_labels, make().proxy_labels)


def test_it_fits_where_a_loss_of_pytorch_metric_learning_is_called():
    losses = pytest.importorskip("pytorch_metric_learning.losses", reason="needs the extra methods")
    embeddings, labels = batch()
    for loss in (losses.ProxyAnchorLoss(C, D), make()):
        value = loss(embeddings, labels, None, None, None)
        assert value.dim() == 0
        value.backward()
    with pytest.raises(ValueError, match="indices_tuple, ref_emb and ref_labels must be None"):
        make()(embeddings, labels, indices_tuple=(labels, labels, labels, labels))


def test_it_trains_in_pytorch_metric_learnings_own_trainer():
    trainers = pytest.importorskip("pytorch_metric_learning.trainers", reason="needs the extra methods")
    images, labels = torch.randn(24, D), torch.arange(24) % C
    model, loss = torch.nn.Linear(D, D), make()
    before = loss.proxies.detach().clone()
    trainer = trainers.MetricLossOnly(
        models={"trunk": model, "embedder": torch.nn.Identity()},
        optimizers={
            "trunk_optimizer": torch.optim.Adam(model.parameters(), lr=1e-3),
            "metric_loss_optimizer": torch.optim.Adam(loss.param_groups(lr=1e-2)),
        },
        batch_size=12,
        loss_funcs={"metric_loss": loss},
        dataset=torch.utils.data.TensorDataset(images, labels),
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
    )
    trainer.train(num_epochs=1)
    assert not torch.equal(loss.proxies, before)


def test_two_processes_with_ddp_keep_the_same_proxies(tmp_path):
    arguments = (str(tmp_path / "store"), str(tmp_path))
    processes = [CONTEXT.Process(target=_train_in_ddp, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, make().proxies)


def _train_in_ddp(rank, store, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    loss = torch.nn.parallel.DistributedDataParallel(make())
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-3)
    embeddings, labels = batch()
    for _ in range(2):
        optimizer.zero_grad()
        loss(embeddings[rank::2], labels[rank::2]).backward()
        optimizer.step()
    torch.save(loss.module.proxies.detach(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_any_labels_work_through_a_label_map():
    names = ["wren", "owl", "kite", "owl", "wren", "tit", "crow", "wren", "owl", "kite", "tit", "crow"]
    species = LabelMap(names)
    embeddings, _ = batch()
    loss = PotentialFieldLoss(len(species), D, proxies_per_class=2)
    assert torch.isfinite(loss(embeddings, species.encode(names)))


def test_the_backend_is_chosen_by_size_and_can_be_read_back():
    assert make().backend_for(4) == "dense"
    assert make().backend_for(1000) == "tiled"
    assert make(backend="dense").backend_for(1000) == "dense"
    embeddings, labels = batch()
    torch.testing.assert_close(make(backend="dense")(embeddings, labels), make(backend="tiled")(embeddings, labels))


def test_bad_options_are_refused_by_name():
    for options, message in (
        ({"proxies_per_class": -1}, "proxies_per_class must be an integer >= 0, got -1"),
        ({"proxies_per_class": 1.5}, "proxies_per_class must be an integer >= 0, got 1.5"),
        ({"reduction": "mean"}, r"reduction must be one of \('sum', 'pairs', 'points'\), got 'mean'"),
        ({"proxy_space": "sphere"}, "proxy_space must be one of"),
        ({"proxy_init": "zeros"}, "proxy_init must be one of"),
        ({"proxy_init_norm": 0.0}, "proxy_init_norm must be positive and finite, got 0.0"),
        ({"proxy_init_norm": math.inf}, "proxy_init_norm must be positive and finite, got inf"),
        ({"potential": "coulomb"}, "potential must be 'pfml', 'cpml' or a DecayLaw, got 'coulomb'"),
        ({"potential": Yukawa(), "delta": 0.3}, "set them in your own law"),
        ({"normalization": "softmax"}, "normalization must be one of"),
        ({"backend": "cuda"}, "backend must be 'auto' or one of"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)


def test_switches_must_be_true_or_false_and_weights_may_be_numbers():
    with pytest.raises(TypeError, match="normalize_embeddings must be True or False, got 'false'"):
        make(normalize_embeddings="false")
    for name in ("proxy_attraction", "proxy_repulsion", "sample_sample"):
        with pytest.raises(TypeError, match=f"{name} must be True, False or a number, got 'false'"):
            make(**{name: "false"})
        with pytest.raises(ValueError, match=f"{name} must not be negative or infinite, got -1"):
            make(**{name: -1})


def test_a_weight_counts_between_off_and_on():
    torch.manual_seed(1)
    embeddings, labels = torch.randn(12, 8), torch.arange(12) % 5
    for name in ("proxy_attraction", "proxy_repulsion", "sample_sample"):
        torch.manual_seed(0)
        off, quarter, on = (make(delta=1.2, **{name: weight}) for weight in (False, 0.25, True))
        for loss in (quarter, on):
            loss.load_state_dict({"proxies": off.proxies.detach(), "_extra_state": loss.get_extra_state()})
        energies = [loss(embeddings, labels).item() for loss in (off, quarter, on)]
        assert energies[0] != energies[2]
        assert energies[1] == pytest.approx(0.75 * energies[0] + 0.25 * energies[2], rel=1e-5)


def test_the_printed_loss_names_its_options():
    text = repr(make(delta=0.3))
    assert "delta=0.3" in text
    assert "proxies_per_class=3" in text
