"""The page about a run: `pfml report RUN`."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from pfml.data import RetrievalData
from pfml.data.decoding import Track
from pfml.data.image_set import PROTOCOLS
from pfml.data.splits import described_test
from pfml.evaluation import verification_metrics
from pfml.evaluation.metrics import HEADLINE, meanings, metric_label, metric_text, shown_metrics
from pfml.evaluation.verification import Estimate
from pfml.ladder.crossfit import Gain
from pfml.losses import PotentialFieldLoss
from pfml.models import Embedder
from pfml.pages.known_classes import known_classes
from pfml.pages.page import Plot, Table, in_themes, render, short, write_page
from pfml.pages.run_analysis import HardPair, RunAnalysis, analyze_run, class_scores, hard_pairs
from pfml.plots.curves import loss_curve, mean_loss_curve, metric_curve, plot_loss, plot_metric
from pfml.plots.field_slice import measure_field, neighboring_classes, plot_field_slice
from pfml.plots.grids import choose_queries, image_grid, plot_retrievals, retrieve, thumbnails
from pfml.plots.ladder import LoggedRung, logged_rungs, plot_ladder, shown_gain
from pfml.plots.maps import choose_images, plot_photo_map, plot_proxy_map, project
from pfml.plots.verification import plot_verification, rate_text
from pfml.runs.config_files import plain, read_config
from pfml.runs.final import final_classes
from pfml.runs.folder import RunFolder
from pfml.suggest.comparison import comparison
from pfml.version import __version__

__all__ = ["contents_of", "run_page", "write_run_page"]

#: Role -> what a curve is of, by protocol.
ROLES = {
    "classes": {"test": "test classes", "validation": "validation classes"},
    "images": {"test": "held-out images"},
    "none": {},
}
QUERIES, FOUND, SIDE = 6, 7, 88
MAP_CLASSES, MAP_IMAGES, MAP_SIDE = 24, 16, 64
FEWEST_POINTS = 4  # of a map
PAIRS, EXAMPLES = 6, 4
MOST_CLASSES, MOST_NOISY_LABELS = 40, 12
NAME_LENGTH = 44
MOST_VERIFIED = 3000  # images, of which all pairs are compared within a second
#: What a checkpoint is called, by its key in results.json.
CHECKPOINTS = {
    "validation_selected": "chosen on validation classes",
    "last": "last epoch",
    "best_on_test": "best on test, chosen on what it reports",
}
#: What the diagnostics of the field mean.
DIAGNOSTICS = {
    "active_repulsions": "pairs of different classes that repel each other",
    "active_repulsion_share": "their share of all pairs of different classes",
    "same_class_inside_delta": "pairs of one class so close that they no longer attract",
    "sample_spread": "root mean square distance of images from their mean (1: all over the sphere)",
    "proxy_spread": "mean distance between proxies of one class",
    "largest_force": "largest force on an image or a proxy",
    "collapsed": "whether the embedding has collapsed",
}


def write_run_page(
    run: Path,
    out: Path | None = None,
    *,
    device: str = "auto",
    track: Track | None = None,
    data: RetrievalData | None = None,
    embedder: Embedder | None = None,
    embeddings: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write the page about the run in the folder `run`; its path, by default RUN/report.html.

    Args:
        run: As `pfml train` leaves it.
        out: Another file.
        device: Where to embed the test images.
        track: Shows the progress.
        data: The data of the run, from a caller that has them; None to load them.
        embedder: One of the run that is no longer needed, to load weights into; None to build one.
        embeddings: Those of "test" and "gallery" by the run's model, from a caller that has them; None to compute them.
    """
    path = Path(out) if out is not None else Path(run) / "report.html"
    found = analyze_run(Path(run), device=device, track=track, data=data, embedder=embedder, embeddings=embeddings)
    write_page(path, run_page(found))
    return path


def contents_of(run: Path) -> str:
    """What the page about the run in the folder `run` shows, for the line that names it."""
    folder = RunFolder(run)
    is_ladder, is_tested = bool(folder.entries("rung")), read_config(folder.config).data.split != "none"
    parts = ["the ladder" if is_ladder else "curves"]
    parts += ["search results", "a map", "the hardest classes"] if is_tested else []
    return ", ".join([*parts, *([] if is_ladder else ["the field"]), "the configuration"])


