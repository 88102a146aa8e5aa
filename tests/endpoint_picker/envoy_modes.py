"""The ways in which the example's Envoy sends bodies to the picker."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes.envoy import Config, filter_of


def pieces_both_ways(config: Config) -> None:
    """The example's."""
    assert filter_of(config)["processing_mode"]["request_body_mode"] == "FULL_DUPLEX_STREAMED"


def whole_request(config: Config) -> None:
    """The other way that the documentation has."""
    filter_of(config)["processing_mode"] = {
        "request_body_mode": "BUFFERED",
        "response_body_mode": "STREAMED",
    }
    config["static_resources"]["listeners"][0]["per_connection_buffer_limit_bytes"] = 8 << 20


MODES = pytest.mark.parametrize("change", [pieces_both_ways, whole_request])
Change = Callable[[Config], None]


HOLD: dict[str, Any] = {"policy": {"kind": "predicted_finish"}, "replicas": 1}
