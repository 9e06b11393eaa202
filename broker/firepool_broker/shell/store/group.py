"""One group of writes inside one transaction.

Nearly always every write of a group wins. So the group is first tried with one statement per run of like writes; only the
counts are compared. If one does not fit, the transaction is rolled back and the group is applied write by write, in call
order, so that exactly the losers lose and learn why.
"""

import sqlite3
from collections.abc import Sequence

from firepool_broker.shell.rows import Lost, StoreDown, Won
from firepool_broker.shell.store import statements
from firepool_broker.shell.store.entries import Entry, Kind, placed
from firepool_broker.shell.store.statements import Row
from firepool_wire.words import JobState

Answer = Won | Lost | StoreDown

#: What a single impossible write raises (a number past 64 bits, a missing value), as opposed to a disk that fails.
_IMPOSSIBLE = (
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
    sqlite3.DataError,
    ValueError,
    OverflowError,
)

_STATEMENTS = {
    Kind.INSERT: statements.INSERT,
    Kind.START: statements.START,
    Kind.END: statements.END,
    Kind.REQUEUE: statements.REQUEUE,
    Kind.MOVE: statements.MOVE,
}


def all_at_once(connection: sqlite3.Connection, group: Sequence[Entry], seq: int) -> list[Answer] | None:
    """Apply the group, the first write at place `seq`; None: some write lost, the transaction must be rolled back."""
    try:
        return _all_at_once(connection, group, seq)
    except _IMPOSSIBLE:
        return None


def _all_at_once(connection: sqlite3.Connection, group: Sequence[Entry], seq: int) -> list[Answer] | None:
    answers: dict[int, Answer] = {}
    for layer in _layers(group):
        for kind in Kind:
            places = [i for i in layer if group[i].kind is kind]
            if not places:
                continue
            versions = _apply(connection, kind, [placed(group[i], seq + i) for i in places])
            if versions is None:
                return None
            answers.update((i, Won(v, seq + i)) for i, v in zip(places, versions, strict=True))
    # In call order over all layers: the newest binding of a pod is the one written last.
    bindings = [row for item in group for row in item.bindings]
    if bindings:
        statements.run(connection, statements.BIND, bindings)
    return [answers[i] for i in range(len(group))]


def one_by_one(connection: sqlite3.Connection, group: Sequence[Entry], seq: int) -> list[Answer]:
    """Apply the group write by write; one that is lost or impossible changes nothing."""
    answers: list[Answer] = []
    for i, item in enumerate(group):
        connection.execute("SAVEPOINT alone")
        try:
            answers.append(_alone(connection, item, seq + i))
        except _IMPOSSIBLE as error:
            connection.execute("ROLLBACK TO alone")
            answers.append(StoreDown(f"a write on job {item.job} is impossible: {error}"))
        connection.execute("RELEASE alone")
    return answers


def _alone(connection: sqlite3.Connection, item: Entry, seq: int) -> Answer:
    versions = _apply(connection, item.kind, [placed(item, seq)])
    if versions is None:
        return _lost(connection, item)
    if item.bindings:
        statements.run(connection, statements.BIND, item.bindings)
    return Won(versions[0], seq)


def _apply(connection: sqlite3.Connection, kind: Kind, rows: list[Row]) -> list[int] | None:
    """Run one kind's statement; the rows' new versions, or None where not every row took it."""
    if kind is Kind.MOVE:
        moved: dict[str, int] = dict(statements.returning(connection, statements.MOVE, rows))
        return [moved[row[0]] for row in rows] if len(moved) == len(rows) else None
    if kind is Kind.REQUEUE:
        statements.run(connection, statements.KEEP, [row[: statements.KEEP.width] for row in rows])
    if statements.run(connection, _STATEMENTS[kind], rows) != len(rows):
        return None
    return [1 if kind is Kind.INSERT else row[1] + 1 for row in rows]


def _layers(group: Sequence[Entry]) -> list[list[int]]:
    """Places of the group in layers: a job occurs once per layer, its second write comes a layer later, and so on."""
    layers: list[list[int]] = []
    seen: dict[str, int] = {}
    for i, item in enumerate(group):
        depth = seen.get(item.job, -1) + 1
        seen[item.job] = depth
        if depth == len(layers):
            layers.append([])
        layers[depth].append(i)
    return layers


def _lost(connection: sqlite3.Connection, item: Entry) -> Lost:
    if item.kind is Kind.INSERT:
        caller, key = item.key
        row = connection.execute("SELECT id, state FROM jobs WHERE caller = ? AND key = ?", (caller, key)).fetchone()
        if row is not None:
            return Lost("the idempotency key is taken", JobState(row[1]), row[0])
    row = connection.execute("SELECT state, version FROM jobs WHERE id = ?", (item.job,)).fetchone()
    if row is None:
        return Lost("there is no such job")
    state = JobState(row[0])
    if item.kind is Kind.INSERT:
        return Lost("the job id is taken", state, item.job)
    if item.version is not None and item.version != row[1]:
        return Lost(f"the row is at version {row[1]}, not {item.version}", state)
    return Lost(f"the job is {state}", state)
