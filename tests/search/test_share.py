"""Which images one of several processes takes."""

import pytest

from pfml.search import Share


@pytest.mark.parametrize("text", ["0/4", "5/4", "2", "2/0", "a/b", "1/2/3", ""])
def test_a_share_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="a share must be"):
        Share.parsed(text)


def test_a_share_is_parsed_or_given_by_torchrun():
    assert (Share.parsed("2/8"), Share.parsed("all")) == (Share(2, 8), Share(1, 1))
    assert Share.of_process({"RANK": "1", "WORLD_SIZE": "8"}) == Share(2, 8)
    assert Share.of_process({}) == Share.of_process({"RANK": "0", "WORLD_SIZE": "1"}) == Share(1, 1)
    with pytest.raises(ValueError, match="RANK must be a number from 0 to WORLD_SIZE - 1, got RANK='3'"):
        Share.of_process({"RANK": "3", "WORLD_SIZE": "3"})


def test_shares_are_about_equal_and_names_need_not_be_unicode():
    counts = [sum(Share(number, 4).holds(f"/photos/{k}.jpg") for k in range(4000)) for number in range(1, 5)]
    assert sum(counts) == 4000
    assert min(counts) > 880
    assert sum(Share(number, 3).holds("/photos/\udce9.jpg") for number in (1, 2, 3)) == 1
