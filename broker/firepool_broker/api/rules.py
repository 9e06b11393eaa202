"""What values in requests may be, as one table: each rule checks a value and is published in the OpenAPI document.

Types and names of fields are the wire dataclass's own; this adds ranges, lengths, patterns and what must go together.
"""

import binascii
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from firepool_wire.errors import TABLE, BadRequest, FirepoolError, ImageNotAllowed
from firepool_wire.jobspec import INLINE_ARGS_BYTES, Entrypoint, FunctionEntry, JobSpec
from firepool_wire.words import Isolation

#: Longest duration that a job may ask for: a year.
YEAR_S = 366 * 86_400.0

DIGEST = r"^sha256:[0-9a-f]{64}$"
#: Names that people and URLs meet: no control characters.
NAME = r"^[^\x00-\x1f\x7f]+$"

_ARGS_CHARS = (INLINE_ARGS_BYTES + 2) // 3 * 4

#: Class → field → keywords of JSON Schema that the field's value (where it is not None) must meet.
RULES: dict[str, dict[str, dict[str, Any]]] = {
    "JobSpec": {
        "sku": {"pattern": NAME, "maxLength": 128},
        "pods": {"minimum": 1, "maximum": 4096},
        "queue": {"pattern": NAME, "maxLength": 128},
        "priority": {"minimum": -1_000_000, "maximum": 1_000_000},
        "lease_tag": {"pattern": NAME, "maxLength": 256},
        "image": {"pattern": NAME, "maxLength": 512},
        "package": {"pattern": DIGEST},
        "queue_timeout_s": {"minimum": 0, "maximum": YEAR_S},
        "start_timeout_s": {"exclusiveMinimum": 0, "maximum": YEAR_S},
        "run_timeout_s": {"exclusiveMinimum": 0, "maximum": YEAR_S},
        "client_lease_s": {"minimum": 1, "maximum": YEAR_S},
        "max_retries": {"minimum": 0, "maximum": 1000},
        "retry_on": {"maxItems": 64},
        "env": {"maxProperties": 2000},
        "labels": {"maxProperties": 64},
        "run": {"pattern": NAME, "maxLength": 256},
        "parent": {"pattern": NAME, "maxLength": 128},
        "outputs": {"maxItems": 256},
        "isolation": {"enum": [level.value for level in Isolation]},
        "memory_mib": {"minimum": 1, "maximum": 1 << 30},
        "grace_s": {"minimum": 0, "maximum": 3600},
        "idempotency_key": {"pattern": NAME, "maxLength": 256},
    },
    "FunctionEntry": {
        "payload": {"pattern": DIGEST},
        "import_path": {"pattern": r"^[^\s:]+:[^\s:]+$", "maxLength": 512},
        "args": {"maxLength": _ARGS_CHARS},
        "args_blob": {"pattern": DIGEST},
        "items": {"minimum": 1, "maximum": 100_000},
        "python": {"pattern": r"^(\d+\.\d+)?$"},
        "pickle": {"minimum": 0, "maximum": 255},
        "depends": {"maxItems": 10_000},
        "name": {"pattern": r"^[^\x00-\x1f\x7f]*$", "maxLength": 512},
    },
    "Entrypoint": {"argv": {"minItems": 1, "maxItems": 100_000}},
    "Requirements": {"text": {"maxLength": 1 << 18}},
    "CallerBody": {"caller": {"pattern": NAME, "maxLength": 128}},
    "CallerLimits": {
        "max_pods": {"minimum": 0, "maximum": 1 << 30},
        "max_processors": {"minimum": 0, "maximum": 1 << 30},
    },
    "TokenBody": {
        "name": {"pattern": r"^[A-Za-z0-9._@-]+$", "maxLength": 128},
        "caller": {"pattern": NAME, "maxLength": 128},
        "person": {"pattern": NAME, "maxLength": 128},
        "ttl_s": {"exclusiveMinimum": 0, "maximum": 100 * YEAR_S},
    },
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a value: the field's path and words for people."""

    field: str
    words: str


def brief(value: Any) -> str:
    """A value as a message shows it: a hostile one must not make the message long (or, a huge integer, impossible)."""
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 100 else text[:97] + "..."


def _broken(value: Any, rule: dict[str, Any]) -> str | None:
    """Words for the first keyword that `value` does not meet, or None. Comparisons are written so that NaN fails."""
    if "minimum" in rule and not value >= rule["minimum"]:
        return f"must be at least {rule['minimum']}, not {brief(value)}"
    if "exclusiveMinimum" in rule and not value > rule["exclusiveMinimum"]:
        return f"must be more than {rule['exclusiveMinimum']}, not {brief(value)}"
    if "maximum" in rule and not value <= rule["maximum"]:
        return f"must be at most {rule['maximum']:g}, not {brief(value)}"
    most = rule.get("maxLength") or rule.get("maxItems") or rule.get("maxProperties")
    if most is not None and len(value) > most:
        return f"is longer than {most}"
    if "minItems" in rule and len(value) < rule["minItems"]:
        return "must not be empty"
    if "enum" in rule and value not in rule["enum"]:
        return f"must be one of {', '.join(map(str, rule['enum']))}, not {brief(value)}"
    if "_match" in rule and not rule["_match"](value):
        return f"does not match {rule['pattern']}"
    return None


def _compiled(name: str) -> list[tuple[str, dict[str, Any]]]:
    rules = []
    for field, rule in RULES[name].items():
        pattern = rule.get("pattern")
        # `\Z` for `$`: in Python `$` also matches before a final newline.
        extra = {"_match": re.compile(pattern.removesuffix("$") + r"\Z").match} if pattern else {}
        rules.append((field, {**rule, **extra}))
    return rules


_CHECKS = {name: _compiled(name) for name in RULES}


_known_defaults: dict[type[Any], dict[str, Any]] = {}


def _defaults(cls: type[Any]) -> dict[str, Any]:
    if (found := _known_defaults.get(cls)) is None:
        found = _known_defaults[cls] = {f.name: f.default for f in fields(cls)}
    return found


def by_table(name: str, value: Any, at: str = "") -> list[Problem]:
    """What of a dataclass's fields does not meet the table's rules for `name`. Defaults meet them."""
    defaults = _defaults(type(value))
    return [
        Problem(at + field, words)
        for field, rule in _CHECKS[name]
        if (item := getattr(value, field)) is not None
        and item != defaults[field]
        and (words := _broken(item, rule)) is not None
    ]


def _entrypoint(entry: Entrypoint) -> Iterator[Problem]:
    if (entry.argv is None) == (entry.function is None):
        yield Problem("entrypoint", "needs exactly one of argv and function")
    yield from by_table("Entrypoint", entry, "entrypoint.")
    if entry.function is not None:
        yield from _function(entry.function)


def _function(entry: FunctionEntry) -> Iterator[Problem]:
    at = "entrypoint.function."
    yield from by_table("FunctionEntry", entry, at)
    if (entry.payload is None) == (entry.import_path is None):
        yield Problem(at[:-1], "needs exactly one of payload and import_path")
    if (entry.args is None) == (entry.args_blob is None):
        yield Problem(at[:-1], "needs exactly one of args and args_blob")
    if entry.kind != "map" and entry.items != 1:
        yield Problem(at + "items", f"is for kind map; a {entry.kind} has one item")
    if entry.args is not None:
        try:
            binascii.a2b_base64(entry.args, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            yield Problem(at + "args", f"is not base64: {error}")


def _names_and_globs(spec: JobSpec) -> Iterator[Problem]:
    for name in spec.env:
        if not name or "=" in name or len(name) > 1024:
            yield Problem("env", f"{name[:80]!r} is not a name of a variable")
    for key, text in spec.labels.items():
        if not key or len(key) > 128 or len(text) > 1024:
            yield Problem(f"labels.{key[:80]}", "a label has 1 to 128 characters, its value at most 1024")
    for n, glob in enumerate(spec.outputs):
        if not glob or len(glob) > 1024 or glob.startswith("/") or ".." in glob.split("/"):
            yield Problem(f"outputs[{n}]", "must be a glob relative to the work dir that does not leave it")
    for n, code in enumerate(spec.retry_on):
        if code not in TABLE:
            yield Problem(f"retry_on[{n}]", f"{code[:80]!r} is no error class; see the error table")


def _texts(value: Any, at: str) -> Iterator[Problem]:
    """NUL characters anywhere: no process can be given them, no SQL text can hold them."""
    if isinstance(value, str):
        if "\x00" in value:
            yield Problem(at, "contains a NUL character")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(key, at)
            yield from _texts(item, f"{at}.{key}")
    elif isinstance(value, tuple):
        for n, item in enumerate(value):
            yield from _texts(item, f"{at}[{n}]")
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from _texts(getattr(value, name), f"{at}.{name}" if at else name)


def problems(spec: JobSpec, *, may_hold_nul: bool = True) -> list[Problem]:
    """Everything that is wrong with the values of a spec whose types are right.

    Args:
        spec: the spec.
        may_hold_nul: False where the caller saw that its JSON has no escaped NUL (saves a walk over every text).
    """
    found = [*by_table("JobSpec", spec, ""), *_entrypoint(spec.entrypoint)]
    if spec.requirements is not None:
        found += by_table("Requirements", spec.requirements, "requirements.")
    if spec.env or spec.labels or spec.outputs or spec.retry_on:
        found += _names_and_globs(spec)
    if spec.topology != "single":
        found.append(Problem("topology", f"{spec.topology} is not in this version; single is"))
    if may_hold_nul:
        found += _texts(spec, "")
    return found


def refusal(spec: JobSpec, *, may_hold_nul: bool = True) -> FirepoolError | None:
    """The error of a spec that cannot be taken, naming every problem at once; None: it can."""
    found = problems(spec, may_hold_nul=may_hold_nul)
    if found:
        return bad_values(found)
    if spec.image is not None:
        return ImageNotAllowed(
            f"image {brief(spec.image)} is not on the allowlist, which is empty in this version: leave `image` out and take "
            "the pool's own base environment",
            field="image",
        )
    return None


def bad_values(found: list[Problem]) -> BadRequest:
    """One error for all problems, in the order found."""
    words = "; ".join(f"{p.field} {p.words}" if p.field else p.words for p in found[:20])
    more = f" (and {len(found) - 20} more)" if len(found) > 20 else ""
    return BadRequest(
        words + more,
        field=found[0].field,
        problems=[{"field": p.field, "message": p.words} for p in found[:100]],
    )
