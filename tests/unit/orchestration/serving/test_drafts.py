"""What is guessed of text that repeats itself, and of text that does not."""

from __future__ import annotations

import random

from exo.orchestration.serving.drafts.prompt_lookup import MAX_DRAFTS, PromptLookup
from exo.orchestration.serving.pace import CAUTION, FIRST_WORTH, Pace


def test_what_followed_before_is_guessed_to_follow_again() -> None:
    text = [*range(100, 120), 1, 2, 100, 101, 102]
    assert PromptLookup(text).draft(0.3, 99)[:1] == [103]
    longer = [*range(100, 120), 1, *range(100, 112)]
    assert PromptLookup(longer).draft(0.3, 99) == [112, 113, 114, 115, 116, 117, 118]
    assert PromptLookup(longer).draft(0.3, 2) == [112, 113]
    assert PromptLookup([1, 2, 3, 4]).draft(0.3, 99) == []
    assert PromptLookup([1, 2, 3]).draft(0.3, 99) == []


def test_the_latest_occurrence_counts() -> None:
    text = [1, 2, 3, 7, 1, 2, 3, 8, 5, 1, 2, 3]
    assert PromptLookup(text).draft(0.3, 1) == [8]


def test_a_loop_goes_around_beyond_the_end() -> None:
    text = [9, 9, *([1, 2, 3, 4] * 5)]
    guesses = PromptLookup(text).draft(0.05, 99)
    assert guesses == ([1, 2, 3, 4] * 5)[: len(guesses)] and len(guesses) > 4


def test_who_is_right_guesses_more_and_who_is_wrong_stops() -> None:
    text = [*range(100, 400), 1, *range(100, 120)]
    lookup = PromptLookup(text)
    first = len(lookup.draft(0.3, 99))
    for _ in range(20):
        guesses = lookup.draft(0.3, 99)
        lookup.verified(len(guesses), len(guesses))
        text += guesses
    assert len(lookup.draft(0.3, 99)) == MAX_DRAFTS > first
    for _ in range(20):
        lookup.verified(0, 5)
    assert lookup.draft(0.3, 99) == []


def test_where_nothing_is_right_little_is_tried() -> None:
    rng = random.Random(0)
    text = [rng.randrange(6) for _ in range(2000)]  # every three tokens have come before
    lookup, tried = PromptLookup(text), 0
    for _ in range(2000):
        guesses = lookup.draft(FIRST_WORTH, 99)
        text.append(rng.randrange(6))
        if guesses:
            right = int(guesses[0] == text[-1])
            lookup.verified(right, len(guesses))
            tried += len(guesses)
    assert tried < 250


def test_a_row_is_worth_what_a_step_pays_for_it() -> None:
    pace = Pace(1)
    assert pace.draft_worth(1) == FIRST_WORTH
    for _ in range(50):
        for rows in (1, 4, 8):
            pace.took(0.003 + 0.001 * rows, rows, 0)
    assert abs(pace.draft_worth(1) - 0.25 * CAUTION) < 0.01
    assert pace.draft_worth(9) > 0.99, "among many a guess has to be certain"
    assert pace.best_batch() == 27  # where nine tenths of 1000 a second are reached
