"""From an order of the engine to a wish for the nursery: the pool's shape as limits, its settings as words, and cards.

Cards are given out here, since only the provider knows all pods: real ones as the nursery found them, simulated ones as many
as are asked for, each with a UUID that says what it is.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from firepool_broker.core.pools import Shape
from firepool_broker.shell.ports import PodOrder
from firepool_wire.errors import CapacityUnavailable
from firepool_wire.nursery import PodWish

#: VRAM of the models that `--simulate` knows, bytes; others get the second figure.
_VRAM = {"h200": 141 << 30, "h100": 80 << 30, "a100": 80 << 30, "l40s": 48 << 30, "t4": 16 << 30}
_OTHER_VRAM = 80 << 30


def wish_of(order: PodOrder, python: str, cards: Sequence[Mapping[str, Any]]) -> PodWish:
    """What the nursery is asked for."""
    pool = order.pool
    settings = dict(pool.settings)
    settings.setdefault("requirements_mode", pool.requirements_mode)
    return PodWish(
        name=order.name,
        sku=pool.sku,
        template=order.template,
        single_use=order.single_use,
        isolation=pool.isolation,
        python=settings.get("python", python),
        preload=list(pool.preload),
        memory_limit_bytes=pool.shape.memory_mib << 20,
        cpus=pool.shape.cpus,
        pids_limit=int(settings.get("pids_limit", 4096)),
        cards=[dict(card) for card in cards],
        network=settings.get("network", "bridge"),
        simulated_start_s=pool.simulated_start_s,
        settings=settings,
    )


def choose_cards(shape: Shape, found: Sequence[Mapping[str, Any]], taken: Collection[str]) -> list[Mapping[str, Any]]:
    """Cards for one pod that no other pod has.

    Raises: CapacityUnavailable: this machine has not enough free cards of that model.
    """
    if not shape.gpus:
        return []
    if shape.simulated:
        return _simulated(shape, taken)
    model = shape.accelerator.lower()
    free = [c for c in found if model in str(c["model"]).lower() and c["uuid"] not in taken]
    if len(free) < shape.gpus:
        raise CapacityUnavailable(
            f"a pod needs {shape.gpus} {shape.accelerator} card(s); this machine has {len(free)} free of {len(found)}",
            limit="cards",
            free=len(free),
        )
    return list(free[: shape.gpus])


def _simulated(shape: Shape, taken: Collection[str]) -> list[Mapping[str, Any]]:
    chosen: list[Mapping[str, Any]] = []
    index = 0
    vram = _VRAM.get(shape.accelerator.lower(), _OTHER_VRAM)
    while len(chosen) < shape.gpus:
        uuid = f"GPU-simulated-{shape.accelerator.lower()}-{index:04d}"
        if uuid not in taken:
            chosen.append(
                {"uuid": uuid, "model": shape.accelerator, "vram_bytes": vram, "simulated": True, "index": index}
            )
        index += 1
    return chosen
