"""What is remembered of the use of models."""

from pathlib import Path

import pytest

from exo.orchestration.files import usage
from exo.orchestration.files.usage import HALF_LIFE_S, Usage


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    at = [1e9]
    monkeypatch.setattr(usage.time, "time", lambda: at[0])
    return at


def test_what_was_used_much_lately_comes_first_and_is_remembered(
    tmp_path: Path, now: list[float]
) -> None:
    file = tmp_path / "home" / "usage.json"
    first = Usage(file)
    for model in ("often", "once", "often", "often"):
        first.note(model)
    first.write()
    assert Usage(file).most_used() == ["often", "once"]
    now[0] += 3 * HALF_LIFE_S
    second = Usage(file)
    second.note("once")
    assert second.most_used() == ["once", "often"]  # 1.125 against 0.375
    second.write()
    assert Usage(file).last_used() == {"often": 1e9, "once": now[0]}


def test_two_nodes_write_one_file(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    nodes = [Usage(file), Usage(file)]
    for node in nodes:
        node.note("first write")
        node.note("m")
    for node in nodes:
        node.write()
    assert set(Usage(file).most_used()) == {"first write", "m"}
    assert Usage(file)._uses()["m"].score == pytest.approx(2, abs=0.01)


@pytest.mark.parametrize("text", ["", "[]", '{"m": 3}', '{"m": {"score": "x"}}'])
def test_a_damaged_file_begins_anew(text: str, tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    file.write_text(text)
    damaged = Usage(file)
    assert damaged.most_used() == []
    damaged.note("m")
    damaged.write()
    assert Usage(file).most_used() == ["m"]
