"""Errors a user can cause or must act on, each with the exit code the process leaves with."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class Exit(IntEnum):
    """Process exit codes. torchrun flattens them to 1, so status.json repeats the true one."""

    OK = 0
    BUG = 1
    CONFIG = 2
    ENVIRONMENT = 3
    WRONG_NUMBERS = 4
    NON_FINITE = 5
    RANK_LOST = 6
    OUT_OF_MEMORY = 7
    NOT_SAVED = 8
    PREEMPTED = 75
    INTERRUPTED = 130


class UserError(Exception):
    """Something outside the code is wrong; the message alone must be enough to mend it."""

    exit_code = Exit.CONFIG


class ConfigError(UserError):
    """The config or the command line is wrong."""


class EnvironmentFault(UserError):
    """The machine, its libraries or the launch environment cannot run this config."""

    exit_code = Exit.ENVIRONMENT


class OutOfMemory(UserError):
    """Memory ran out; the message says what was asked, what was free and what to lower."""

    exit_code = Exit.OUT_OF_MEMORY


class NotSaved(UserError):
    """The result could not be written; it was printed to stdout instead."""

    exit_code = Exit.NOT_SAVED


def nearest(word: str, accepted: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` for the closest accepted name, or an empty string."""
    match = difflib.get_close_matches(str(word), list(accepted), n=1, cutoff=0.6)
    return f"; did you mean {match[0]!r}?" if match else ""
