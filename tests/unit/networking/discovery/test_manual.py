import asyncio
import json
from pathlib import Path

import pytest
from unit.networking.discovery.test_udp import Heard

from exo.errors import InvalidRequest
from exo.networking.discovery.base import Route
from exo.networking.discovery.manual import ManualDiscovery, parse_peer


@pytest.mark.parametrize("text", ["", "host", "host:", ":80", "host:0", "host:99999", "host:x"])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="is not host:port"):
        parse_peer(text)


@pytest.mark.parametrize("content", ["{", "3", '{"peers": 1}', "[1]", '["host"]'])
def test_a_file_that_lists_no_peers_is_refused_at_start(content: str, tmp_path: Path) -> None:
    file = tmp_path / "peers.json"
    file.write_text(content)
    with pytest.raises(InvalidRequest):
        ManualDiscovery(str(file))


async def test_the_file_is_read_again_when_it_changes_and_broken_ones_are_ignored(
    tmp_path: Path,
) -> None:
    file = tmp_path / "peers.json"
    file.write_text('["10.9.9.9:1"]')
    discovery = ManualDiscovery(str(file), interval_s=0.01)
    told: list[Route] = []

    class Listener(Heard):
        def heard(self, node_id: str, instance_id: str, route: Route) -> None:
            told.append(route)
            self.changed.set()

    listener = Listener()
    await discovery.start(listener, 1)
    await listener.until(lambda: Route("10.9.9.9", 1) in told)
    file.write_text("{ an editor is writing")
    await asyncio.sleep(0.03)
    file.write_text(json.dumps({"peers": ["10.9.9.8:2"]}))
    await listener.until(lambda: Route("10.9.9.8", 2) in told)
    await discovery.stop()
