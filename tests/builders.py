"""Things that tests are made of, every argument optional: a test names only what it is about."""

from firepool_broker.core.asks import Ask, Exit, Failure, FoundPod, LastUse
from firepool_broker.core.errors import failure
from firepool_broker.core.ids import Caller, Card, JobId, Person, PodName, Queue, ReuseTag, Sku, TemplateDigest
from firepool_broker.core.pools import CallerLimits, Pool, Shape


def a_shape(gpus: int = 0, cpus: float = 1.0) -> Shape:
    """One CPU pod, or a pod with GPUs."""
    return Shape(accelerator="h200" if gpus else "cpu", gpus=gpus, cpus=cpus)


def a_pool(sku: str = "cpu", *, gpus: int = 0, template: str = "t0", ceiling: int = 8, **knobs: object) -> Pool:
    """A pool of `ceiling` pods; other knobs by their own names."""
    shape = a_shape(gpus)
    knobs.setdefault("max_count", ceiling * shape.processors)
    return Pool(sku=Sku(sku), shape=shape, template=TemplateDigest(template), **knobs)  # type: ignore[arg-type]


def an_ask(job: str = "j", *, caller: str = "ann", sku: str = "cpu", tag: str | None = None, **fields: object) -> Ask:
    """A one-pod job of `caller`; other fields by their own names."""
    fields.setdefault("queue", Queue("default"))
    return Ask(
        job=JobId(job),
        caller=Caller(caller),
        person=Person(caller),
        sku=Sku(sku),
        tag=ReuseTag(tag) if tag is not None else None,
        **fields,  # type: ignore[arg-type]
    )


def a_limit(pods: int | None = None, processors: int | None = None, **fields: object) -> CallerLimits:
    """Limits of a caller."""
    return CallerLimits(max_pods=pods, max_processors=processors, **fields)  # type: ignore[arg-type]


def a_failure(code: str = "NonZeroExit", message: str = "it failed") -> Failure:
    """A failure of the error table."""
    return failure(code, message)


def a_good_exit() -> Exit:
    """Exit code 0."""
    return Exit(exit_code=0)


def a_bad_exit(code: str = "NonZeroExit", exit_code: int | None = 1, signal: int | None = None) -> Exit:
    """An exit with an error."""
    return Exit(exit_code=exit_code, signal=signal, failure=a_failure(code))


def a_last_use(
    caller: str = "ann",
    *,
    queue: str = "default",
    tag: str | None = None,
    released_at: float | None = None,
    hold_deadline: float | None = None,
    retire_after: bool = False,
) -> LastUse:
    """What a witness says of a pod's last use."""
    return LastUse(
        caller=Caller(caller),
        queue=Queue(queue),
        tag=ReuseTag(tag) if tag is not None else None,
        released_at=released_at,
        hold_deadline=hold_deadline,
        retire_after=retire_after,
    )


def a_found_pod(
    pod: str = "p", *, sku: str = "cpu", template: str = "t0", cards: tuple[str, ...] = (), **fields: object
) -> FoundPod:
    """A ready pod that nobody used, with an agent that answers."""
    fields.setdefault("created_at", 0.0)
    fields.setdefault("ready", True)
    fields.setdefault("agent_answered", True)
    return FoundPod(
        pod=PodName(pod),
        sku=Sku(sku),
        template=TemplateDigest(template),
        cards=tuple(Card(card) for card in cards),
        **fields,  # type: ignore[arg-type]
    )
