"""The pytest plugin `firepool` (entry point `pytest11`): makes the suites' assertions readable in other people's tests.

from firepool_broker.conformance.providers import ProviderConformance
"""

import pytest

pytest.register_assert_rewrite("firepool_broker.conformance.agents", "firepool_broker.conformance.providers")
