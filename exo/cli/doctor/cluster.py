"""The cluster as the node on this machine sees it: who cannot be reached, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from exo.cli.doctor.finding import Finding

SLOW_LINK_MS = 30.0


def cluster(view: dict[str, Any]) -> Iterator[Finding]:
    """What is wrong in the answer of /v1/topology."""
    nodes = view["nodes"]
    own = nodes[view["self"]]
    if own["problem"]:
        yield Finding("this node", "wrong", own["problem"], "start it with another --node-id")
    others = [node for node in nodes.values() if node is not own]
    alive = [node for node in others if node["state"] == "alive"]
    for node in others:
        if node["problem"]:  # it is unreachable, or alive and its name is used twice
            yield Finding(node["node_id"], "wrong", node["problem"], _mend(node["problem"]))
        elif node["state"] == "connecting":
            text = "was heard a moment ago and is being connected to"
            yield Finding(node["node_id"], "note", text, "look again in a few seconds")
    for link in view["links"]:
        if (link["round_trip_ms"] or 0.0) > SLOW_LINK_MS:
            text = f"a round trip to {link['target']} takes {link['round_trip_ms']:.0f} ms"
            mend = "a cable instead of Wi-Fi; or leave it out: exo drain " + str(link["target"])
            yield Finding("links", "note", text, mend)
    yield from _heard(view["status"]["discovery"], bool(alive))
    for item in view["activity"]:
        if item["phase"] == "failed":
            text = f"{item['model']} on {item['node_id']}: {item['warning']}"
            yield Finding("models", "wrong", text, f"exo download {item['model']}")
    yield Finding("cluster", "ok", _together(alive, is_sealed=view["status"]["sealed"]))


def _together(alive: list[dict[str, Any]], *, is_sealed: bool) -> str:
    if not alive:
        return "this node alone"
    names = ", ".join(node["node_id"] for node in alive)
    if is_sealed:
        return f"this node with {names}; what they say to each other is encrypted"
    return f"this node with {names}; not encrypted (--cluster-key-file does it)"


def _mend(problem: str) -> str:
    """What to do about a problem that a node names, by its words."""
    if "protocol" in problem or "version" in problem:
        return "install the same version of exo on both nodes"
    if "call themselves" in problem or "node id" in problem:
        return "start one of the two with another --node-id"
    if "cluster key" in problem:
        return "start both with the same --cluster-key-file"
    if "cluster" in problem:
        return "start both with the same --cluster"
    if "cannot connect back" in problem:
        return "let exo's port through this machine's firewall (--node-port fixes it)"
    return "let exo's port through its firewall (--node-port fixes it there)"


def _heard(counters: dict[str, int], has_peers: bool) -> Iterator[Finding]:
    if counters.get("other_cluster"):
        text = "nodes of a cluster with another name are heard"
        mend = "for one cluster start all with the same --cluster"
        yield Finding("discovery", "note" if has_peers else "wrong", text, mend)
    if counters.get("version"):
        text = "nodes that announce themselves in another way are heard: another version of exo"
        yield Finding("discovery", "wrong", text, "install the same version on all nodes")
    if counters.get("send_failed"):
        text = "announcements could not be sent on some interface"
        yield Finding("discovery", "note", text, "--interface NAME with one that works")
    if not has_peers and not any(map(counters.get, ("heard", "other_cluster", "other_key"))):
        text = "no other node is heard"
        mend = "start exo on another machine; where broadcast does not pass: --peers HOST:PORT"
        yield Finding("discovery", "note", text, mend)
