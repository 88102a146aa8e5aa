"""``log.format: json``: one object per line, whatever a message holds; console lines stay as they are."""

import json
import logging
from collections.abc import Iterator

import pytest

from router.config import LogConfig, parse_config
from router.config_errors import ConfigError
from router.log_lines import HANDLER, start_log, use_log_config

log = logging.getLogger("warmroute.test")


@pytest.fixture(autouse=True)
def _level_as_it_was() -> Iterator[None]:
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


def test_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(LogConfig(format="json"))
    # A logger apart: what the others say pytest sends from process to process, which lone surrogates break.
    apart = logging.Logger(log.name)
    apart.handlers = [one for one in logging.getLogger().handlers if one.name == HANDLER]
    apart.warning('replica %s is\nejected "%s"', "r0", "ü\ud800")
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("a fault")
    log.debug("not shown")
    first, second = (json.loads(line) for line in capsys.readouterr().err.splitlines())
    assert (first["level"], first["logger"]) == ("warning", "warmroute.test")
    assert first["message"].startswith('replica r0 is\nejected "ü')
    assert first["time"].endswith("+00:00") and set(first) == {"time", "level", "logger", "message"}
    assert second["message"] == "a fault" and second["exception"].endswith("ValueError: broken")


def test_a_reload_changes_format_and_level(capsys: pytest.CaptureFixture[str]) -> None:
    start_log(LogConfig())
    log.info("one")
    use_log_config(LogConfig(format="json", level="error"))
    log.info("two")
    log.error("three")
    console, as_json = capsys.readouterr().err.splitlines()
    assert console.endswith("INFO warmroute.test: one")
    assert json.loads(as_json)["message"] == "three"


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ConfigError, match=r"log\.format.*console.*json"):
        parse_config({"replicas": [{"url": "http://10.0.0.1"}], "log": {"format": "xml"}}, "router.yaml")
