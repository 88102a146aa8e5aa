"""Bytes on the wire: JSON answers, stream events, and the one place that turns errors into OpenAI's shape."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import hdrs, web

from replica.server.client_error import ClientError, error_body
from replica.server.engine_thread import EngineDead

log = logging.getLogger("warmroute.replica")


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RequestFailed(Exception):
    """The engine could not finish this request."""


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def json_answer(value: Any, status: int = 200) -> web.Response:
    """An answer with this JSON body."""
    return web.Response(
        body=orjson.dumps(value), status=status, headers={hdrs.CONTENT_TYPE: "application/json"}
    )


@web.middleware
async def errors_in_openai_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error as OpenAI writes it; what is not the client's fault is logged."""
    try:
        return await handler(request)
    except ClientError as error:
        return json_answer(error.body(), error.status)
    except web.HTTPRequestEntityTooLarge as error:
        most = request.client_max_size // 2**20
        refusal = ClientError(
            f"the request body is larger than {most} MiB, the most this replica reads (max_body_mib)",
            status=error.status,
        )
        return json_answer(refusal.body(), refusal.status)
    except web.HTTPException as error:
        refusal = ClientError(
            f"{request.method} {request.path}: {error.reason}; this replica offers "
            "/v1/chat/completions, /v1/completions, /v1/models, /tokenize, /detokenize, /health, /metrics",
            status=error.status,
        )
        return json_answer(refusal.body(), refusal.status)
    except (EngineDead, RequestFailed) as failure:
        return json_answer(error_body(str(failure), "InternalServerError", 500), 500)
    except Exception as error:
        log.exception("%s %s failed", request.method, request.path)
        return json_answer(error_body(f"internal error: {error}", "InternalServerError", 500), 500)


async def echo_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Give back the client's x-request-id."""
    given = request.headers.get("x-request-id")
    if given is not None:
        response.headers["x-request-id"] = given
