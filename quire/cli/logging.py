"""Log lines for a terminal: the time, the level, what happened."""

from __future__ import annotations

import logging
import os
import sys


class ShortFormatter(logging.Formatter):
    """`12:01:03 info    smollm2-135m on …`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up(level: str) -> None:
    """Show quire's own log from `level` on, on stderr. Other libraries' loggers stay as they are."""
    # transformers has its own handler and advice for people who call it themselves.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("quire")
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, ShortFormatter):
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
