"""Which model an OpenAI server serves: the first that ``/v1/models`` names."""

from collections.abc import Mapping
from dataclasses import dataclass

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


async def first_model(url: str, headers: Mapping[str, str] | None = None) -> ServedModel:
    """Ask the server at ``url``. Raises ``Unreachable``."""
    address = url.rstrip("/") + "/v1/models"
    limit = aiohttp.ClientTimeout(total=ASK_LIMIT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit, headers=headers) as session,
            session.get(address) as response,
        ):
            models = orjson.loads(await response.read())["data"] if response.status == 200 else []
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise Unreachable(
            f"{address} cannot be reached: {connection_trouble(error)}; does a server run there?"
        ) from error
    except (orjson.JSONDecodeError, KeyError, TypeError):
        models = []
    if not models:
        raise Unreachable(f"{address} names no model; give one with --model")
    longest = models[0].get("max_model_len")
    return ServedModel(str(models[0].get("id")), longest if type(longest) is int else None)
