"""What a token store must do, in sentences.

A test file subclasses `TokenStoreConformance` and provides two fixtures: `clock`, a `Clock`, and `tokens` (async), an empty
store that reads it.
"""

import pytest

from firepool_broker.shell.ports import Identity, TokenStore
from firepool_wire.errors import BadRequest, Conflict


class Clock:
    """Wall clock seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


ALICE = Identity(caller="team-a", person="alice", role="submitter")


class TokenStoreConformance:
    """Sentences about `ports.TokenStore`."""

    async def test_a_token_speaks_for_who_it_was_made_for(self, tokens: TokenStore) -> None:
        token = await tokens.create(ALICE, "laptop")
        assert await tokens.identify(token) == ALICE
        assert await tokens.identify(token) == ALICE

    async def test_an_unknown_token_speaks_for_nobody(self, tokens: TokenStore) -> None:
        token = await tokens.create(ALICE, "laptop")
        for other in ("", "fp_x", token[:-1], token + "x", token.upper(), "\ud800", "x" * 100_000):
            assert await tokens.identify(other) is None

    async def test_every_token_is_another(self, tokens: TokenStore) -> None:
        made = {await tokens.create(ALICE, f"t{n}") for n in range(20)}
        assert len(made) == 20
        assert min(map(len, made)) >= 40

    async def test_an_expired_token_speaks_for_nobody(self, tokens: TokenStore, clock: Clock) -> None:
        token = await tokens.create(Identity(caller="a", person="p", expires_at=clock.now + 10), "short")
        assert await tokens.identify(token) is not None
        clock.now += 10
        assert await tokens.identify(token) is None
        assert await tokens.identify(token) is None

    async def test_a_revoked_token_is_void_at_once(self, tokens: TokenStore) -> None:
        token, other = await tokens.create(ALICE, "laptop"), await tokens.create(ALICE, "ci")
        assert await tokens.identify(token) == ALICE
        assert await tokens.revoke("laptop", "team-a")
        assert await tokens.identify(token) is None
        assert await tokens.identify(other) == ALICE
        assert not await tokens.revoke("laptop", "team-a")

    async def test_a_caller_cannot_revoke_anothers_token(self, tokens: TokenStore) -> None:
        token = await tokens.create(ALICE, "laptop")
        assert not await tokens.revoke("laptop", "team-b")
        assert await tokens.identify(token) == ALICE

    async def test_a_name_is_unique_within_its_caller_until_it_is_revoked(self, tokens: TokenStore) -> None:
        old = await tokens.create(ALICE, "laptop")
        await tokens.create(Identity(caller="team-b", person="bob"), "laptop")
        with pytest.raises(Conflict):
            await tokens.create(ALICE, "laptop")
        await tokens.revoke("laptop", "team-a")
        new = await tokens.create(ALICE, "laptop")
        assert await tokens.identify(new) == ALICE
        assert await tokens.identify(old) is None

    async def test_an_expired_token_gives_its_name_free(self, tokens: TokenStore, clock: Clock) -> None:
        await tokens.create(Identity(caller="a", person="p", expires_at=clock.now + 1), "t")
        clock.now += 2
        assert await tokens.identify(await tokens.create(Identity(caller="a", person="p"), "t")) is not None

    @pytest.mark.parametrize(
        ("identity", "name"),
        [
            (Identity(caller="a", person="p", role="root"), "t"),
            (Identity(caller="", person="p"), "t"),
            (Identity(caller="a", person="p\n"), "t"),
            (Identity(caller="a", person="p"), ""),
            (Identity(caller="a\ud800", person="p"), "t"),
        ],
    )
    async def test_a_token_for_nonsense_is_refused(self, tokens: TokenStore, identity: Identity, name: str) -> None:
        with pytest.raises(BadRequest):
            await tokens.create(identity, name)
