"""Terminal output and input: notes on stderr, tables, logging, line editing with a history."""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

HISTORY_LINES = 1000


def dim(text: str, stream: TextIO) -> str:
    """`text` in grey if `stream` shows colours (https://no-color.org)."""
    return f"\033[2m{text}\033[0m" if _has_colours(stream) else text


def _has_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def use_line_editing(words: list[str]) -> None:
    """Arrow keys, a persistent history, and Tab completion of `words`, if readline is available."""
    try:
        import atexit
        import readline
    except ImportError:  # Windows
        return
    from quire.paths import cache_dir

    path = cache_dir("chat_history")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            readline.read_history_file(path)
    except OSError:
        return
    readline.set_history_length(HISTORY_LINES)
    readline.set_completer(lambda text, state: _nth([word for word in words if word.startswith(text)], state))
    readline.set_completer_delims(" ")
    readline.parse_and_bind("bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete")
    atexit.register(_save_history, str(path))


def _nth(words: list[str], index: int) -> str | None:
    return words[index] if index < len(words) else None


def _save_history(path: str) -> None:
    import readline

    try:
        readline.write_history_file(path)
        os.chmod(path, 0o600)
    except OSError:
        pass


def say(text: str = "", end: str = "\n") -> None:
    """Print a note on stderr, dim, after flushing stdout."""
    sys.stdout.flush()
    print(dim(text, sys.stderr), end=end, file=sys.stderr, flush=True)


def table(rows: list[tuple[str, str]], title: str = "", width: int = 12) -> str:
    """Two columns, the first at least `width` characters wide."""
    width = max(width, *(len(name) for name, _ in rows))
    lines = [f"  {name:<{width}}  {value}" for name, value in rows]
    return "\n".join([title, *lines] if title else lines)


class ShortFormatter(logging.Formatter):
    """`12:01:03 info    smollm2-135m on …`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower():<7} {record.getMessage()}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def set_up_logging(level: str) -> None:
    """Log quire's messages from `level` on to stderr. Loggers of other libraries are unchanged."""
    # transformers has its own handler, and advice for its direct users.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logger = logging.getLogger("quire")
    for handler in list(logger.handlers):
        if isinstance(handler.formatter, ShortFormatter):
            logger.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
