"""`pfml evaluate`: what a trained embedder is good for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pfml.cli.console import create_console, print_json, print_known, print_model, print_scores, print_verification
from pfml.cli.parser import add_device_option, add_expand_option, add_json_option, add_quiet_option
from pfml.terminal import print_line

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from pfml.data import RetrievalData
    from pfml.data.decoding import Track
    from pfml.evaluation import Classification, Verification


def evaluate(
    run: Path,
    data: str | None = None,
    root: Path | None = None,
    known: bool = False,
    nmi: bool = False,
    verification: bool = False,
    plot: Path | None = None,
    expand: int | None = None,
    rerank: bool = False,
    device: str = "auto",
    as_json: bool = False,
    quiet: bool = False,
) -> None:
    """Evaluate a trained embedder on classes that it has not seen, or on new images of known classes: print metrics."""
    from pfml.data import SeenClassError
    from pfml.data.own_images import is_own
    from pfml.data.splits import described_test, wholly_unseen
    from pfml.distributed import open_world
    from pfml.evaluation import Expansion, KReciprocal, embed_test, reranked_metrics, verification_metrics
    from pfml.models import load_embedder
    from pfml.runs.saved_loss import load_proxies
    from pfml.training.environment import resolve_device
    from pfml.training.progress import ProgressMonitor

    if plot is not None:
        _check_plot(plot, verification)
    console = create_console(stderr=as_json, quiet=quiet)
    with open_world(resolve_device(device)) as world:
        console.quiet = quiet or not world.is_first
        track = ProgressMonitor(console).track
        images = _evaluated(run, data, root, known, track)
        for remark in images.remarks:
            print_line(console, remark)
        embedder = load_embedder(run).to(world.device or resolve_device(device))
        if data is not None and images.name in ("folder", "csv"):  # published data sets keep their published split
            images = wholly_unseen(images, () if embedder.trained_on is None else embedder.trained_on.class_names)
        try:
            embedded = embed_test(embedder, images, track=track, world=world)
        except SeenClassError as error:
            if data is None or not is_own(data):
                raise
            raise SeenClassError(f"{error}; if they are new images of classes that it knows, add --known") from None
    if not world.is_first:
        return
    parts = (embedded.queries, embedded.labels, embedded.gallery, embedded.gallery_labels)
    metrics = embedded.retrieval(recall_at=images.recall_at, nmi=nmi)
    rows = {str(run): metrics.as_dict()}
    settings = {} if expand is None else {f"expanded by {expand}": Expansion(expand)}
    for name, each in (settings | ({"re-ranked": KReciprocal()} if rerank else {})).items():
        rows[name] = reranked_metrics(*parts, settings=each, recall_at=images.recall_at, track=track).as_dict()
    pairs = verification_metrics(*parts) if verification else None
    classes = images.train.class_names
    classification = None
    if images.protocol == "images":
        classification = embedded.classification(load_proxies(run, classes, embedded.queries.shape[1]))
    print_model(console, run)
    title = f"{images.name}: {described_test(images, held_out='new' if known else 'held-out')}"
    print_scores(console, title, rows)
    if classification is not None:
        print_known(console, classification.as_dict())
    if pairs is not None:
        print_verification(console, pairs)
        if plot is not None:
            _write_plot(pairs, plot)
            print_line(console, f"{plot}: FNMR over FMR, with its 95 % interval")
    if as_json:
        size = {"images": len(images.test), "classes": images.test.num_classes}
        more = {name: row for name, row in rows.items() if name != str(run)}
        answer = {
            "run": str(run),
            "data": images.name,
            "protocol": images.protocol,
            **size,
            "metrics": metrics.as_dict(),
        }
        answer |= {"reranked": more} if more else {}
        answer |= {} if classification is None else {"known": _known_content(classification, classes)}
        print_json(answer | ({} if pairs is None else {"verification": pairs.as_dict()}))


def _evaluated(run: Path, data: str | None, root: Path | None, known: bool, track: Track) -> RetrievalData:
    """What to evaluate on: the data of the run, or those that were given."""
    from dataclasses import replace

    from pfml.data import load_data
    from pfml.data.new_images import new_images_of_known_classes
    from pfml.data.own_images import is_own, own_images
    from pfml.runs.data import data_of_run, load_checked, names_data, prepare_data

    if known and (data is None or not is_own(data) or root is not None):
        raise ValueError("--known takes new images of known classes: give their folder or CSV by its path, --data PATH")
    config = data_of_run(run)
    if data is not None and not known and (config is None or not names_data(config, data, root)):
        return own_images(data, load_data(data, root), "auto", track)
    if config is None and known:
        raise ValueError(f"{run} must be a run, whose configuration says which images it was trained on, for --known")
    if config is None:
        raise ValueError(f"{run} does not say its data: name it with --data, and --root if it is not a path")
    config = replace(config, root=root or config.root)
    if known:
        assert data is not None
        trained = prepare_data(config, track).data.train
        return new_images_of_known_classes(data, trained, unreadable=config.unreadable, track=track)
    if config.split == "images":  # the gallery has the labels that the run was trained on
        return prepare_data(config, track).data
    if config.split == "none":
        raise ValueError(
            f"nothing was held out of the training of {run}: give --data PATH --known with new images of its classes, "
            f"or --data PATH with other classes"
        )
    return load_checked(config, track)


def _known_content(found: Classification, class_names: Sequence[str]) -> dict[str, Any]:
    """The accuracies, those of each class, and all mistakes of k-NN."""
    return {
        **found.as_dict(),
        "of_class": {class_names[label]: one.as_dict() for label, one in found.of_class.items()},
        "mistakes": [
            {"class": class_names[true], "predicted": class_names[predicted], "images": count}
            for (true, predicted), count in found.mistakes
        ],
    }


def _check_plot(path: Path, verification: bool) -> None:
    """Refuse a plot that could not be made, before anything is embedded."""
    if not verification:
        raise ValueError(f"--plot {path} shows the errors of verification: give --verification, too")
    if path.suffix.lower() != ".png" or path.is_dir():
        raise ValueError(f"--plot must be a file that ends in .png, got {path}")


def _write_plot(pairs: Verification, path: Path) -> None:
    from pfml.plots.theme import LIGHT, png_of_figure
    from pfml.plots.verification import plot_verification
    from pfml.storage.files import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png_of_figure(plot_verification(pairs, LIGHT)))


def add_evaluate_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `evaluate`."""
    add = parser.add_argument
    add("run", type=Path, help="Folder of a run, or of a saved embedder.")
    add(
        "--data",
        help="A data set by name, or the path of a folder of class folders or of a CSV; by default that of the run. "
        "All classes of a folder or CSV are searched if the model knows none of them.",
    )
    add("--root", type=Path, help="Folder of a data set given by name.")
    add(
        "--known",
        action="store_true",
        help="The images of --data are new images of classes that the run was trained on: search them among its "
        "training images, and print the accuracy of the nearest class.",
    )
    add("--nmi", action="store_true", help="Cluster the embeddings, too.")
    add(
        "--verification",
        action="store_true",
        help="Over all pairs: the equal error rate (EER), and false non-match rates (FNMR) at false match rates (FMR) "
        "of 1e-2, 1e-3 and 1e-4.",
    )
    add(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="With --verification: write FNMR over FMR as a plot, with its 95 % interval.",
    )
    add_expand_option(parser, "also search")
    add("--rerank", action="store_true", help="Also rank by k-reciprocal neighbors (Zhong et al., 2017).")
    add_device_option(parser)
    add_json_option(parser)
    add_quiet_option(parser)