def run_page(run: RunAnalysis) -> str:
    """The page as HTML: metrics, plots and settings of one run."""
    data, rungs = run.data, logged_rungs(run.folder)
    kept, is_tested = _kept(rungs), len(data.test) > 0
    first_rank = run.search.scores.first_rank[run.search.scores.num_matches > 0]
    return render(
        "run.html",
        title=f"Run {run.folder.path.absolute().name}",
        method=run.config.loss.name if kept is None else "The ladder",
        backbone=run.config.model.backbone,
        recall_at_1=(first_rank == 1).double().mean().item(),
        moment=run.moment if kept is None else kept.name,
        loss_epoch=run.loss_epoch,
        protocol=PROTOCOLS[data.protocol],
        is_tested=is_tested,
        is_unseen=data.protocol == "classes",
        tested=described_test(data),
        train_classes=data.train.num_classes,
        validation_classes=None if data.validation is None else data.validation.num_classes,
        final=final_classes(run.folder.path),
        results=None if run.results is None or not is_tested else _results(run, run.results, rungs),
        ladder=_ladder(rungs),
        known=known_classes(run, _proxy_points(run)) if data.protocol == "images" else None,
        curves=_curves(run),
        verification=_verification(run) if is_tested else None,
        retrievals=_retrievals(run) if is_tested else [],
        map=_map(run) if is_tested else None,
        classes=_classes(run) if is_tested else None,
        pairs=[_pair(run, pair) for pair in hard_pairs(run.search, count=PAIRS)],
        proxies=_proxies(run),
        diagnostics=_diagnostics(run),
        noise=_noise(run),
        origin={
            "versions": f"pfml {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
            "remarks": data.remarks,
            "config": yaml.safe_dump(plain(run.config), sort_keys=False, allow_unicode=True),
        },
    )


def _kept(rungs: list[LoggedRung]) -> LoggedRung | None:
    """The rung whose model is that of the run; None for a run that did not work up the ladder."""
    return next((rung for rung in rungs if rung.is_kept), None)


def _results(run: RunAnalysis, results: dict[str, Any], rungs: list[LoggedRung]) -> dict[str, Any]:
    """Metrics on the test images beside those of the backbone; of a ladder, by the rung that it kept."""
    scores = {
        f"{name} (epoch {entry['epoch']}{', the model' if key == results.get('model') else ''})": entry["test"]
        for key, name in CHECKPOINTS.items()
        if (entry := results.get(key)) is not None
    }
    kept = _kept(rungs)
    if kept is not None:  # a ladder has no epochs
        scores = {f"the model ({kept.name})": results["last"]["test"]}
    sentence = ""
    if run.untrained is not None:
        scores = {"the backbone before training": run.untrained.scores, **scores}
        if not (rungs and rungs[0].is_kept):  # then the model is that backbone
            sentence = comparison(run.untrained, results, run.config)
    keys = shown_metrics(results["last"]["test"])
    rows = ((name, *(metric_text(key, one[key]) for key in keys)) for name, one in scores.items())
    return {
        "comparison": sentence[:1].upper() + sentence[1:],
        "table": Table(("", *map(metric_label, keys)), tuple(rows)),
        "meanings": meanings(keys),
    }


