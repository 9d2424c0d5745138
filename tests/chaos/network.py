"""A network between devices and their server: slow, cut, reset, or silent."""

import asyncio
import random
import socket
import struct
import threading
from contextlib import suppress

from coterie.deploy.keys import free_port

FAULTS = {
    "slow": "each piece of 2 KiB takes 50 ms",
    "cut": "every connection ends after some bytes, within a message",
    "reset": "every connection is reset",
    "silent": "connections stay open, and nothing passes on them any more",
}
_PIECE = 2048
_NO_LINGER = struct.pack("ii", 1, 0)  # so that closing a socket resets the connection


class Network:
    """A TCP proxy, in a thread of its own.

    Args:
        behind: The port of the server.
        rng: By which connections are cut.

    Attributes:
        port: At which devices connect.
        fault: One of `FAULTS`; empty: none.
    """

    def __init__(self, behind: int, rng: random.Random) -> None:
        self.port, self.fault, self._behind, self._rng = free_port(), "", behind, rng
        self._open: set[asyncio.StreamWriter] = set()
        listening = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listening)), daemon=True
        )
        self._thread.start()
        assert listening.wait(10)

    def break_down(self, fault: str) -> None:
        """Have a fault from now on; open connections get it too."""
        self.fault = fault
        if fault == "reset":
            self._loop.call_soon_threadsafe(self._reset)

    async def _serve(self, listening: threading.Event) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with await asyncio.start_server(self._meet, "127.0.0.1", self.port):
            listening.set()
            await self._closing.wait()
            self._reset()

    def close(self) -> None:
        """End it, and all connections."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(10)

    def _reset(self) -> None:
        for writer in list(self._open):
            with suppress(OSError):  # it may be closed already
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER
                )
            writer.transport.abort()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._behind)
            both = {writer, inner_writer}
            self._open |= both
            await asyncio.gather(
                self._carry(reader, inner_writer, both), self._carry(inner_reader, writer, both)
            )
        writer.close()

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        both: set[asyncio.StreamWriter],
    ) -> None:
        with suppress(OSError):
            left = self._rng.randrange(1, 20_000)
            while piece := await reader.read(_PIECE):
                if self.fault == "silent":
                    await self._closing.wait()  # the way between the two is gone for good
                if self.fault == "slow":
                    await asyncio.sleep(0.05)
                if self.fault == "reset":
                    self._reset()
                if self.fault == "cut" and (left := left - len(piece)) <= 0:
                    piece = piece[: len(piece) // 2]
                    break
                writer.write(piece)
                await writer.drain()
            if self.fault == "cut":
                writer.write(piece)
        self._open -= both
        for end in both:
            end.close()
