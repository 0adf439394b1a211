import math

import pytest

from pfml.paper import paper_tables
from pfml.paper.fill import fill, filled_tables, latest, measured, other_runs, summary, tables_named, tables_of
from records import record

TABLES = {table.id: table for table in paper_tables()}


def column(table, heading):
    return table.headings.index(heading)


def row(filled, name, section=0):
    return next(one for one in filled.sections[section].rows if one.name == name)


def ours(filled, name, heading, section=0):
    return row(filled, name, section).cells[column(filled, heading)].ours


def test_mean_and_standard_deviation_are_those_of_a_calculation_by_hand():
    # mean 71; deviations -1, 0, 1; sample variance (1 + 0 + 1) / 2
    found = summary([70.0, 71.0, 72.0])
    assert (found.mean, found.std, found.seeds) == (71.0, 1.0, 3)
    assert summary([70.0]).std is None
    assert summary([]) is None


def test_a_cell_is_the_mean_over_seeds_of_the_last_and_of_the_best_epoch():
    runs = [record(seed=0, recall=0.70, best=0.73), record(seed=1, recall=0.72, best=0.75)]
    cell = ours(fill(TABLES["retrieval"], runs), "Potential Field (Ours)", "CUB R@1")
    assert cell.last.mean == pytest.approx(71.0)
    assert cell.last.std == pytest.approx(math.sqrt(2))
    assert cell.best.mean == pytest.approx(74.0)
    assert cell.validation_selected is None
    assert cell.last.seeds == 2


def test_only_the_cells_that_were_run_are_filled_and_none_has_the_papers_number():
    filled = fill(TABLES["retrieval"], [record(recall=0.5)])
    assert sum(cell.ours.last is not None for cell in filled.cells()) == 3
    empty = fill(TABLES["retrieval"], [])
    assert all(cell.ours.last is None and not cell.ours.notes for cell in empty.cells())


@pytest.mark.parametrize(
    "changes",
    [
        *({"dataset": "cars"}, {"backbone": "bn_inception"}, {"dim": 64}, {"method": "hist"}, {"settings": {"a": 1}}),
        {"config": {"data": {"split": "images"}}},
    ],
)
def test_a_run_of_something_else_does_not_enter_the_cell(changes):
    both = fill(TABLES["retrieval"], [record(recall=0.7), record(recall=0.1, seed=1, **changes)])
    cell = ours(both, "Potential Field (Ours)", "CUB R@1")
    assert (cell.last.mean, cell.last.seeds) == (pytest.approx(70.0), 1)


def test_a_run_without_a_row_or_section_in_the_paper_gets_one_without_a_paper_value():
    runs = [record(method="pfml-log"), record(backbone="resnet50_he", method="hist"), record(settings={"lr": 0.1})]
    filled = fill(TABLES["retrieval"], runs)
    assert [one.name for one in filled.sections[0].rows][-2:] == ["pfml-log", "Potential Field (Ours), lr = 0.1"]
    assert filled.sections[-1].title == "resnet50_he (512 dim), not in the paper"
    new = [row(filled, "pfml-log"), *filled.sections[-1].rows]
    assert not any(one.in_paper for one in new)
    assert all(cell.value is None for one in new for cell in one.cells)
    assert ours(filled, "HIST", "CUB R@1", section=-1).last.mean == pytest.approx(70.0)


def test_both_names_of_dino_are_one_backbone():
    for name in ("dino_small", "dino_vits16"):
        filled = fill(TABLES["retrieval"], [record(backbone=name, dim=384)])
        assert ours(filled, "Potential Field (Ours)", "CUB R@1", section=2).last.seeds == 1


def test_of_several_records_with_one_key_the_last_that_is_done_counts():
    records = [
        record(key="a", recall=0.1),
        record(key="a", recall=0.2),
        record(key="a", status="failed", results={}),
        record(key="b", status="failed", results={}),
        record(key="a", experiment="other"),
    ]
    counted = latest(records)
    assert [one["key"] for one in counted] == ["a", "b", "a"]
    assert counted[0] is records[1]


