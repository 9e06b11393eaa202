"""Cards: an absent driver is a value, simulated ones say what they are and what they hold."""

import json
import os
from pathlib import Path

from firepool_agent import gpu
from tests.agent.test_unpack import config


def test_a_machine_without_a_driver_has_no_cards() -> None:
    if os.path.exists("/dev/nvidiactl"):
        assert all(card.vram_bytes > 0 and not card.simulated for card in gpu.find_cards())
    else:
        assert gpu.find_cards() == []


def test_a_pod_without_cards_holds_no_device_memory(tmp_path: Path) -> None:
    assert gpu.used_bytes(config(tmp_path)) == 0
    assert gpu.cards(config(tmp_path)) == []


def test_simulated_cards_are_distinct_and_named_so() -> None:
    cards = gpu.simulated_cards("h200", 3)
    assert len({card.uuid for card in cards}) == 3
    assert all(card.simulated and "simulated" in card.uuid and card.vram_bytes == 141 << 30 for card in cards)


def test_a_simulated_card_holds_what_its_usage_file_says(tmp_path: Path) -> None:
    pod = config(tmp_path)
    usage = tmp_path / "usage.json"
    pod.cards = [{**card.to_json(), "usage_file": str(usage)} for card in gpu.simulated_cards("h100", 1)]
    assert gpu.used_bytes(pod) == 0
    usage.write_text(json.dumps({"used_bytes": 5 << 30}))
    assert gpu.used_bytes(pod) == 5 << 30
    for broken in ("", "{}", "[]", '{"used_bytes": "many"}', "\0"):
        usage.write_text(broken)
        assert gpu.used_bytes(pod) == 0


def test_simulated_cards_need_no_device_files() -> None:
    assert gpu.device_files([card.to_json() for card in gpu.simulated_cards("h200", 1)]) == ()


def test_a_card_whose_driver_does_not_answer_is_unknown_and_not_zero(tmp_path: Path) -> None:
    pod = config(tmp_path)
    pod.cards = [{"uuid": "GPU-not-here", "model": "h200", "vram_bytes": 1, "simulated": False, "index": 0}]
    assert gpu.used_bytes(pod) is None
