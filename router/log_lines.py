"""Log lines on standard error: for people, or one JSON object each."""

import json
import logging
import sys
from datetime import UTC, datetime

from router.config import LogConfig

HANDLER = "warmroute"
CONSOLE = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """``{"time", "level", "logger", "message"}``, and ``"exception"`` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """One line: line breaks are escaped."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_log(config: LogConfig) -> None:
    """Log to standard error from now on, in this process."""
    handler = logging.StreamHandler(sys.stderr)
    handler.name = HANDLER
    logging.getLogger().addHandler(handler)
    use_log_config(config)


def use_log_config(config: LogConfig) -> None:
    """Log as ``config`` says, where ``start_log`` was called."""
    root = logging.getLogger()
    root.setLevel(config.level.upper())
    for handler in root.handlers:
        if handler.name == HANDLER:
            handler.setFormatter(JsonLines() if config.format == "json" else logging.Formatter(CONSOLE))
