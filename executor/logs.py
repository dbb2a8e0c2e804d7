"""Logs of processes that run for long: lines for people, or JSON with ids for machines."""

from __future__ import annotations

import logging
import os
import sys

FORMAT = "CORAL_LOG_FORMAT"  # 'json', or lines for people
IDS = ("run_id", "scenario", "decision_id", "lease_id", "replica_id", "node")


def log_to_stderr(name: str | None = None) -> None:
    """Everything from INFO on, or that of one logger; what `extra` says of a line goes along."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter(json=os.environ.get(FORMAT) == "json"))
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    for chatty in ("httpx", "botocore"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def formatter(*, json: bool) -> logging.Formatter:
    """One line for one record: an object with `time`, `level`, `logger`, `event` and ids."""
    if not json:
        return logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    import structlog  # not at the top: commands that log nothing start without it

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.stdlib.ExtraAdder(allow=IDS),
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
            structlog.stdlib.add_log_level,
            structlog.stdlib.add_logger_name,
        ],
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
    )
