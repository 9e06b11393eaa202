"""The broker that the demo runs on: one pool an arm, so that no arm uses another's pods."""

from benchmarks import venue

#: 4 pods an arm, each of one core and 512 MiB.
_POOL = """
[pools.demo-{arm}]
max_count = 4
idle_timeout_s = 60
untrusted = true
simulated_start_s = {start_s}
step = 200

[pools.demo-{arm}.shape]
cpus = 1
memory_mib = 512
"""


class Venue(venue.Venue):
    """The demo's broker for the time of a `with` block, and the SDK connected to it."""

    def __init__(self, start_s: float, arms: tuple[str, ...] = ("on", "off", "fresh")) -> None:
        super().__init__("".join(_POOL.format(arm=arm, start_s=start_s) for arm in arms), "demo")
