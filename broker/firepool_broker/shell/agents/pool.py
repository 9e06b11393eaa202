"""Connections to agents: dialled when needed, kept while idle in one LRU over all pods, dropped when their pod goes.

Only `client` calls this.
"""

import asyncio
from collections import OrderedDict, deque

from firepool_broker.shell.agents.http1 import Connection
from firepool_broker.shell.ports import AgentUnreachable

#: Idle connections kept over all pods. Raise: fewer dials on large fleets; costs a file descriptor each.
MAX_IDLE = 1_000
DIAL_TIMEOUT_S = 2.0


class Connections:
    """Idle connections by address; the least recently used address loses its connections first."""

    def __init__(self, max_idle: int = MAX_IDLE) -> None:
        self._idle: OrderedDict[str, deque[Connection]] = OrderedDict()
        self._count = 0
        self._max_idle = max_idle
        #: Every open connection, so that closing leaves nothing behind.
        self._open: set[Connection] = set()

    async def take(self, address: str) -> Connection:
        """An idle connection to the agent, or a new one.

        Raises:
            AgentUnreachable: nobody listens (`refused`), or the dial timed out.
        """
        kept = self.kept(address)
        return kept if kept is not None else await self.dial(address)

    def kept(self, address: str) -> Connection | None:
        """An idle connection that is still open, or None."""
        queue = self._idle.get(address)
        while queue:
            connection = queue.pop()
            self._count -= 1
            if not queue:
                del self._idle[address]
            if not connection.closed:
                return connection
            self._open.discard(connection)
        return None

    async def dial(self, address: str) -> Connection:
        """A new connection. Raises: AgentUnreachable."""
        scheme, _, path = address.partition(":")
        if scheme != "unix":
            raise AgentUnreachable(f"no way to dial {address!r}: local agents listen on Unix sockets", refused=True)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_S):
                _, connection = await loop.create_unix_connection(lambda: Connection(loop), path)
        except TimeoutError:
            raise AgentUnreachable(f"dialling {path} timed out after {DIAL_TIMEOUT_S} s") from None
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise AgentUnreachable(f"nobody listens at {path}: {error}", refused=True) from error
        except OSError as error:
            raise AgentUnreachable(f"dialling {path} failed: {error}") from error
        self._open.add(connection)
        return connection

    def give_back(self, address: str, connection: Connection) -> None:
        """Keep the connection for the next call when it can carry one, else drop it."""
        if not connection.reusable:
            self.drop(connection)
            return
        self._idle.setdefault(address, deque()).append(connection)
        self._idle.move_to_end(address)
        self._count += 1
        while self._count > self._max_idle:
            _, oldest = self._idle.popitem(last=False)
            self._count -= len(oldest)
            for idle in oldest:
                self.drop(idle)

    def drop(self, connection: Connection) -> None:
        """Close the connection now."""
        self._open.discard(connection)
        connection.abort()

    def forget(self, address: str) -> None:
        """Drop the idle connections of a pod that is gone."""
        for connection in self._idle.pop(address, ()):
            self._count -= 1
            self.drop(connection)

    @property
    def idle(self) -> int:
        """Connections that wait for their next call."""
        return self._count

    def close(self) -> None:
        """Drop everything."""
        for connection in list(self._open):
            self.drop(connection)
        self._idle.clear()
        self._count = 0
