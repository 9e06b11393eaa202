"""Does effects for real: ports and what stands behind them, and the runner that joins them to the engine."""
