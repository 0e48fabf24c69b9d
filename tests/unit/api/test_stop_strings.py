from hypothesis import given
from hypothesis import strategies as st

from exo.api.stop_strings import StopStrings

text = st.text(alphabet="abc", max_size=40)
stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text, stops, st.lists(st.integers(1, 5), min_size=1))
def test_nothing_of_a_stop_string_leaks_however_the_text_is_cut(
    whole: str, stop: list[str], sizes: list[int]
) -> None:
    filtered = StopStrings(stop)
    given_out = ""
    stopped = None
    position = step = 0
    while position < len(whole) and not stopped:
        size = sizes[step % len(sizes)]
        piece, stopped = filtered.add(whole[position : position + size])
        given_out += piece
        position += size
        step += 1
    if not stopped:
        given_out += filtered.finish()
    ends = [whole.find(s) for s in stop if s in whole]
    if not ends:
        assert given_out == whole
    else:
        assert not any(s in given_out for s in stop)
        assert whole.startswith(given_out)


def test_text_that_only_begins_like_a_stop_string_is_given_out_late_but_whole() -> None:
    filtered = StopStrings(["END"])
    assert filtered.add("the EN") == ("the ", None)
    assert filtered.add("gine") == ("ENgine", None)
    assert filtered.add(" EN") == (" ", None)
    assert filtered.finish() == "EN"
