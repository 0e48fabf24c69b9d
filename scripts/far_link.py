"""A cable that is long: what goes into one network interface comes out of another one later.

For scripts/lan.py, where the kernel has no netem. Linux only; a thread that hands raw frames on.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import heapq
import select
import socket
import struct
import sys
import threading
import time

_ALL = 0x0003  # ETH_P_ALL
_OUTGOING = 4  # PACKET_OUTGOING
_SIOCETHTOOL = 0x8946
_OFFLOADS = (0x17, 0x1F, 0x24, 0x2C)  # ETHTOOL_STXCSUM, STSO, SGSO, SGRO: see linux/ethtool.h
_LARGEST = 65536


def without_offload(device: str) -> None:
    """Frames on it are as they would be on a wire: whole checksums, none larger than its MTU."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for command in _OFFLOADS:
            off = array.array("I", [command, 0])
            request = struct.pack("16sP", device.encode(), off.buffer_info()[0])
            fcntl.ioctl(asked, _SIOCETHTOOL, request)


class FarLink(threading.Thread):
    """Between two interfaces of this namespace, `delay_s` each way, until the process ends."""

    def __init__(self, one: str, other: str, delay_s: float) -> None:
        super().__init__(daemon=True, name=f"{one} to {other}")
        self._delay_s = delay_s
        ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL)) for _ in "12"]
        for end, device in zip(ends, (one, other), strict=True):
            end.bind((device, 0))
            end.setblocking(False)
        self._to = {ends[0]: ends[1], ends[1]: ends[0]}

    def run(self) -> None:
        under_way: list[tuple[float, int, socket.socket, bytes]] = []
        count = 0
        while True:
            wait_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
            for end in select.select([*self._to], [], [], wait_s)[0]:
                try:
                    frame, address = end.recvfrom(_LARGEST)
                except OSError:  # it is unplugged: said once, and nothing comes until it is back
                    continue
                if address[2] != _OUTGOING:  # what this thread sends is seen here as well
                    count += 1
                    due = time.monotonic() + self._delay_s
                    heapq.heappush(under_way, (due, count, self._to[end], frame))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, to, frame = heapq.heappop(under_way)
                with contextlib.suppress(OSError):  # unplugged: what is under way is lost
                    to.send(frame)


if __name__ == "__main__":
    without_offload(sys.argv[1])  # of an interface in another namespace
