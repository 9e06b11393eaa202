"""The local `PodProvider`: books of the pods that the nursery made, and what happens to them as facts.

The truth about pods (annotations included) is the nursery's, which outlives a broker; this side mirrors it. A pod counts as
ended only when the nursery saw its process exit, or, when the nursery itself is gone, when the agent's pidfd says so here.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from firepool_broker.shell.local.link import Link
from firepool_broker.shell.local.wishes import choose_cards, wish_of
from firepool_broker.shell.ports import (
    PORT_VERSION,
    PodBecameReady,
    PodEnded,
    PodFact,
    PodFailed,
    PodOrder,
    PodSeen,
)
from firepool_wire.errors import FirepoolError, Internal, from_json
from firepool_wire.nursery import PodState

#: Seconds without a broker after which the nursery ends its pods. Raise: survives longer repairs of a broker, leaves pods
#: behind longer when nobody comes back. Lower: the reverse.
ORPHAN_TIMEOUT_S = float(os.environ.get("FIREPOOL_ORPHAN_TIMEOUT_S", "600"))
_ANSWER_S = 60.0


class LocalProvider:
    """Makes and unmakes pods on this machine; one per broker home."""

    port_version: ClassVar[int] = PORT_VERSION

    def __init__(self, *, home: Path, python: str | Path | None = None) -> None:
        self._python = str(python) if python else ""
        self._link = Link(Path(home), self._heard, self._lost)
        self._pods: dict[str, PodState] = {}
        #: pidfds of the agents, for the case that the nursery dies before them.
        self._pidfds: dict[str, int] = {}
        self._answers: dict[str, asyncio.Future[None]] = {}
        self._listed: asyncio.Future[None] | None = None
        self._facts: asyncio.Queue[PodFact] = asyncio.Queue()
        self._opening = asyncio.Lock()
        self._closing = False

    @property
    def about(self) -> Mapping[str, Any]:
        """What the nursery says of this machine: isolation level, why not more, the fix, its cards."""
        return self._link.about

    async def start(self) -> None:
        """Find the nursery with its pods, or start one. Raises: FirepoolError."""
        self._link.home.mkdir(parents=True, exist_ok=True)
        await self._open()

    async def _open(self) -> None:
        async with self._opening:
            if self._link.up:
                return
            await self._link.open(orphan_timeout_s=ORPHAN_TIMEOUT_S)
            self._listed = asyncio.get_running_loop().create_future()
            self._link.say(do="list")
            async with asyncio.timeout(_ANSWER_S):
                await self._listed

    async def list_pods(self) -> Sequence[PodSeen]:
        """Every pod that is not verified gone."""
        return [_seen(state) for state in self._pods.values()]

    async def facts(self) -> AsyncIterator[PodFact]:
        """What happens to pods."""
        while True:
            yield await self._facts.get()

    async def create(self, order: PodOrder) -> None:
        """Make a pod. Raises: FirepoolError: refused, nothing was made."""
        if order.name in self._pods:
            return
        await self._open()
        taken = {str(card["uuid"]) for state in self._pods.values() for card in state.cards}
        cards = choose_cards(order.pool.shape, self.about.get("cards", ()), taken)
        wish = wish_of(order, self._python, cards)
        answer = self._answers.get(order.name)
        if answer is None:
            answer = self._answers[order.name] = asyncio.get_running_loop().create_future()
            self._link.say(do="make", wish=wish.to_json())
        async with asyncio.timeout(_ANSWER_S):
            await asyncio.shield(answer)

    async def delete(self, name: str, why: str) -> None:
        """Unmake a pod; `PodEnded` follows."""
        state = self._pods.get(name)
        if state is None or not self._link.up:
            return
        state.ending = True
        self._link.say(do="unmake", name=name, why=why)

    async def annotate(self, name: str, annotations: Mapping[str, str | None]) -> None:
        """Merge annotations; they live as long as the pod. Raises: FirepoolError."""
        state = self._pods.get(name)
        if state is None:
            return
        self._link.say(do="annotate", name=name, set=dict(annotations))
        for key, value in annotations.items():
            if value is None:
                state.annotations.pop(key, None)
            else:
                state.annotations[key] = value

    async def aclose(self, *, leave_pods: bool) -> None:
        """Disconnect; without `leave_pods` the nursery ends, and with it every pod, verified."""
        self._closing = True
        if not leave_pods and self._link.up:
            self._link.say(do="end")
            await self._link.wait_ended()
        await self._link.hang_up()
        for name in list(self._pidfds):
            self._close_pidfd(name)

    # -- what the nursery says -----------------------------------------------------------------------------------

    def _heard(self, message: dict[str, Any]) -> None:
        match message.get("is"):
            case "made":
                self._adopt(PodState.from_json(message["pod"]))
                self._answer(message["pod"]["name"], None)
            case "refused":
                self._answer(message["name"], from_json(message["error"]))
            case "ready":
                state = self._pods.get(message["name"])
                if state is not None:
                    state.ready = True
                    self._facts.put_nowait(PodBecameReady(_seen(state)))
            case "ended":
                self._ended(message)
            case "pods":
                self._found(message)

    def _answer(self, name: str, error: FirepoolError | None) -> None:
        answer = self._answers.pop(name, None)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def _adopt(self, state: PodState) -> None:
        if state.name in self._pods:
            return
        self._pods[state.name] = state
        try:
            self._pidfds[state.name] = os.pidfd_open(state.pid)
        except ProcessLookupError:
            return  # it ended already; the nursery's word follows

    def _found(self, message: dict[str, Any]) -> None:
        for body in message["pods"]:
            self._adopt(PodState.from_json(body))
        for fact in message["ended"]:
            self._ended(fact)
        if self._listed is not None and not self._listed.done():
            self._listed.set_result(None)

    def _ended(self, fact: dict[str, Any]) -> None:
        name = fact["name"]
        state = self._pods.pop(name, None)
        self._close_pidfd(name)
        if state is not None and not state.ready and not state.ending:
            error = fact.get("error") or Internal(f"pod {name} never came up: {fact['why']}").to_json()
            self._facts.put_nowait(PodFailed(name, error))
        else:
            self._facts.put_nowait(PodEnded(name, fact["why"], bool(fact.get("oom"))))
        if self._link.up:
            self._link.say(do="forget", names=[name])

    def _close_pidfd(self, name: str) -> None:
        fd = self._pidfds.pop(name, None)
        if fd is not None:
            asyncio.get_running_loop().remove_reader(fd)
            os.close(fd)

    def _lost(self) -> None:
        """The nursery is gone, and its pods die with it; each counts as ended once its agent's pidfd says so."""
        error = Internal("the nursery went away")
        for name in list(self._answers):
            self._answer(name, error)
        if self._listed is not None and not self._listed.done():
            self._listed.set_exception(error)
        if self._closing:
            return
        for name, fd in list(self._pidfds.items()):
            asyncio.get_running_loop().add_reader(fd, self._died_with_the_nursery, name)
        for name in [n for n in self._pods if n not in self._pidfds]:
            self._died_with_the_nursery(name)

    def _died_with_the_nursery(self, name: str) -> None:
        self._ended({"name": name, "why": "the nursery was killed, and the pod with it", "oom": False})


def _seen(state: PodState) -> PodSeen:
    return PodSeen(
        name=state.name,
        sku=state.sku,
        template=state.template,
        created_at=state.created_at or time.time(),
        address=f"unix:{state.socket}",
        ready=state.ready,
        single_use=state.single_use,
        terminating=state.ending,
        incarnation=state.incarnation,
        annotations=dict(state.annotations),
    )
