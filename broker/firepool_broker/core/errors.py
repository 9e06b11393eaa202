"""What the core raises, which is only ever a bug of ours, and how it makes the failures that it reports.

Expected outcomes (no pod free, quota reached, commit lost) are values, never exceptions. The two exceptions here carry
the story of what they are about, so that one line in a log is enough to understand the wrong step.
"""

from collections.abc import Sequence

from firepool_broker.core.asks import Failure
from firepool_wire.errors import TABLE


class CoreError(Exception):
    """Base of the core's exceptions: a message and the story that led to it."""

    def __init__(self, message: str, story: Sequence[str] = ()) -> None:
        self.message = message
        self.story = tuple(story)
        super().__init__("\n  ".join((message, *self.story)))


class InvalidTransition(CoreError):
    """A job or a pod was asked to take an edge that its transition table does not have."""


class InvariantBroken(CoreError):
    """`Engine.check()` found a state that must not exist; the message names the property (audit S1–S62)."""


def failure(code: str, message: str, /, **details: str | int | float) -> Failure:
    """A failure of the error table's `code`; whose fault it is and whether a retry can help come from the table."""
    row = TABLE[code]
    return Failure(
        code=code,
        message=message,
        fault=row.fault,
        retryable=row.retryable,
        details=tuple((name, str(value)) for name, value in details.items()),
    )
