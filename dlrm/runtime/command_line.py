"""The end of every command of this project: a one-line error, and an exit status."""

import json
import multiprocessing
import os
import signal
import sys
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2


class FailedError(ValueError):
    """Raised if something that a command started has failed; for wrong usage, a command raises ValueError."""


def exit_status(work: Callable[[], int]) -> int:
    """Returns the exit status of `work`; writes an error that may be the user's, and its notes, to stderr.

    1 for FailedError, 2 for other ValueErrors and OSError; 128 plus the signal number for signals: SIGINT for
    KeyboardInterrupt, SIGPIPE if nobody reads stdout any more, both without a message. SystemExit and all other errors
    propagate.
    """
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # here, because an error at interpreter exit would print a traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the rest of the buffer
        return 128 + signal.SIGPIPE
    except ValueError as error:
        _say(f"error: {error}", *_notes(error))
        return EXIT_FAILED if isinstance(error, FailedError) else EXIT_BAD_INPUT
    except OSError as error:
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        _say(f"error: {where}{error.strerror or error}", *_notes(error))
        return EXIT_BAD_INPUT
    except KeyboardInterrupt as error:
        _say(*_notes(error))
        return 128 + signal.SIGINT
    except SystemExit as error:
        _say(*_notes(error))
        raise


def printable(text: str) -> str:
    """Returns the text with control and format characters escaped, except line ends and tabs: a file name could
    control a terminal."""
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if _steers(c) else c for c in text)


def _steers(character: str) -> bool:
    return character not in "\n\t" and unicodedata.category(character) in ("Cc", "Cf")


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _say(*lines: str) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)


def torchrun_says_errors() -> bool:
    """Whether this is a rank of torchrun, and torchrun will not restart it."""
    tries = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return "TORCHELASTIC_ERROR_FILE" in os.environ and tries[0] == tries[1]


def told_to_torchrun(line: str) -> bool:
    """Passes `line` to torchrun, for the end of its message (torch.distributed.elastic.multiprocessing.errors).

    Returns False if nobody would print it.
    """
    if not torchrun_says_errors():
        return False
    message = {"message": f"\n{line}", "extraInfo": {"timestamp": str(int(time.time()))}}
    try:
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": message}))
    except OSError:
        return False
    return True


def exit_process(status: int) -> NoReturn:
    """Ends this rank without the interpreter's shutdown, if its parent waits only for its exit.

    After a failure, other ranks may wait in a collective that this rank's teardown joins; after a success, torch's
    threads occasionally abort the teardown.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if status or multiprocessing.parent_process() is None:
        os._exit(status)
    sys.exit()
