"""What the exit codes of the command line mean, and the exception that carries one."""

from __future__ import annotations

DONE, FAILED, USAGE, MODEL, REQUEST, OUTPUT, PARTIAL, DIFFERS, LOST = range(9)
INTERRUPTED, PIPE = 130, 141  # as shells report SIGINT and SIGPIPE

EXIT_CODES = {
    DONE: "done",
    FAILED: "failed inside: a fault of nanok3, or numbers of the model that are not finite",
    USAGE: "wrong options, or an input file that cannot be read",
    MODEL: "model refused: no such directory, a damaged file, no memory for it, a failed check",
    REQUEST: "request refused: empty, too long, not UTF-8",
    OUTPUT: "output cannot be written: it exists, or the disk is full",
    PARTIAL: "batch: every line has a record, some of them an error",
    DIFFERS: "replay: a reply is not the recorded one",
    LOST: "a rank of several has died or does not answer; what ran has ended, start again",
    INTERRUPTED: "interrupted by Ctrl-C",
    PIPE: "whoever read the output has gone",
}


class Refused(Exception):
    """The end of a command with one of EXIT_CODES; the message is one sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
