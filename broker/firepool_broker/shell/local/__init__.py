"""Pods on this machine (`design.md` §8): the provider that is registered as `local`.

`provider` keeps the books, `link` talks to the nursery process (and starts it), `wishes` turns an order into what the
nursery is asked for. Everything about namespaces, cgroups and networks lies in the nursery, in the agent's house.
"""

from firepool_broker.shell.local.provider import LocalProvider

#: Entry point of the group `firepool.providers`: called with `home` and `python`.
PROVIDER = LocalProvider

__all__ = ["PROVIDER", "LocalProvider"]
