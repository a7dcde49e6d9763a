"""A TCP proxy before PostgreSQL that does something to a connection at its COMMIT, or at any other message.

It knows of the protocol (PostgreSQL's documentation, "Message Formats") only where a message ends, and which one is a
COMMIT. Who a connection belongs to is told by its `application_name`.
"""

from __future__ import annotations

import asyncio
import enum
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

COMMIT = b"COMMIT\0"
SIMPLE_QUERY = b"Q"


class Fate(enum.Enum):
    """What happens to a connection, and to whoever has it."""

    NOTHING = "nothing"
    CUT = "cut before"
    """The connection is cut, and the message does not get to the server."""
    KILL = "killed before"
    """The process is killed, and the message gets to the server."""
    FREEZE = "frozen before"
    """The process is stopped, and the message gets to the server."""
    CUT_AFTERWARDS = "cut after"
    """The server has answered, and the answer is not delivered."""
    KILL_AFTERWARDS = "killed after"
    """The server has answered, and the process is killed before it knows."""
    FREEZE_AFTERWARDS = "frozen after"
    """The server has answered, and the process is stopped; the answer waits for it."""


AFTERWARDS = (Fate.CUT_AFTERWARDS, Fate.KILL_AFTERWARDS, Fate.FREEZE_AFTERWARDS)
KILLS = (Fate.KILL, Fate.KILL_AFTERWARDS)
FREEZES = (Fate.FREEZE, Fate.FREEZE_AFTERWARDS)
CUTS = (Fate.CUT, Fate.CUT_AFTERWARDS)


class Proxy:
    """Listens on `port` of the loopback address while the block lasts, and forwards to a server's socket.

    `decide(name, is_commit)` returns the fate of one message of the connection whose `application_name` is `name`;
    `act(name, fate)` kills or stops that process. Both are called on the proxy's own thread.
    """

    def __init__(self, socket_path: str, decide: Callable[[str, bool], Fate], act: Callable[[str, Fate], None]) -> None:
        self.socket_path = socket_path
        self.decide = decide
        self.act = act
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        listening = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(listening, self._loop).result()
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            connection = _Connection(self, reader, writer)
            with suppress(OSError, asyncio.IncompleteReadError):
                await connection.serve(self.socket_path)
        finally:
            writer.close()


class _Connection:
    def __init__(self, proxy: Proxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.proxy = proxy
        self.reader = reader
        self.writer = writer
        self.name = ""
        self.later = Fate.NOTHING
        """What is to happen once the server has answered."""

    async def serve(self, socket_path: str) -> None:
        """Forward in both directions until one of the two ends, or until the connection is cut."""
        (length,) = struct.unpack("!I", first := await self.reader.readexactly(4))
        startup = await self.reader.readexactly(length - 4)
        self.name = _application_name(startup)
        answers, server = await asyncio.open_unix_connection(socket_path)
        try:
            server.write(first + startup)
            directions = [asyncio.create_task(self._ask(server)), asyncio.create_task(self._answer(answers))]
            try:
                await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for direction in directions:
                    direction.cancel()
                await asyncio.gather(*directions, return_exceptions=True)
        finally:
            server.close()

    async def _ask(self, server: asyncio.StreamWriter) -> None:
        while True:
            kind, length = struct.unpack("!cI", header := await self.reader.readexactly(5))
            message = await self.reader.readexactly(length - 4)
            fate = self.proxy.decide(self.name, kind == SIMPLE_QUERY and message == COMMIT)
            if fate is Fate.CUT:
                return
            if fate in AFTERWARDS:
                self.later = fate
            elif fate is not Fate.NOTHING:
                self.proxy.act(self.name, fate)
            server.write(header + message)
            await server.drain()

    async def _answer(self, answers: asyncio.StreamReader) -> None:
        while chunk := await answers.read(1 << 16):
            # The server sends its answer to a COMMIT at once, and nothing else before that.
            fate, self.later = self.later, Fate.NOTHING
            if fate is Fate.CUT_AFTERWARDS:
                return
            if fate is not Fate.NOTHING:
                self.proxy.act(self.name, fate)
            self.writer.write(chunk)
            await self.writer.drain()


def _application_name(startup: bytes) -> str:
    """Return the `application_name` of a start-up message without its length: a version, then names and values."""
    parts = startup[4:].split(b"\0")
    return dict(zip(parts[::2], parts[1::2], strict=False)).get(b"application_name", b"").decode()
