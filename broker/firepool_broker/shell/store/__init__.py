"""The durable truth: jobs, tokens, callers' limits and the applied pools in one SQLite file with one writer.

    database    the file: connections, the leader's lock and epoch, reads off the event loop, checkpoints
    writer      the thread that commits; what gathers while it commits shares the next transaction
    entries     a write as the thread takes it: checked and made into column values on the caller's side
    statements  set-shaped SQL: one statement for a whole run of like writes
    group       one group inside one transaction: all at once where every write wins, one by one where some lost
    jobs        `ports.JobStore`; `reading` turns its rows back; `query` builds its pages
    tokens      `ports.TokenStore`; `config`: callers, their limits, the applied pools
    retention   forgets what is old and referenced by nothing
    tables      the schema; `migrations` bring a file forward to it

Nothing here knows the engine. `main` builds a `Database`, opens it, and gives it to the others.
"""