def _ladder(rungs: list[LoggedRung]) -> dict[str, Any] | None:
    """What each rung gained, and which was kept; None for a run that did not work up the ladder."""
    kept = _kept(rungs)
    if not rungs:
        return None
    metrics = shown_metrics(dict.fromkeys(key for rung in rungs for key in rung.scores if key in rung.gains))
    columns = [name for metric in metrics for name in (metric_label(metric), "gain")]
    columns = ["rung", "candidate", *columns, "seconds", "kept"]
    table = Table(
        tuple(columns),
        tuple(_rung_row(rung, metrics, is_first=rung is rungs[0]) for rung in rungs),
        strong=frozenset((k, c) for k, rung in enumerate(rungs) for c in range(2, len(columns)) if rung.is_kept),
        prose=frozenset({1}),
    )
    plots = []
    if sum(bool(rung.gains) for rung in rungs) > 1:  # a rung alone has nothing to compare with
        for label, metric in ((metric_label(metric), metric) for metric in metrics):
            alt = f"Gain of each rung of the ladder in {label}"
            plots.append((label, in_themes(partial(plot_ladder, rungs, metric), alt)))
    gained = [] if kept is None or kept is rungs[0] else [metric for metric in metrics if metric in kept.gains]
    return {
        "kept": None if kept is None else f"{kept.name} ({kept.candidate})",
        "gains": ", ".join(_gain_text(metric, kept.gains[metric]) for metric in gained if kept is not None),
        "plots": plots,
        "table": table,
        "meanings": meanings(metrics),
    }


def _gain_text(metric: str, gain: Gain) -> str:
    low, high = (f"{100 * end:+.1f}" for end in gain.interval)
    interval = f" (95 % interval {low} to {high})" if math.isfinite(gain.error) else ""
    return f"{shown_gain(metric, gain)} {metric_label(metric)}{interval}"


def _rung_row(rung: LoggedRung, metrics: list[str], *, is_first: bool) -> tuple[str, ...]:
    cells = []
    for metric in metrics:
        cells.append(metric_text(metric, rung.scores[metric]) if metric in rung.scores else "-")
        gain = None if is_first else rung.gains.get(metric)
        error = "" if gain is None or not math.isfinite(gain.error) else f" ± {100 * 1.96 * gain.error:.1f}"
        cells.append("-" if gain is None else shown_gain(metric, gain) + error)
    seconds = "-" if rung.seconds is None else f"{rung.seconds:,.1f}" if rung.seconds >= 0.05 else "under 0.1"
    return (rung.name, rung.candidate, *cells, seconds, "kept" if rung.is_kept else "")


def _verification(run: RunAnalysis) -> dict[str, Any]:
    """Whether pairs of one class are told from pairs of two; or a remark why that cannot be said."""
    search = run.search
    try:
        pairs = verification_metrics(
            search.embeddings,
            search.labels,
            gallery=search.gallery,
            gallery_labels=search.gallery_labels,
            most_images=MOST_VERIFIED,
        )
    except ValueError as error:
        return {"remark": f"Left out: {error}."}
    rows = [("EER", *_estimate_texts(pairs.eer), "-")]
    for rate, estimate in pairs.fnmr_at.items():
        distance = f"{pairs.threshold_at[rate]:.3f}" if rate in pairs.threshold_at else "-"
        rows.append((f"FNMR at FMR {rate_text(rate)}", *_estimate_texts(estimate), distance))
    images = len(search.labels) + (0 if search.gallery_labels is None else len(search.gallery_labels))
    return {
        "remark": "",
        "eer": pairs.eer.value,
        "plot": in_themes(partial(plot_verification, pairs), "False non-match rate over false match rate"),
        "table": Table(("", "error in %", "95 % interval", "accepted up to distance"), tuple(rows)),
        "genuine": pairs.genuine,
        "impostors": pairs.impostors,
        "sampled": pairs.images if pairs.images < images else 0,
        "has_intervals": pairs.eer.interval is not None,
    }


def _estimate_texts(estimate: Estimate) -> tuple[str, str]:
    """The value and its interval, in percent."""
    if estimate.interval is None:
        return f"{100 * estimate.value:.2f}", "-"
    low, high = (f"{100 * end:.2f}" for end in estimate.interval)
    return f"{100 * estimate.value:.2f}", f"{low} to {high}"


def _curves(run: RunAnalysis) -> dict[str, Any] | None:
    """Loss and headline metrics over epochs; None if the log has no step of training."""
    entries, roles = run.folder.entries("evaluation"), ROLES[run.data.protocol]
    if not run.folder.entries("step") or not entries or entries[0]["epoch"] == 0:
        return None
    steps, means = loss_curve(run.folder, "loss"), mean_loss_curve(run.folder, "loss")
    metrics = []
    for key in HEADLINE if roles else ():
        start = {"test": None if run.untrained is None else run.untrained.scores[key]}
        curves = [
            metric_curve(run.folder, name, key, role=role, untrained=start.get(role))
            for role, name in roles.items()
            if role in entries[0]
        ]
        label = metric_label(key)
        metrics.append((label, in_themes(partial(plot_metric, curves), f"{label} over epochs")))
    loss = in_themes(partial(plot_loss, steps, means, color=2, width=470), "Training loss over epochs")
    return {"loss": loss, "metrics": metrics}


