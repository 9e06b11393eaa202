"""The base of what the engine keeps about jobs, pods and pools: a place in the wheel of timers and one in the story."""


class Record:
    """Something that may wait for a time and that has a story."""

    __slots__ = ("name", "noted", "slot")

    def __init__(self, name: str) -> None:
        self.name = name
        #: Index of the wheel's slot that holds this record (`timers`); 0 = none.
        self.slot = 0
        #: Number of its newest entry in the ring (`story`); -1 = none.
        self.noted = -1
