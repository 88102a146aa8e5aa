"""Bug cases of the category tenant isolation, as far as salts go: the router has no tenants yet."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.prompt_blocks import read_prompt, root_key
from tests.fakes.proxy_rig import Rig, with_rig

PART = st.one_of(st.none(), st.text(alphabet="ab\0:1,|ms\x1f", max_size=4))


@settings(max_examples=500, deadline=None)
@given(one=st.tuples(PART, PART, PART), other=st.tuples(PART, PART, PART))
def test_B063_distinct_models_salts_and_adapters_have_distinct_roots(
    one: tuple[str | None, str | None, str | None], other: tuple[str | None, str | None, str | None]
) -> None:
    """Parts are framed by their length: no two tuples run together, whatever characters are in them."""
    assert (root_key(*one) == root_key(*other)) == (one == other)


def test_B063_the_known_collisions_do_not_collide() -> None:
    pairs = [(("org_1", "2345"), ("org_12345", "")), (("", "a"), ("a", "")), (("a", None), (None, "a"))]
    for one, other in pairs:
        assert root_key("m", *one) != root_key("m", *other)


def _chat(salt: str | None, words: int = 3_000) -> dict[str, Any]:
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "secret " * words}]}
    return body if salt is None else body | {"cache_salt": salt}


def test_B107_nothing_is_believed_cached_for_another_salt() -> None:
    """T1 warms a prefix; the same words with T2's salt, or without one, match nothing; T1's own match."""

    async def scenario(rig: Rig) -> None:
        first = await rig.ask(_chat("tenant-1"))
        for salt in ("tenant-2", None, ""):
            answer = await rig.ask(_chat(salt))
            assert answer.field("x-warmroute-matched-tokens") == "0"
        again = await rig.ask(_chat("tenant-1"))
        assert int(again.field("x-warmroute-matched-tokens") or 0) > 1_000
        assert again.field("x-warmroute-replica") == first.field("x-warmroute-replica")

    with_rig(
        scenario,
        replicas=2,
        policy={"kind": "prefix_affinity"},
        expose_routing=True,
    )


def test_B107_a_salt_reads_the_same_in_every_endpoint() -> None:
    def keys(body: bytes) -> list[int]:
        return list(read_prompt(body).keys)

    for prompt in (b'"prompt":"' + b"x" * 900 + b'"', b'"input":"' + b"x" * 900 + b'"'):
        salted = keys(b'{"cache_salt":"s",' + prompt + b"}")
        assert salted and not set(salted) & set(keys(b"{" + prompt + b"}"))
        assert not set(salted) & set(keys(b'{"cache_salt":"t",' + prompt + b"}"))
