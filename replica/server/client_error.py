"""What is the client's fault, and the OpenAI shape every error is told in."""

from typing import Any

_TYPES = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError", 413: "BadRequestError"}


class ClientError(Exception):
    """A request this replica refuses: what is wrong with it and what to do."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status

    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return error_body(self.message, _TYPES.get(self.status, "BadRequestError"), self.status, self.param)


def error_body(message: str, kind: str, code: int, param: str | None = None) -> dict[str, Any]:
    """``{"error": {...}}`` as OpenAI and vLLM write it; ``code`` is the HTTP status.

    >>> error_body("no such model", "NotFoundError", 404, "model")["error"]["param"]
    'model'
    """
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
