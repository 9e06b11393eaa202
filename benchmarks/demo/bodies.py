"""What runs in the pods. Shipped by value to an `untrusted` pool: only plain values come back."""

import time

from benchmarks.humaneval import judge


def rollout(program: str, body_s: float) -> bool:
    """Judge one candidate; with `body_s` > 0 the job lasts at least that long, as a model's generation would."""
    began = time.monotonic()
    passed = judge(program)
    time.sleep(max(0.0, body_s - (time.monotonic() - began)))
    return passed


def evaluation(programs: list[str], body_s: float) -> float:
    """Share of known-good programs that pass: the held-out evaluation of a training loop."""
    began = time.monotonic()
    share = sum(judge(program) for program in programs) / len(programs)
    time.sleep(max(0.0, body_s - (time.monotonic() - began)))
    return share


def update(rewards: list[float], body_s: float) -> list[float]:
    """The advantages of a group of rewards (each reward less the group's mean): what a policy update starts from."""
    began = time.monotonic()
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    advantages = [reward - mean for reward in rewards]
    time.sleep(max(0.0, body_s - (time.monotonic() - began)))
    return advantages