def _retrievals(run: RunAnalysis) -> list[dict[str, Any]]:
    """The best and the worst queries with their nearest images."""
    search, found = run.search, []
    best = choose_queries(search.scores, search.labels, best=QUERIES)
    worst = choose_queries(search.scores, search.labels, worst=QUERIES)
    for title, queries in (("Best queries", best), ("Worst queries", worst)):
        answers = retrieve(
            search.embeddings,
            search.labels,
            queries,
            k=FOUND,
            gallery=search.gallery,
            gallery_labels=search.gallery_labels,
        )
        correct, shown = int(answers.correct.sum()), answers.correct.numel()
        possible = int(search.scores.num_matches[queries].clamp_max(answers.correct.shape[1]).sum())
        png = plot_retrievals(answers, run.data.test, run.data.gallery, side=SIDE)
        names = [run.data.test.class_names[label] for label in search.labels[queries].tolist()]
        counts = f"{correct} of {shown} are right" + (f", {possible} at best" if possible < shown else "")
        plot = Plot(png, f"{title} and their nearest images; {counts}")
        found.append({"title": title, "plot": plot, "counts": counts, "class_names": names})
    return found


def _map(run: RunAnalysis, *, seed: int = 0) -> dict[str, Any]:
    """t-SNE of test images."""
    labels = run.search.labels
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=MAP_IMAGES, seed=seed)
    classes, plot = len(labels[chosen].unique()), None
    if len(chosen) >= FEWEST_POINTS:
        coordinates = project(run.search.embeddings[chosen], seed=seed)
        tiles = thumbnails(run.data.test, chosen, side=MAP_SIDE)
        alt = f"t-SNE map of {classes} classes: {PROTOCOLS[run.data.protocol]}"
        plot = in_themes(partial(plot_photo_map, coordinates, labels[chosen], tiles), alt)
    return {"plot": plot, "images": len(chosen), "classes": classes}


def _classes(run: RunAnalysis) -> dict[str, Any]:
    """Metrics of each class, worst first."""
    names, scores = run.data.test.class_names, class_scores(run.search)
    rows = tuple(
        (
            short(names[one.label], NAME_LENGTH),
            f"{one.queries:,}",
            metric_text("recall_at_1", one.recall_at_1),
            metric_text("map_at_r", one.map_at_r),
            "-" if one.confused_with is None else f"{short(names[one.confused_with])} ({one.confusions})",
        )
        for one in scores[:MOST_CLASSES]
    )
    columns = ("class", "images", metric_label("recall_at_1"), metric_label("map_at_r"), "confused with")
    return {
        "table": Table(columns, rows),
        "left_out": len(scores) - len(rows),
        "sorted_by": metric_label("recall_at_1"),
    }


def _pair(run: RunAnalysis, pair: HardPair) -> dict[str, Any]:
    """Two classes that are confused, with examples: queries above their nearest images."""
    test, queries = run.data.test, list(pair.queries[:EXAMPLES])
    asked = thumbnails(test, queries, side=SIDE)
    nearest = thumbnails(run.data.gallery or test, run.search.first[queries].tolist(), side=SIDE)
    tiles = _padded(torch.stack([asked, nearest]))
    one, other = (short(test.class_names[label]) for label in pair.labels)
    plot = Plot(image_grid(tiles, gap=6), f"Images of {one} and {other} that are confused with each other")
    return {"title": f"{one} and {other}", "plot": plot, "count": len(pair.queries), "share": pair.share}


def _padded(tiles: Tensor) -> Tensor:
    """Columns up to `EXAMPLES`, the missing ones transparent (NaN), so that all grids have one scale."""
    rows, columns = tiles.shape[:2]
    missing = torch.full((rows, EXAMPLES - columns, *tiles.shape[2:]), torch.nan)
    return torch.cat([tiles, missing], dim=1)


