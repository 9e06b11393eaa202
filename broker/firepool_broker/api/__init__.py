"""HTTP in: requests become calls of the runner, its answers and errors become JSON. Nothing is decided here."""