def test_a_seed_that_was_run_twice_counts_once_and_is_noted():
    runs = [record(key="a", recall=0.1), record(key="b", recall=0.7), record(seed=1, recall=0.7)]
    cell = ours(fill(TABLES["retrieval"], runs), "Potential Field (Ours)", "CUB R@1")
    assert (cell.last.mean, cell.last.seeds) == (pytest.approx(70.0), 2)
    assert "run more than once, with other configurations: seed 0; the latest counts" in cell.notes


def test_notes_say_epochs_seeds_missing_images_and_failures():
    images = {"train": 5864, "test": 5920, "missing": 4}
    runs = [
        record(seed=0, epochs=15, images=images),
        record(seed=1, status="failed", results={}, error="Traceback ...\nRuntimeError: out of memory\n"),
    ]
    notes = ours(fill(TABLES["retrieval"], runs), "Potential Field (Ours)", "CUB R@1").notes
    assert notes == (
        "15 epochs, the paper 200",
        "1 seed, the paper 5",
        "4 images missing",
        "failed: seed 1 (RuntimeError: out of memory)",
    )


def test_a_run_as_the_paper_has_it_needs_no_note():
    runs = [record(seed=seed) for seed in range(5)]
    assert ours(fill(TABLES["retrieval"], runs), "Potential Field (Ours)", "CUB R@1").notes == ()


def test_a_failed_run_that_succeeded_under_another_key_is_not_noted():
    runs = [record(key="a", status="failed", results={}), *(record(seed=seed) for seed in range(5))]
    assert ours(fill(TABLES["retrieval"], runs), "Potential Field (Ours)", "CUB R@1").notes == ()


def test_times_are_noted_with_their_device_and_rows_with_their_settings():
    runs = [
        record(dataset="cars", settings={"proxies_per_class": m}, results={"seconds_per_epoch": 9.0 + m}, device="H200")
        for m in (5, 15)
    ]
    filled = fill(TABLES["timing"], runs)
    cell = ours(filled, "Potential Field (Ours) M=5", "Cars seconds per epoch")
    assert (cell.last.mean, cell.best) == (14.0, None)
    assert cell.notes == ("measured on H200, the paper on NVIDIA A4000",)
    assert filled.sections[0].rows[-1].name == "pfml, M = 15"


def test_alignment_is_the_papers_form_and_not_a_percentage():
    run = record(results={"alignment": {"paper": 0.17, "wasserstein2": 0.2}})
    assert ours(fill(TABLES["alignment"], [run]), "Ours", "CUB W2").last.mean == 0.17
    assert measured(record(), "alignment") is None


def test_separated_embeddings_are_averaged_over_folds_before_seeds():
    def fold(seed, number, recall):
        return record(seed=seed, settings={"fold": number}, recall=recall, backbone="bn_inception", dim=128)

    runs = [fold(0, k, 0.5 + k / 100) for k in range(4)] + [fold(1, k, 0.6 + k / 100) for k in range(3)]
    runs.append(record(settings={"fold": "concatenated"}, recall=0.68, backbone="bn_inception"))
    filled = fill(TABLES["mlrc-cub"], runs)
    cell = ours(filled, "Ours", "CUB 128 P@1")
    assert cell.last.mean == pytest.approx((51.5 + 61.0) / 2)
    assert cell.last.seeds == 2
    assert "fewer than 4 folds: seed 1" in cell.notes
    assert ours(filled, "Ours", "CUB 512 P@1").last.mean == pytest.approx(68.0)


def test_other_noise_rates_are_sections_of_their_own():
    runs = [record(settings={"noise": rate}, recall=0.7 - rate) for rate in (0.2, 0.4)]
    filled = fill(TABLES["noise"], runs)
    assert ours(filled, "Ours", "CUB R@1").last.mean == pytest.approx(50.0)
    assert filled.sections[-1].title == "resnet50 (512 dim), noise = 0.4, not in the paper"
    assert ours(filled, "Ours", "CUB R@1", section=-1).last.mean == pytest.approx(30.0)


