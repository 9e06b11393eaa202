"""What an attempt uses: memory and CPU of its whole tree, memory of its cards; and the watchdog that ends it before the kernel
kills at random.

Figures come from the job's cgroup where there is one; elsewhere from sampling `/proc` and from what the guard reaped. On cgroup v2
a kubelet may set `memory.oom.group`, so that one hog takes the agent along: the watchdog acts at 95 % of the limit.
"""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from firepool_agent import gpu, procfs
from firepool_agent.cgroups import JobGroup
from firepool_agent.isolate import End
from firepool_wire.nursery import PodConfig

#: Share of the limit at which the attempt is ended.
WATCHDOG_SHARE = 0.95
#: Fastest growth that is reckoned with, bytes a second: how soon one has to look again follows from the room left.
#: Raising it costs CPU on attempts near their limit, lowering it lets a fast hog through to the kernel.
_GROWTH_BYTES_S = 4e9
_SOONEST_S, _LATEST_S = 0.004, 0.5
#: Without a limit one only samples for the peak.
_IDLE_S = 0.5
#: Between looks at the cards (in a thread: a driver may take tens of milliseconds). Raise: shorter peaks are missed.
_CARDS_S = 1.0

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Used:
    """Figures of a finished attempt."""

    sampled_peak: int
    group_peak: int | None
    oom_killed: bool
    device_bytes: int | None = None

    def peak_bytes(self, end: End | None) -> int:
        """Most memory at once: the cgroup's figure, else the larger of samples and the largest single process."""
        if self.group_peak is not None:
            return self.group_peak
        return max(self.sampled_peak, 0 if end is None else end.peak_rss_bytes)

    def cpu_s(self, end: End | None) -> float | None:
        """CPU seconds of everything that was reaped."""
        return None if end is None else end.cpu_s


class Meter:
    """Watches one attempt."""

    def __init__(self, config: PodConfig, group: JobGroup, guard: int, wanted: int | None) -> None:
        limits = [n for n in (config.memory_limit_bytes, wanted) if n]
        #: Limit of this attempt in bytes; None = unlimited.
        self.limit = min(limits) if limits else None
        self._group = group
        self._guard = guard
        self._peak = 0
        self._config = config
        #: Most device memory seen; None: no cards, or nobody could say.
        self._device_peak: int | None = None
        self._cards_due_s = 0.0
        self._kills_before = 0
        self._timer: asyncio.TimerHandle | None = None

    def start(self, over: Callable[[int, int], None]) -> None:
        """Begin; `over(used, limit)` is called once when the watchdog's line is crossed."""
        self._over = over
        self._kills_before = self._group.oom_kills() or 0
        self._group.reset_peak()
        self._began = time.monotonic()
        self._look_again(self._delay(0))

    def _look_again(self, delay_s: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        if self._config.cards:
            self._look_at_cards()
        used = self._current()
        if self._crossed(used):
            # The cheap figure counts what the kernel could take back (page cache, pages shared with the zygote).
            used = self._exact()
        self._peak = max(self._peak, used)
        if self.limit is not None and self._crossed(used):
            self._over(used, self.limit)
            return
        self._look_again(self._delay(used))

    def _look_at_cards(self) -> None:
        now = time.monotonic()
        if now >= self._cards_due_s:
            self._cards_due_s = now + _CARDS_S
            seen = asyncio.get_running_loop().run_in_executor(None, gpu.used_bytes, self._config)
            seen.add_done_callback(lambda done: self._on_cards(None if done.cancelled() else done.result()))

    def _on_cards(self, used: int | None) -> None:
        if used is not None:
            self._device_peak = max(used, self._device_peak or 0)

    def _crossed(self, used: int) -> bool:
        return self.limit is not None and used > self.limit * WATCHDOG_SHARE

    def _delay(self, used: int) -> float:
        if self.limit is None:
            return _IDLE_S
        room = self.limit * WATCHDOG_SHARE - used
        return min(_LATEST_S, max(_SOONEST_S, room / _GROWTH_BYTES_S))

    def _current(self) -> int:
        in_group = self._group.current_bytes()
        return tree_bytes(self._guard, _resident) if in_group is None else in_group

    def _exact(self) -> int:
        in_group = self._group.current_bytes()
        if in_group is None:
            return tree_bytes(self._guard, _proportional)
        return in_group - self._group.cache_bytes()

    def now(self) -> tuple[int, float]:
        """Memory in bytes and CPU seconds of the processes that live now."""
        pids = [p.pid for p in procfs.descendants(self._guard, procfs.processes())]
        return self._current(), sum(map(_cpu_s, pids))

    def stop(self) -> Used:
        """End, with the figures."""
        if self._timer is not None:
            self._timer.cancel()
        kills = self._group.oom_kills()
        if self._config.cards and all(card.get("simulated") for card in self._config.cards):
            self._on_cards(gpu.used_bytes(self._config))  # what a short job pretended to hold still stands in its file
        oom_killed = kills is not None and kills > self._kills_before
        return Used(self._peak, self._group.peak_bytes(), oom_killed, self._device_peak)


def tree_bytes(guard: int, measure: Callable[[int], int]) -> int:
    """Memory of all processes below the guard, by one way of measuring."""
    return sum(measure(p.pid) for p in procfs.descendants(guard, procfs.processes()))


def _resident(pid: int) -> int:
    """Private memory of a process: an upper bound, since pages that a fork shares count in each. Cheap."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as f:
            _size, resident, shared, *_rest = f.read().split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return (int(resident) - int(shared)) * _PAGE


def _proportional(pid: int) -> int:
    """Memory of a process with shared pages divided among those who share them (a walk of its page tables)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as f:
            kib = [int(line.split()[1]) for line in f if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return sum(kib) * 1024


def _cpu_s(pid: int) -> float:
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    # utime, stime, and those of children that were waited for
    return sum(map(int, fields[11:15])) / _TICKS_PER_S