def _proxies(run: RunAnalysis, *, seed: int = 0) -> dict[str, Any]:
    """t-SNE of training images and their proxies, and the field around one class; or a remark why not."""
    found: dict[str, Any] = {"remark": "", "map": None, "field": None}
    proxies, labels = _proxy_points(run), run.train_images.labels
    if run.loss is None or proxies is None:
        remark = run.loss_remark if run.loss is None else f"Left out: {run.config.loss.name} has no proxies."
        return {**found, "remark": remark}
    chosen = choose_images(labels, classes=MAP_CLASSES, per_class=2 * MAP_IMAGES, seed=seed)
    classes = labels[chosen].unique()
    stars = proxies[classes].flatten(0, 1)
    if len(chosen) + len(stars) >= FEWEST_POINTS:
        coordinates = project(torch.cat([run.train_points[chosen], stars.float()]), seed=seed)
        images, proxy_coordinates = coordinates.split([len(chosen), len(stars)])
        star_labels = classes.repeat_interleave(proxies.shape[1])
        names = {label: short(run.data.train.class_names[label]) for label in classes.tolist()}
        plot = partial(plot_proxy_map, images, labels[chosen], proxy_coordinates, star_labels, names)
        found["map"] = in_themes(plot, "t-SNE map of training images with proxies as stars")
        found |= {"images": len(chosen), "classes": len(classes), "count": len(stars)}
    if isinstance(run.loss, PotentialFieldLoss) and run.data.train.num_classes >= 2:
        first = int(classes[0])
        found["field_class"] = short(run.data.train.class_names[first])
        found["field"] = _field(run, run.loss, first)
    return found


def _field(run: RunAnalysis, loss: PotentialFieldLoss, first: int) -> Plot:
    """The potential around a class and its two nearest ones."""
    labels = run.train_images.labels
    classes = neighboring_classes(run.train_points, labels, first=first, count=3)
    field = measure_field(loss, run.train_points, labels, classes)
    names = {label: short(run.data.train.class_names[label]) for label in classes}
    return in_themes(partial(plot_field_slice, field, names), f"Potential field around {names[first]}")


def _proxy_points(run: RunAnalysis) -> Tensor | None:
    """(C, M, D), or None for a loss without proxies."""
    points = getattr(run.loss, "proxy_points", None)
    proxies: Tensor | None = None if points is None else points().detach().cpu()
    dim = run.search.embeddings.shape[1]
    fits = proxies is not None and proxies.ndim == 3 and proxies.shape[1] > 0 and proxies.shape[2] == dim
    return proxies if fits else None


def _diagnostics(run: RunAnalysis) -> dict[str, Any]:
    """Diagnostics of the field; or a remark why there are none."""
    if run.loss is None:
        return {"remark": run.loss_remark}
    if not isinstance(run.loss, PotentialFieldLoss):
        return {"remark": f"Left out: {run.config.loss.name} is not a potential field."}
    measured = run.loss.diagnostics(run.train_points, run.train_images.labels)
    rows = tuple((text, _number(getattr(measured, name))) for name, text in DIAGNOSTICS.items())
    law = asdict(run.loss.field.law)  # type: ignore[call-overload]
    return {
        "remark": "",
        "table": Table(("", "value"), rows),
        "images": len(run.train_points),
        "proxies_per_class": run.loss.proxies_per_class,
        "law": ", ".join(f"{name} {value:g}" for name, value in law.items() if value is not None),
        "normalization": run.loss.field.normalization,
    }


def _number(value: float | bool) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if math.isnan(value) else f"{value:.3g}"


def _noise(run: RunAnalysis) -> dict[str, Any]:
    """The labels that were changed on purpose."""
    noisy = run.noisy_labels
    rows = tuple(
        (row["image"], short(row["true class"]), short(row["given class"])) for row in noisy[:MOST_NOISY_LABELS]
    )
    table = Table(("image", "true class", "given class"), rows)
    return {"count": len(noisy), "share": len(noisy) / max(len(run.data.train), 1), "table": table}
