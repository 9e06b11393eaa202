"""The pure engine: `Engine.handle(event, now) -> effects`. No clock, no I/O, no randomness, no threads, no logging."""
