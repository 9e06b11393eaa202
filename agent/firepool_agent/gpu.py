"""Cards of a pod: real ones through NVML (loaded lazily; an absent driver is a value, not an error) and simulated ones.

Only figures live here. Device memory is compared for the pod's own processes, never for the whole card: other pods may
share it (`spec §4`). Strangers to everything else in the agent.
"""

import contextlib
import importlib
import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from firepool_wire.nursery import PodConfig

_CONTROL_DEVICES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
#: VRAM of the models that `--simulate` knows, bytes.
SIMULATED_VRAM = {"h200": 141 << 30, "h100": 80 << 30, "a100": 80 << 30, "l40s": 48 << 30, "t4": 16 << 30}


@dataclass(frozen=True, slots=True)
class Card:
    """One physical (or simulated) GPU."""

    uuid: str
    model: str
    vram_bytes: int
    simulated: bool = False
    index: int = 0

    def to_json(self) -> dict[str, Any]:
        """The card as `hello` shows it."""
        return asdict(self)


def _nvml() -> Any:
    """The initialised module, or None where no driver answers."""
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # noqa: BLE001  (the module raises its own classes, which cannot be named without importing it)
        return None
    return module


def find_cards() -> list[Card]:
    """Cards of this machine; empty without a driver."""
    nvml = _nvml()
    if nvml is None:
        return []
    found = []
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
            found.append(
                Card(
                    _text(nvml.nvmlDeviceGetUUID(handle)),
                    _text(nvml.nvmlDeviceGetName(handle)),
                    int(memory),
                    False,
                    index,
                )
            )
    finally:
        nvml.nvmlShutdown()
    return found


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def simulated_cards(model: str, count: int) -> list[Card]:
    """Made-up cards, recognisable by their UUID wherever they show."""
    vram = SIMULATED_VRAM.get(model.lower(), 80 << 30)
    return [Card(f"GPU-simulated-{model.lower()}-{n:04d}", model, vram, True, n) for n in range(count)]


def device_files(cards: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Device files that a pod with these cards needs (none for simulated ones)."""
    real = [card for card in cards if not card.get("simulated")]
    if not real:
        return ()
    return tuple(
        p for p in (*_CONTROL_DEVICES, *(f"/dev/nvidia{card.get('index', 0)}" for card in real)) if os.path.exists(p)
    )


def cards(config: PodConfig) -> list[Card]:
    """The pod's cards as it was given them."""
    names = ("uuid", "model", "vram_bytes", "simulated", "index")
    return [Card(**{k: v for k, v in card.items() if k in names}) for card in config.cards]


def with_usage_files(cards: Sequence[dict[str, Any]], directory: str) -> list[dict[str, Any]]:
    """Simulated cards with the file in which a job says how much device memory it pretends to hold:
    `{"used_bytes": n}`. Real cards stay as they are."""
    return [{**c, "usage_file": f"{directory}/{c['uuid']}.json"} if c.get("simulated") else dict(c) for c in cards]


def wipe_usage(config: PodConfig) -> None:
    """What dead processes pretended to hold is free again. A file that cannot be removed goes on counting."""
    for card in config.cards:
        if card.get("usage_file"):
            with contextlib.suppress(OSError):
                os.unlink(card["usage_file"])


def used_bytes(config: PodConfig, pids: Collection[int] | None = None) -> int | None:
    """Device memory that the pod's own processes hold; None when nobody can say (no driver, or figures withheld).

    Args:
        config: the pod.
        pids: its processes as the driver counts them (host pids); None = every process on the pod's cards, which is only
            right where the pod has them to itself.
    """
    if not config.cards:
        return 0
    if all(card.get("simulated") for card in config.cards):
        return sum(_simulated_use(card) for card in config.cards)
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        return sum(_real_use(nvml, card["uuid"], pids) for card in config.cards)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()


def _real_use(nvml: Any, uuid: str, pids: Collection[int] | None) -> int:
    handle = nvml.nvmlDeviceGetHandleByUUID(uuid.encode())
    running = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return sum(int(p.usedGpuMemory or 0) for p in running if pids is None or p.pid in pids)


def _simulated_use(card: dict[str, Any]) -> int:
    """Bytes that the card's usage file claims ({"used_bytes": n}); a missing or broken file claims none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError), open(card["usage_file"]) as f:
        return max(0, int(json.load(f)["used_bytes"]))
    return 0
