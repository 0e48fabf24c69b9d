"""An engine that raises at any point of a step, anywhere in the ring: the client gets a typed error
within seconds and the next request succeeds. All at DEBUG=9, as every process of the tests."""

import time
from pathlib import Path

import pytest
from cluster import ApiError, cluster

HEAD, MIDDLE, TAIL = "head", "middle", "tail"
MEMORY = {HEAD: "3GB", MIDDLE: "2GB", TAIL: "1GB"}

# The warm-up is the first forward; the request's prompt the second, its tokens those after it.
FAULTS = [
    *[("load=1", where) for where in MEMORY],
    *[("forward=1", where) for where in MEMORY],
    *[("forward=2", where) for where in MEMORY],
    *[("forward=6", where) for where in MEMORY],
    ("sample=1", TAIL),
    ("sample=4", TAIL),
    *[(f"encode={n}", where) for n in (1, 4) for where in (HEAD, MIDDLE)],
]


@pytest.mark.parametrize(("fault", "where"), FAULTS)
async def test_a_raising_engine_is_an_error_and_then_over(
    fault: str, where: str, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as c:
        for name, memory in MEMORY.items():
            faults = fault if name == where else ""
            c.add(name, "--memory", memory, EXO_DUMMY_FAULTS=faults)
        await c.together()
        client = c.nodes[TAIL if where == HEAD else HEAD]
        began = time.monotonic()
        with pytest.raises(ApiError) as failed:
            await client.chat()
        assert time.monotonic() - began < 5
        expected = "invalid_frame" if fault.startswith("encode") else "engine_failed"
        assert failed.value.code == expected, failed.value
        began = time.monotonic()
        answer = await client.chat()
        assert time.monotonic() - began < 5
        assert len(answer) == 12
        assert all(node.lives for node in c.nodes.values())
        assert await client.chat() == answer
