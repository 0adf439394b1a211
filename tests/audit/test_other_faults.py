"""Poor images, outliers, classes to merge or split: planted ones are found, and none where nothing is wrong."""

import csv

import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from pfml.audit import audit
from pfml.audit.faults import find_faults, write_faults
from pfml.audit.measures import image_measures, quality_faults, robust_deviation
from pfml.audit.structure import find_merges, find_outliers, find_splits
from pfml.data import ImageSet
from pfml.pages.audit import audit_page

CLASSES, EACH, DIM = 8, 20, 32


def clusters(seed=0):
    """Separate classes."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(CLASSES).repeat_interleave(EACH)
    centers = F.normalize(torch.randn(CLASSES, DIM, generator=random))
    points = centers[labels] + 0.6 * torch.randn(len(labels), DIM, generator=random) / DIM**0.5
    pixels = torch.randint(0, 256, (len(labels), 3, 8, 8), dtype=torch.uint8, generator=random)
    return F.normalize(points), ImageSet(pixels, labels, tuple("abcdefgh"))


def test_measures_are_those_of_their_definitions(tmp_path):
    pixels = torch.randint(0, 256, (3, 20, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "noise.png")
    measures = image_measures(ImageSet.unlabeled([tmp_path / "noise.png"]))
    gray = (pixels.double() * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(dim=0) / 255
    edges = gray[:-2, 1:-1] + gray[2:, 1:-1] + gray[1:-1, :-2] + gray[1:-1, 2:] - 4 * gray[1:-1, 1:-1]
    gradient = ((gray[1:] - gray[:-1]) ** 2).mean() + ((gray[:, 1:] - gray[:, :-1]) ** 2).mean()
    ordered = sorted(gray.flatten().tolist())
    assert float(measures.highlights) == pytest.approx(ordered[791], rel=1e-4)  # 0.99 * 799
    assert float(measures.shadows) == pytest.approx(ordered[40], rel=1e-4)
    assert float(measures.sharpness) == pytest.approx(float(edges.var(correction=0) / gradient), rel=1e-4)
    assert float(measures.elongation) == 2
    assert measures.thumbnails.shape == (1, 16, 16)


def test_pixels_that_are_known_are_not_read_again(tmp_path):
    known = torch.full((3, 4, 4), 255, dtype=torch.uint8)
    images = ImageSet((tmp_path / "gone.png",), torch.tensor([0]), ("a",), pixels={tmp_path / "gone.png": known})
    measures = image_measures(images)
    assert float(measures.highlights) == float(measures.shadows) == pytest.approx(1)
    assert float(measures.sharpness) == 0, "there is no edge"


def test_dark_bright_blurred_and_long_images_are_found(tmp_path):
    random = torch.Generator().manual_seed(0)
    paths = []
    for k in range(40):
        pixels = torch.rand(24, 32, 3, generator=random) * (120 + 3 * k)
        if k == 3:
            pixels = pixels / 20
        if k == 7:
            pixels = 250 - pixels / 50
        if k == 11:
            pixels = F.avg_pool2d(pixels.permute(2, 0, 1)[None], 9, 1, 4)[0].permute(1, 2, 0)
        if k == 13:
            pixels = pixels[:6]
        paths.append(tmp_path / f"{k}.png")
        Image.fromarray(pixels.byte().numpy()).save(paths[-1])
    found = quality_faults(image_measures(ImageSet.unlabeled(paths)))
    assert {(fault.kind, fault.index) for fault in found} >= {("dark", 3), ("bright", 7), ("oddly shaped", 13)}
    assert ("blurred", 11) in {(fault.kind, fault.index) for fault in found}
    assert {fault.index for fault in found} == {3, 7, 11, 13}


def test_deviations_are_in_robust_standard_deviations():
    values = torch.randn(10_001, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3 + 5
    values[:100] = 1e6
    assert float(robust_deviation(values)[200]) == pytest.approx(float((values[200] - 5) / 3), abs=0.15)


def test_contrast_and_darkness_are_no_blur():
    random = torch.Generator().manual_seed(0)
    plain = 255 * torch.rand(1, 3, 64, 64, generator=random)
    soft = F.avg_pool2d(plain, 5, 1, 2)
    images = torch.cat([plain, 100 + plain / 8, plain / 10, soft]).byte()
    sharp, flat, dark, blurred = image_measures(ImageSet.unlabeled(images)).sharpness.tolist()
    assert flat == pytest.approx(sharp, rel=0.05)
    assert dark == pytest.approx(sharp, rel=0.1)
    assert blurred < sharp / 3


def test_an_image_far_from_all_others_is_an_outlier():
    points, images = clusters()
    before = {one.index for one in find_outliers(points, images)}
    assert len(before) <= 2
    points[17] = -F.normalize(points.mean(dim=0), dim=0)
    found = find_outliers(points, images)
    assert found[0].index == 17
    assert {one.index for one in found} == {17, *before}
    distances = (points - points[17]).norm(dim=1)
    own = distances[images.labels == images.labels[17]]
    assert found[0].distance == pytest.approx(min(float(distances.sort()[0][30]), float(own.sort()[0][2])))


def test_outliers_of_one_kind_do_not_vouch_for_each_other_unless_they_are_a_class():
    points, images = clusters()
    far = -F.normalize(points.mean(dim=0), dim=0)
    points[::20] = F.normalize(far + 0.01 * torch.randn(8, DIM, generator=torch.Generator().manual_seed(1)))
    assert {*range(0, 160, 20)} <= {one.index for one in find_outliers(points, images)}
    labels = images.labels.clone()
    labels[::20] = CLASSES
    of_nine = ImageSet(images.images, labels, tuple("abcdefghi"))
    assert not {*range(0, 160, 20)} & {one.index for one in find_outliers(points, of_nine)}


def test_a_class_that_was_cut_in_two_is_to_be_merged():
    points, images = clusters()
    assert find_merges(points, images) == []
    labels = images.labels.clone()
    labels[40:60:2] = 5  # half of class 2; class 5 gets its label elsewhere
    labels[100:120] = 6
    (found,) = find_merges(points, images.with_labels(labels))
    assert (found.kind, found.classes, found.sizes) == ("merge", (2, 5), (10, 10))
    assert {int(labels[k]) for k in found.examples} == {2, 5}


def test_two_classes_in_one_are_to_be_split():
    points, images = clusters()
    assert find_splits(points, images) == []
    labels = images.labels.clone()
    labels[labels == 3] = 1
    (found,) = find_splits(points, images.with_labels(labels))
    assert (found.kind, found.classes, sorted(found.sizes)) == ("split", (1,), [20, 20])
    assert {int(images.labels[k]) for k in found.examples} == {1, 3}


def test_what_is_found_is_in_the_tables_and_on_the_page(tmp_path):
    points, images = clusters()
    pixels = images.images.clone()
    pixels[25], points[25] = pixels[0], points[0]  # of another class
    points[17] = -F.normalize(points.mean(dim=0), dim=0)
    images = ImageSet(pixels, images.labels, images.class_names)
    roles = ("train",) * 20 + ("test",) * 140
    judged = audit(points, images, roles=roles)
    faults = find_faults(judged)
    write_faults(tmp_path, judged, faults)
    rows = {path.stem: list(csv.DictReader(path.open(newline=""))) for path in tmp_path.glob("*.csv")}
    assert [row["path"] for row in rows["duplicates"]] == ["image 0", "image 25"]
    assert {(row["copy"], row["across_classes"], row["across_parts"]) for row in rows["duplicates"]} == {
        ("exact", "yes", "yes")
    }
    assert rows["outliers"][0]["path"] == "image 17"
    html = audit_page(judged, [], title="Audit", faults=faults)
    assert "Exact copies across classes and parts" in html
    assert "image 25 (b, test)" in html
    assert "Far from all others" in html
    assert "Exact copies" not in audit_page(judged, [], title="Audit")


@pytest.mark.slow
def test_thousands_of_classes_are_compared_in_bounded_memory():
    classes = 6_000  # the distances of their means are more than torch's quantile takes
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(classes).repeat_interleave(5)
    noise = 0.1 * torch.randn(len(labels), 32, generator=generator)
    points = torch.nn.functional.normalize(torch.randn(classes, 32, generator=generator)[labels] + noise)
    pixels = torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8)
    images = ImageSet(pixels, labels, tuple(f"class {k}" for k in range(classes)))
    assert find_merges(points, images) == find_splits(points, images) == []
