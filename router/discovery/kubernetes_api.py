"""Reading and watching a list of objects of the Kubernetes API."""

import os
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from router.config_errors import ConfigError
from router.discovery_config import KubernetesDiscovery

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where the service account of a pod is mounted."""
WATCH_S = 60
"""The API server ends a watch after this; a connection that died in silence is noticed a little later."""
LIST_S = 15.0
_LINE_BYTES = 4 * 1024 * 1024


class GoneError(Exception):
    """The version to watch from is no longer known: the list must be read again."""


class ApiError(Exception):
    """The API server refused: says what to do."""


class ObjectList:
    """One list: the EndpointSlices of a service, or the pods with certain labels."""

    def __init__(self, config: KubernetesDiscovery) -> None:
        """Raises ``ConfigError`` if it cannot be told where the API server is."""
        namespace = config.namespace or _own_namespace(config)
        self._api = config.api or _own_cluster(config)
        self._token_file = config.token_file or (None if config.api else str(ACCOUNT / "token"))
        self._ca_file = config.ca_file or (None if config.api else str(ACCOUNT / "ca.crt"))
        if config.service is not None:
            self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
            self._selector = f"kubernetes.io/service-name={config.service}"
        else:
            self._path = f"/api/v1/namespaces/{namespace}/pods"
            self._selector = config.pods or ""

    def session(self) -> aiohttp.ClientSession:
        """Connections that trust the authority as the file has it now. Raises ``OSError``."""
        trust = ssl.create_default_context(cafile=self._ca_file) if self._api.startswith("https:") else False
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trust), read_bufsize=_LINE_BYTES, trust_env=False
        )

    async def read(self, session: aiohttp.ClientSession) -> tuple[list[dict[str, Any]], str]:
        """All objects there are, and the version to watch from."""
        async with session.get(
            self._api + self._path,
            params={"labelSelector": self._selector},
            headers=self._headers(),
            timeout=aiohttp.ClientTimeout(total=LIST_S),
            allow_redirects=False,
        ) as answer:
            await self._require_ok(answer)
            found = orjson.loads(await answer.read())
            return found["items"] or [], found["metadata"]["resourceVersion"]

    async def changes(
        self, session: aiohttp.ClientSession, version: str
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """What happened since ``version``: ADDED, MODIFIED, DELETED or BOOKMARK, and the object.

        Ends when server or network end it. Raises ``GoneError``, ``ApiError``, ``aiohttp.ClientError``.
        """
        params = {
            "labelSelector": self._selector,
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = aiohttp.ClientTimeout(total=WATCH_S + LIST_S, sock_connect=LIST_S)
        async with session.get(
            self._api + self._path,
            params=params,
            headers=self._headers(),
            timeout=timeout,
            allow_redirects=False,
        ) as answer:
            await self._require_ok(answer)
            while line := await _line(answer):
                event = orjson.loads(line)
                kind, found = event["type"], event["object"]
                if kind == "ERROR":
                    if found.get("code") == 410:
                        raise GoneError
                    raise ApiError(f"the watch ended: {found.get('message')}")
                yield kind, found

    def _headers(self) -> dict[str, str]:
        """With the token as the file has it now: it is replaced every hour or so. Raises ``OSError``."""
        if self._token_file is None:
            return {}
        return {"authorization": f"Bearer {Path(self._token_file).read_text(encoding='ascii').strip()}"}

    async def _require_ok(self, answer: aiohttp.ClientResponse) -> None:
        if answer.status == 200:
            return
        if answer.status == 410:
            raise GoneError
        what = f"{answer.method} {self._path} answered {answer.status}"
        if answer.status == 401:
            raise ApiError(f"{what}: the token in {self._token_file} is not accepted")
        if answer.status == 403:
            resource = self._path.rpartition("/")[2]
            raise ApiError(f"{what}: the service account needs a Role with get, list and watch on {resource}")
        raise ApiError(what)


async def _line(answer: aiohttp.ClientResponse) -> bytes:
    """The next line of a watch; empty at its end, and where it broke: a new watch tells the rest."""
    try:
        return await answer.content.readline()
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError):
        return b""


def _own_cluster(config: KubernetesDiscovery) -> str:
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{key}") for key in ("HOST", "PORT"))
    if not host:
        raise ConfigError(
            f"discovery: {config.label}: not in a pod (KUBERNETES_SERVICE_HOST is not set); "
            "set api, and token_file and ca_file as needed"
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port or 443}"


def _own_namespace(config: KubernetesDiscovery) -> str:
    try:
        return (ACCOUNT / "namespace").read_text(encoding="ascii").strip()
    except OSError:
        raise ConfigError(
            f"discovery: {config.label}: no namespace, and {ACCOUNT}/namespace cannot be read; set namespace"
        ) from None
