"""How a command talks to the broker: the SDK's own transport and settings, never its background threads."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import typer

from firepool_ray import _api, _config, _package
from firepool_ray._http import Disconnected
from firepool_wire.errors import BrokerUnavailable

#: Seconds that a command waits for one answer, and that it repeats a call while no broker answers.
_ANSWER_S, _PATIENCE_S = 60.0, 5.0
#: Seconds of one long poll of `wait`.
_POLL_S = 30.0


def home() -> Path:
    """The state folder of local brokers."""
    return _config.home()


@dataclass(frozen=True, slots=True)
class Target:
    """What the shared options said; empty = not given."""

    address: str
    token: str
    profile: str

    def connect(self) -> "contextlib.closing[Api]":
        """The broker that these options, the environment, `firepool.toml` or the local state folder name.

        Raises:
            BrokerUnavailable: none of them names one.
        """
        settings = _config.with_profile(
            _config.Settings(address=self.address or None, token=self.token or None, profile=self.profile or None)
        )
        local = _config.local_broker(_config.home())
        if settings.address:
            # A local broker named by its address is entered with its own token.
            same = local is not None and local.address.rstrip("/") == settings.address.rstrip("/")
            token = settings.token or (local.token if local and same else None)
            found = _config.Target(address=settings.address, token=token, ca=settings.ca)
        elif local:
            found = local
        else:
            raise BrokerUnavailable(
                "no broker runs here and none is named: `firepool up`, or --address, or FIREPOOL_ADDRESS"
            )
        return contextlib.closing(Api(found, settings))


def target(context: typer.Context) -> Target:
    """The shared options of this invocation."""
    found = context.obj
    if not isinstance(found, Target):
        raise TypeError("the shared options are read by the app's callback, which did not run")
    return found


class Api:
    """One broker for the time of one command. Every call raises `FirepoolError`."""

    def __init__(self, found: _config.Target, settings: _config.Settings) -> None:
        self.address = found.address
        self._settings = settings
        self._api = _api.Api(found, request_timeout_s=_ANSWER_S, patience_s=_PATIENCE_S)

    def close(self) -> None:
        """Close the connections."""
        self._api.close()

    def sku(self, named: str) -> str:
        """The pool that a name means here: the option, else the profile's, else `cpu`; aliases resolved."""
        chosen = named or self._settings.sku or "cpu"
        return self._settings.sku_alias.get(chosen, chosen)

    def get(self, path: str, **query: str) -> Any:
        """A GET's JSON answer."""
        return self._api.json("GET", path + (f"?{urlencode(query)}" if query else ""))

    def post(self, path: str, body: object) -> Any:
        """A POST's JSON answer."""
        return self._api.json("POST", path, body)

    def put(self, path: str, body: object) -> Any:
        """A PUT's JSON answer."""
        return self._api.json("PUT", path, body)

    def stream(self, path: str, **query: str) -> Iterator[bytes]:
        """A GET's body in pieces as they come."""
        try:
            with self._api.stream(path + (f"?{urlencode(query)}" if query else "")) as (_, _, pieces):
                yield from pieces
        except Disconnected as why:
            raise BrokerUnavailable(f"the connection to {self.address} broke: {why}") from None

    def wait(self, job: str) -> dict[str, Any]:
        """The job's body once it is terminal."""
        while True:
            body: dict[str, Any] = self.get(f"/v1/jobs/{job}/wait", timeout_s=str(_POLL_S))
            if body["state"] in ("SUCCEEDED", "FAILED", "CANCELLED"):
                return body

    def upload_folder(self, folder: Path) -> str:
        """Send a folder as a code package; its digest. Files that `.gitignore` names stay at home."""
        data = _package.zip_folder(folder)
        answer = self._api.raw("POST", "/v1/blobs", data)
        return str(json.loads(answer.body)["digest"])
