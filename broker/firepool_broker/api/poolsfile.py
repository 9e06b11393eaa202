"""Pool definitions as the API takes and shows them, and what changes between two configurations.

A definition is the fields of `core.pools.Pool` without the template digest (the broker makes that); `settings` is an
object of texts. What `written` writes, `read_pools` reads back.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from firepool_broker.api.rules import Problem, bad_values
from firepool_broker.api.specs import all_refused
from firepool_broker.core.pools import Pool

_POOLS: TypeAdapter[list[Pool]] = TypeAdapter(list[Pool])

#: `Pool.template` of a definition that names none.
_UNNAMED = next(f.default for f in fields(Pool) if f.name == "template")


class Difference(TypedDict):
    """One thing that a new configuration changes."""

    #: `added`, `removed` or `changed`.
    kind: str
    sku: str
    #: For `changed`: the knob, and its values.
    knob: str | None
    before: Any
    after: Any


def read_pools(definitions: object) -> list[Pool]:
    """Pools from their definitions (a list of objects, as JSON or TOML have them).

    Raises:
        UnknownField, BadRequest: every problem of every definition at once.
    """
    if isinstance(definitions, list):
        definitions = [_with_pairs(d) for d in definitions]
    try:
        # Through JSON, where a list may stand for a tuple and nothing else is converted.
        text = json.dumps(definitions, default=str)
        pools = _POOLS.validate_json(text, strict=True, extra="forbid")
    except ValidationError as error:
        raise all_refused(error.errors(include_url=False, include_input=False), list[Pool], "pools") from None
    named = [f"pools[{n}].template" for n, pool in enumerate(pools) if pool.template != _UNNAMED]
    if named:
        raise bad_values([Problem(place, "is made by the broker from what a pod is made of") for place in named])
    return pools


def _with_pairs(definition: object) -> object:
    if isinstance(definition, dict) and isinstance(definition.get("settings"), dict):
        return {**definition, "settings": sorted(definition["settings"].items())}
    return definition


def written(pool: Pool) -> dict[str, Any]:
    """The pool as a definition that `read_pools` reads back."""
    whole = asdict(pool)
    whole["settings"] = dict(pool.settings)
    del whole["template"]
    return whole


def differences(before: Sequence[Pool], after: Sequence[Pool]) -> list[Difference]:
    """What would change, by SKU."""
    old, new = {p.sku: p for p in before}, {p.sku: p for p in after}
    found: list[Difference] = []
    for sku in sorted({*old, *new}):
        if sku not in old:
            found.append({"kind": "added", "sku": sku, "knob": None, "before": None, "after": written(new[sku])})
        elif sku not in new:
            found.append({"kind": "removed", "sku": sku, "knob": None, "before": written(old[sku]), "after": None})
        else:
            found.extend(_changed(sku, _compared(old[sku]), _compared(new[sku])))
    return found


def _compared(pool: Pool) -> dict[str, Any]:
    # Another template digest makes the pool's pods stale, also where no knob shows why (another interpreter, say).
    return {**written(pool), "template": pool.template}


def _changed(sku: str, old: dict[str, Any], new: dict[str, Any], under: str = "") -> Iterator[Difference]:
    for knob in dict.fromkeys((*old, *new)):
        before, after = old.get(knob), new.get(knob)
        if isinstance(before, dict) and isinstance(after, dict):
            yield from _changed(sku, before, after, f"{under}{knob}.")
        elif before != after:
            yield {"kind": "changed", "sku": sku, "knob": under + knob, "before": before, "after": after}
