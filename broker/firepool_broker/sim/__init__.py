"""The simulated shell: the broker's own engine in virtual time, with calibrated delays and injected faults.

Same seed, same trace. Rooms: `world` (clock and heap), `broker` (one life of a broker: engine in, effects out), `yard` (pods and
their agents), `ledger` (the job store), `clients` (who submits), `venue` (delays), `faults`, `checks`, `trace`.
Simulated figures show shapes, orderings and signs; they are never headline numbers (paper B.4).
"""