def test_a_swept_value_that_the_paper_does_not_have_is_a_column_in_order():
    runs = [record(settings={"delta": delta}, recall=0.7) for delta in (0.2, 0.12, 0.30000000001)]
    filled = fill(TABLES["ablation-delta"], runs)
    assert filled.headings == ("0.1", "0.12", "0.15", "0.2", "0.25", "0.3", "0.35")
    cub = row(filled, "CUB-200-2011")
    assert [cell.ours.last is not None for cell in cub.cells] == [False, True, False, True, False, True, False]
    assert [cell.value for cell in cub.cells] == [73.2, None, 73.3, 73.4, 73.1, 73.4, 73.1]


def test_the_tables_of_an_experiment_are_those_tables_named_it():
    assert [table.id for table in tables_named("mlrc")] == ["mlrc-cars", "mlrc-cub"]
    assert tables_named("ml") == []
    assert len(tables_of("anything")) == len([table for table in paper_tables() if table.kind != "settings"])


def test_runs_of_two_experiments_are_never_in_one_cell():
    records = [record(recall=0.7), record(recall=0.1, experiment="first try")]
    tables = [one for one in filled_tables(records) if one.id == "retrieval"]
    assert [one.runs_of for one in tables] == ["retrieval", "first try"]
    means = [ours(one, "Potential Field (Ours)", "CUB R@1").last.mean for one in tables]
    assert means == pytest.approx([70.0, 10.0])


def test_without_runs_every_table_comes_once_and_empty():
    tables = filled_tables([])
    assert len(tables) == len(paper_tables()) - 1
    assert all(one.runs_of is None for one in tables)


def test_one_experiment_shows_only_what_it_has():
    records = [record(), record(experiment="noise", settings={"noise": 0.2})]
    assert [one.id for one in filled_tables(records, experiment="noise")] == ["noise"]


def test_a_data_set_that_the_paper_does_not_have_gets_a_table_of_its_own():
    records = [record(dataset="glyphs", backbone="convnet", dim=64), record()]
    paper, glyphs = filled_tables(records, experiment="retrieval")
    assert glyphs.headings == ("glyphs R@1", "glyphs R@2", "glyphs R@4")
    assert glyphs.title == "Image retrieval: glyphs, which the paper does not have"
    assert glyphs.sections[0].title == "convnet (64 dim)"
    assert glyphs.sections[0].rows[0].name == "Potential Field"
    assert ours(paper, "Potential Field (Ours)", "CUB R@1").last.seeds == 1


def test_glyphs_are_a_row_of_their_own_in_the_figure():
    records = [record(experiment="ablation", dataset="glyphs", backbone="convnet", dim=64, settings={"alpha": 3.0})]
    (panel,) = filled_tables(records, experiment="ablation")
    assert panel.id == "ablation-alpha"
    assert [one.name for one in panel.sections[-1].rows] == ["glyphs"]


def test_runs_that_fit_nowhere_are_returned():
    odd = record(experiment="noise", settings={"crops": 2})
    assert other_runs([record(), odd]) == [odd]
    assert other_runs([record(), odd], experiment="retrieval") == []


@pytest.mark.parametrize("experiment", ["retrieval", "noise", "mlrc", "ablation", "mine"])
@pytest.mark.parametrize("dataset", ["cub", "glyphs"])
@pytest.mark.parametrize("status", ["done", "failed"])
def test_a_run_is_either_in_a_table_or_among_the_others(experiment, dataset, status):
    for settings in ({}, {"noise": 0.5}, {"alpha": 1}, {"alpha": 1, "delta": 1}, {"fold": 1}, {"odd": "x"}):
        results = {} if status == "done" else {"last": {}, "best": {}}
        run = record(experiment=experiment, settings=settings, dataset=dataset, status=status, results=results)
        results = [cell.ours for table in filled_tables([run]) for cell in table.cells()]
        has_cell = any(ours.last or ours.notes for ours in results)
        assert has_cell != bool(other_runs([run])), settings


