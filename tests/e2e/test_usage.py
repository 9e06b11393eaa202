"""What a job used is told with its end: memory, CPU time, and memory of its cards, simulated ones too."""

import pytest

from tests.e2e.venue import Venue

pytestmark = [pytest.mark.linux, pytest.mark.slow]


def test_memory_and_cpu_time_are_told(venue: Venue) -> None:
    code = "import time\nkept = b'x' * (60 << 20)\nwhile time.process_time() < 0.2: pass"
    usage = venue.python(code)["usage"]
    assert usage["peak_rss_bytes"] > 60 << 20
    assert usage["cpu_s"] >= 0.2
    assert not usage["peak_device_bytes"]


def test_memory_of_a_simulated_card_is_told_and_free_for_the_next_job(venue: Venue) -> None:
    first = venue.python("pass", sku="cards")
    assert first["usage"]["peak_device_bytes"] == 0
    [card] = venue.pods()[first["pods"][0]]["cards"]
    held = {"used_bytes": 5 << 30}
    body = venue.python(f"import json; json.dump({held}, open('/dev/cards/{card}.json', 'w'))", sku="cards")
    assert (body["pods"], body["usage"]["peak_device_bytes"]) == (first["pods"], 5 << 30)
    assert venue.recovered(body) == "verified"
    assert venue.python("pass", sku="cards")["usage"]["peak_device_bytes"] == 0
