"""Where log lines go: to stderr, from ``FLASHREC_LOG_LEVEL`` (default ``INFO``) up."""

from __future__ import annotations

import logging
import os
import sys


def configure_logging() -> None:
    """Set up this process's log; ``serve``'s other processes do the same."""
    logging.basicConfig(
        level=os.environ.get("FLASHREC_LOG_LEVEL", "INFO").upper(),
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        stream=sys.stderr,
    )
