"""Workloads, arms, statistics and recorded results: `python -m benchmarks NAME` (spec §15)."""
