"""Why a server could not be talked to, in the operating system's words and not the client library's."""

import os

import aiohttp


def connection_trouble(error: BaseException) -> str:
    """In a few words, the same for the same cause, so that they can be counted.

    >>> connection_trouble(ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)"))
    'Connection refused'
    >>> connection_trouble(TimeoutError())
    'no answer in time'
    """
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "no such host"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "the server closed the connection"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    return str(error) or type(error).__name__
