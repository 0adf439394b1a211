"""Which images one of several processes takes."""

import pytest

from pfml.search import ImageShard
from processes import as_launched


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/0", "a/b", "1/2/3", ""])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a shard must be"):
        ImageShard.parsed(text)


def test_a_shard_is_parsed_or_given_by_torchrun(monkeypatch):
    assert (ImageShard.parsed("2/8"), ImageShard.parsed("all")) == (ImageShard(2, 8), ImageShard(1, 1))
    for rank, size, shard in (("1", "8", ImageShard(2, 8)), ("0", "1", ImageShard(1, 1))):
        as_launched(monkeypatch, rank, size)
        assert ImageShard.of_process() == shard
    as_launched(monkeypatch, "3", "3")
    with pytest.raises(ValueError, match=r"RANK must lie in \[0, WORLD_SIZE\), got 3 and 3"):
        ImageShard.of_process()
    monkeypatch.delenv("RANK")
    assert ImageShard.of_process() == ImageShard(1, 1)


def test_shards_are_about_equal_and_names_need_not_be_unicode():
    counts = [sum(ImageShard(number, 4).holds(f"/photos/{k}.jpg") for k in range(4000)) for number in range(1, 5)]
    assert sum(counts) == 4000
    assert min(counts) > 880
    assert sum(ImageShard(number, 3).holds("/photos/\udce9.jpg") for number in (1, 2, 3)) == 1


def test_an_image_is_in_the_same_shard_for_ever():
    """A folder that an earlier pfml began is completed by this one: the rule may not change."""
    paths = ("/photos/a.jpg", "/photos/b.jpg", "/photos/c d.png", "/photos/ü.jpg")
    for count, expected in ((3, [2, 3, 1, 3]), (8, [5, 6, 6, 5])):
        found = [[k for k in range(1, count + 1) if ImageShard(k, count).holds(path)] for path in paths]
        assert found == [[number] for number in expected]
