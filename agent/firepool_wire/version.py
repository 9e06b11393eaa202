"""Versions that two sides compare before they trust each other's messages."""

#: Version of the broker↔agent and SDK↔broker protocols: raised by every change that an older peer cannot read.
PROTOCOL = 1

#: The distribution's version, the only place it is written in code (a tidy test compares it with pyproject.toml).
FIREPOOL = "0.1.0"
