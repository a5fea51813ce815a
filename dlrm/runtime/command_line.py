"""The end of a command of this project: the error in one line, and an exit status."""

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
    """Raised where something that a command started has failed; a command that was given wrongly raises ValueError."""


def exit_status(work: Callable[[], int]) -> int:
    """Returns the exit status of `work`, whose errors may be the user's; stderr gets the error and its notes.

    1 for FailedError, 2 for other ValueErrors and OSError; 128 plus its number for a signal: of SIGINT that is
    KeyboardInterrupt, of SIGPIPE a stdout that nobody reads any more, both without a message. SystemExit and all other
    errors are passed on.
    """
    try:
        try:
            return work()
        finally:
            sys.stdout.flush()  # here, and not at the interpreter's end, where an error has a traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what the buffer still holds
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
    """The text with control and format characters as escapes, but line ends and tabs: a file's name could steer a
    terminal."""
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
    """Whether this is a rank of torchrun, which ends for good when the rank fails."""
    tries = [os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    return "TORCHELASTIC_ERROR_FILE" in os.environ and tries[0] == tries[1]


def told_to_torchrun(line: str) -> bool:
    """Hands `line` to torchrun, for the end of its message (torch.distributed.elastic.multiprocessing.errors).

    Returns False where nobody would print it.
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
    """Ends this rank without the interpreter's shutdown, where no process waits for more than its end.

    After a failure other ranks may wait in a collective that this rank's teardown joins; after a success threads of
    torch's abort it now and then.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if status or multiprocessing.parent_process() is None:
        os._exit(status)
    sys.exit()
