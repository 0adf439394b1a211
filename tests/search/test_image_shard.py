"""Which images one of several processes takes."""

import pytest

from pfml.search import ImageShard


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/0", "a/b", "1/2/3", ""])
def test_a_shard_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a shard must be"):
        ImageShard.parsed(text)


def test_a_shard_is_parsed_or_given_by_torchrun():
    assert (ImageShard.parsed("2/8"), ImageShard.parsed("all")) == (ImageShard(2, 8), ImageShard(1, 1))
    assert ImageShard.of_process({"RANK": "1", "WORLD_SIZE": "8"}) == ImageShard(2, 8)
    assert ImageShard.of_process({}) == ImageShard.of_process({"RANK": "0", "WORLD_SIZE": "1"}) == ImageShard(1, 1)
    with pytest.raises(ValueError, match="RANK must be a number from 0 to WORLD_SIZE - 1, got RANK='3'"):
        ImageShard.of_process({"RANK": "3", "WORLD_SIZE": "3"})


def test_shards_are_about_equal_and_names_need_not_be_unicode():
    counts = [sum(ImageShard(number, 4).holds(f"/photos/{k}.jpg") for k in range(4000)) for number in range(1, 5)]
    assert sum(counts) == 4000
    assert min(counts) > 880
    assert sum(ImageShard(number, 3).holds("/photos/\udce9.jpg") for number in (1, 2, 3)) == 1
