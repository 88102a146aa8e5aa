"""Which models an OpenAI server serves, as ``/v1/models`` tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from sim.connection_trouble import connection_trouble

ASK_LIMIT_S = 10.0


class Unreachable(Exception):
    """Nobody answers where a server should be, or not as one does."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of ``/v1/models``."""

    name: str
    max_tokens: int | None
    """Context length, where the server tells (``max_model_len``: vLLM, SGLang, ours)."""
    of_router: bool = False
    """A router of ours lists it, for its fleet: no replica of ours leaves out the length."""


async def first_model(url: str, headers: Mapping[str, str] | None = None) -> ServedModel:
    """The first that the server at ``url`` names. Raises ``Unreachable``."""
    models = await _models(url, headers)
    if not models:
        raise Unreachable(f"{_address(url)} names no model; give one with --model")
    return _served(models[0])


async def named_model(url: str, name: str, headers: Mapping[str, str] | None = None) -> ServedModel:
    """What the server at ``url`` tells of the model ``name``, if anything. Raises ``Unreachable``."""
    named = (one for one in await _models(url, headers) if one.get("id") == name)
    return next(map(_served, named), ServedModel(name, None))


async def _models(url: str, headers: Mapping[str, str] | None) -> list[dict[str, Any]]:
    address = _address(url)
    limit = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.get(address) as response,
        ):
            models = orjson.loads(await response.read())["data"] if response.status == 200 else []
            return [one for one in models if isinstance(one, dict)]
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(
            f"{address} cannot be reached: {connection_trouble(error)}; does a server run there?"
        ) from error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return []


def _address(url: str) -> str:
    return url.rstrip("/") + "/v1/models"


def _served(model: Mapping[str, Any]) -> ServedModel:
    longest = model.get("max_model_len")
    of_router = longest is None and model.get("owned_by") == "warmroute"
    return ServedModel(str(model.get("id")), longest if type(longest) is int else None, of_router)