def test_the_data_sets_of_the_paper_are_no_part_of_the_title_of_another_ones_table():
    run = record(experiment="mlrc", dataset="glyphs", backbone="convnet", settings={"fold": "concatenated"})
    (glyphs,) = filled_tables([run], experiment="mlrc")
    assert glyphs.title == "MLRC protocol: glyphs, which the paper does not have"


def test_noise_rates_come_in_order_and_each_is_named():
    rates = (0.0, 0.5, 0.2, 0.1)
    runs = [
        record(experiment="noise", dataset="glyphs", backbone=backbone, dim=64, settings={"noise": rate})
        for rate in rates
        for backbone in ("convnet", "another")
    ]
    (glyphs,) = filled_tables(runs, experiment="noise")
    titles = [section.title for section in glyphs.sections]
    assert titles[:4] == [f"convnet (64 dim), noise = {rate}" for rate in sorted(rates)]
    assert titles[4:] == [f"another (64 dim), noise = {rate}" for rate in sorted(rates)]


def test_tables_with_runs_come_first_and_the_papers_own_are_never_missing():
    runs = [record(experiment="noise", dataset="glyphs", backbone="convnet", dim=64, settings={"noise": 0.2})]
    filled = filled_tables(runs)
    assert (filled[0].id, filled[0].runs_of) == ("noise", "noise")
    assert [one.id for one in filled[1:]] == [one.id for one in filled_tables([])]
    assert all(one.runs_of is None for one in filled[1:])


def test_a_run_that_was_only_drawn_again_is_no_second_table():
    runs = [record(key="abc-1"), record(experiment="figures", key="abc-2")]
    assert [one.runs_of for one in filled_tables(runs) if one.runs_of] == ["retrieval"]
    assert [one.runs_of for one in filled_tables(runs, experiment="figures")] == ["figures"]
    runs[1]["key"] = "other-2"
    assert [one.runs_of for one in filled_tables(runs) if one.runs_of] == ["retrieval", "figures"]


TUNING = {"trials": 12, "split": "half", "values": {"optimizer.lr": 2e-4, "loss.options.delta": 0.31}}


def test_a_tuned_run_has_a_row_of_its_own_beside_the_paper_s_numbers():
    runs = [*(record(recall=0.7, seed=seed) for seed in (0, 1)), record(recall=0.74, key="tuned", tuning=TUNING)]
    filled = fill(TABLES["retrieval"], runs)
    usual = row(filled, "Potential Field (Ours)")
    tuned = row(filled, "Potential Field (Ours), tuned")
    assert (usual.is_tuned, tuned.is_tuned, tuned.in_paper) == (False, True, True)
    assert usual.cells[0].ours.last.mean == pytest.approx(70.0)
    assert usual.cells[0].ours.last.seeds == 2
    assert tuned.cells[0].ours.last.mean == pytest.approx(74.0)
    assert [cell.printed for cell in tuned.cells] == [cell.printed for cell in usual.cells]
    note = "tuned on validation classes (12 trials, split half): lr 0.0002, delta 0.31"
    assert note in tuned.cells[0].ours.notes
    assert note not in usual.cells[0].ours.notes


def test_a_tuned_run_of_a_method_that_the_paper_does_not_have_is_marked_too():
    filled = fill(TABLES["retrieval"], [record(method="pfml-log", tuning=TUNING)])
    assert row(filled, "pfml-log, tuned").cells[0].ours.last is not None


def test_every_cell_knows_what_it_belongs_to_also_where_the_paper_has_none():
    runs = [record(experiment="noise", settings={"noise": 0.4}, dataset="glyphs", backbone="convnet", dim=64)]
    (glyphs,) = filled_tables(runs, experiment="noise")
    first = glyphs.sections[0].rows[0].cells[0]
    assert (first.dataset, first.metric, first.backbone, first.dim) == ("glyphs", "recall_at_1", "convnet", 64)
    assert (first.method, first.settings, first.printed) == ("pfml", {"noise": 0.4}, "-")
