"""Everything of a run that outlives a broker, in one place, for those who act in it."""

from collections.abc import Callable
from dataclasses import dataclass

from firepool_broker.core.asks import Failure
from firepool_broker.sim.clients import Clients
from firepool_broker.sim.clock import Clock
from firepool_broker.sim.faults import Dice
from firepool_broker.sim.ledger import Ledger, Row
from firepool_broker.sim.venue import Venue
from firepool_broker.sim.yard import Yard
from firepool_wire.words import Fault


@dataclass(slots=True, kw_only=True)
class Scene:
    """Everything of a run that outlives a broker."""

    clock: Clock
    dice: Dice
    venue: Venue
    log: Callable[..., None]
    yard: Yard
    ledger: Ledger
    clients: Clients

    def log_row(self, row: Row) -> None:
        """Write the fact that a row became durable."""
        self.log(
            "row",
            job=row.ask.job,
            state=row.state,
            version=row.version,
            attempt=row.attempt,
            retry=row.retry_count,
            pods=row.pods,
            path=row.path,
            why=row.why_not_warmer,
            code=row.exit.exit_code if row.exit is not None else None,
            failure=row.failure.code if row.failure is not None else None,
        )


def failure(code: str, message: str) -> Failure:
    """A retryable infrastructure failure."""
    return Failure(code=code, message=message, fault=Fault.INFRA, retryable=True)
