"""What an agent is put together from: one object that `server` builds and the rooms share."""

from dataclasses import dataclass

from firepool_agent.blobs import Blobs
from firepool_agent.cells import Zygote
from firepool_agent.cgroups import JobGroup
from firepool_agent.isolate import Uids
from firepool_agent.janitor import Janitor
from firepool_agent.journal import Journal
from firepool_agent.layers import Layers
from firepool_agent.reset import Resetter
from firepool_agent.scratch import Scratch
from firepool_agent.unpack import Unpacker
from firepool_wire.nursery import PodConfig


@dataclass(frozen=True, slots=True)
class Parts:
    """The agent's rooms, built once."""

    config: PodConfig
    journal: Journal
    blobs: Blobs
    scratch: Scratch
    uids: Uids
    group: JobGroup
    zygote: Zygote
    janitor: Janitor
    resetter: Resetter
    unpacker: Unpacker
    layers: Layers
