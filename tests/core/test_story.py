"""Stories: one ring, capped, read along each record's own links."""

import pytest

from firepool_broker.core.records import Record
from firepool_broker.core.story import Story


def test_a_story_has_times_and_causes_oldest_first() -> None:
    story, pod = Story(), Record("p")
    story.cause, story.now = "Woke", 1.5
    story.note(pod, "starting")
    story.now = 2.0
    story.note(pod, "idle")
    assert story.of("p", pod) == ["1.500 p: starting <- Woke", "2.000 p: idle <- Woke"]


def test_stories_do_not_mix() -> None:
    story, pod, job = Story(), Record("p"), Record("j")
    for step in range(3):
        story.note(pod, f"p{step}")
        story.note(job, f"j{step}")
    assert [line.split(": ")[1][:2] for line in story.of("j", job)] == ["j0", "j1", "j2"]


def test_the_ring_is_capped_and_forgets_the_oldest() -> None:
    story, pod, job = Story(4), Record("p"), Record("j")
    story.note(job, "long ago")
    for step in range(10):
        story.note(pod, str(step))
    assert len(story) == 4
    assert [line.split(": ")[1][0] for line in story.of("p", pod)] == ["6", "7", "8", "9"]
    assert story.of("j", job) == []


def test_a_story_of_something_that_is_over_is_found_by_its_name() -> None:
    story, pod = Story(), Record("p")
    story.note(pod, "starting")
    story.note(pod, "gone")
    assert story.of("p") == []
    story.bury(pod)
    assert len(story.of("p")) == 2
    assert story.of("nobody") == []


def test_the_capacity_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="power of two"):
        Story(1000)


def test_a_story_is_read_up_to_a_limit() -> None:
    story, pod = Story(), Record("p")
    for step in range(9):
        story.note(pod, str(step))
    assert len(story.of("p", pod, limit=2)) == 2
