"""The command line: reads options, calls one function of `commands.py`, prints what went wrong.

Only this file and its parts (`cli_options.py`, `cli_plan.py`, `cli_bench.py`) know click. Results
go to stdout, everything else to stderr. What commands call brings torch, so it is imported inside
the functions: `--help` and wrong options do not wait for it.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from nanok3.cli_bench import bench, trace
from nanok3.cli_options import COMMON, EPILOG, FILE, RECORD, read_options, shared
from nanok3.cli_plan import check, plan
from nanok3.console import (
    OutputError,
    TextError,
    close_stdout,
    decode_text,
    note,
    read_file,
    read_stdin,
)
from nanok3.exits import DONE, INTERRUPTED, OUTPUT, PIPE, REQUEST, Refused


@click.group(epilog=EPILOG)
def cli() -> None:
    """Kimi K3 on this machine.

    An option overrides what a request says, that what the model's generation_config.json proposes,
    and that what is built in.
    """


@cli.command(epilog=EPILOG)
@RECORD
@shared(COMMON)
def chat(record: Path | None, **given: Any) -> int:
    """Talk with the model. Ctrl-C stops an answer, a second one leaves."""
    from nanok3 import commands

    return commands.chat(commands.Options(**read_options(given)), record)


@cli.command(epilog=EPILOG)
@click.argument("prompt", required=False)
@click.option("--file", type=FILE, help="Holds the prompt.")
@click.option("--messages", type=FILE, help="Holds a JSON list of messages.")
@click.option("--tools", type=FILE, help="Holds a JSON list of tools in OpenAI's form.")
@click.option("--show-thinking", is_flag=True, help="On stderr.")
@click.option("--json", "as_json", is_flag=True, help="The whole result as one JSON object.")
@RECORD
@shared(COMMON)
def generate(
    prompt: str | None,
    file: Path | None,
    messages: Path | None,
    tools: Path | None,
    show_thinking: bool,
    as_json: bool,
    record: Path | None,
    **given: Any,
) -> int:
    """Reply once, to PROMPT, a file, or stdin if PROMPT is - or left out.

    The text goes to stdout while it comes, and each tool call as a line of JSON.
    """
    if sum(source is not None for source in (prompt, file, messages)) > 1:
        raise click.UsageError("give one of PROMPT, --file and --messages")
    from_stdin = prompt == "-" or (prompt is None and file is None and messages is None)
    if prompt is None and from_stdin and sys.stdin.isatty():
        raise click.UsageError("no prompt: give PROMPT, --file, --messages or text on stdin")
    text = ""
    if from_stdin:
        text = read_stdin()
    elif file is not None:
        text = read_file(file)
    elif prompt is not None:  # the system's arguments may hold any bytes
        text = decode_text(prompt.encode("utf-8", "surrogateescape"), "the prompt")

    from nanok3 import commands

    return commands.generate(
        commands.Options(**read_options(given)),
        text if messages is None else commands.read_json_list(messages, "messages"),
        tools=None if tools is None else commands.read_json_list(tools, "tools"),
        show_thinking=show_thinking,
        as_json=as_json,
        record=record,
    )


@cli.command(epilog=EPILOG)
@click.argument("record", type=FILE)
@click.option("--model", type=FILE, metavar="DIR", help="Needed unless it is the packaged one.")
@click.option("--draft", metavar="DIR|none", help="Needed unless it is the packaged one.")
@click.option("--device", help="cpu, cuda or cuda:N; else the record's.")
@click.option("--strict", is_flag=True, help="One row at a time, whatever the record says.")
def replay(
    record: Path, model: Path | None, draft: str | None, device: str | None, strict: bool
) -> int:
    """Run again what `--record` wrote, and say where it first differs.

    A line a reply. A greedy reply may differ by rounding where the two best logits were less than
    0.001 apart; that is said, and differs nonetheless.
    """
    from nanok3 import commands

    return commands.replay(record, model, draft=draft, device=device, strict=strict)


@cli.command(epilog=EPILOG)
@click.argument("source", metavar="IN.jsonl")
@click.argument("target", metavar="OUT.jsonl")
@click.option("--resume", is_flag=True, help="Go on with the OUT.jsonl of a run that was cut off.")
@click.option("--errors", metavar="FILE", help="Gets the records of failed lines besides.")
@click.option(
    "--on-interrupt",
    type=click.Choice(["finish", "stop"]),
    default="finish",
    show_default=True,
    help="The first Ctrl-C lets the replies that run be finished, or not.",
)
@RECORD
@shared(COMMON)
def batch(
    source: str,
    target: str,
    resume: bool,
    errors: str | None,
    on_interrupt: str,
    record: Path | None,
    **given: Any,
) -> int:
    """Answer every line of IN.jsonl (or gzip of it), in order; - is stdin or stdout.

    A line is {"prompt": ...}, {"messages": ...} or OpenAI's batch form, each with the options of a
    chat completion. A line that cannot be answered gets a record that says why. What is finished
    is kept in OUT.jsonl.journal until OUT.jsonl is whole, so that nothing ends a run for good.
    """
    from nanok3 import commands

    options = commands.Options(**read_options(given))
    return commands.batch(
        options,
        source,
        target,
        resume=resume,
        errors=errors,
        finish_running=on_interrupt == "finish",
        record=record,
    )


for command in (plan, check, bench, trace):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line; an error is a sentence on stderr."""
    code, message = DONE, ""
    try:
        with cli.make_context("nanok3", list(arguments) or ["--help"]) as context:
            code = cli.invoke(context)
    except click.exceptions.Exit as error:  # --help
        code = error.exit_code
    except click.ClickException as error:
        code, message = error.exit_code, error.format_message()
    except Refused as error:
        code, message = error.code, str(error)
    except TextError as error:
        code, message = REQUEST, str(error)
    except OutputError as error:
        code, message = OUTPUT, str(error)
    except BrokenPipeError:
        code = PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        code, message = OUTPUT, f"stdout cannot be written: {error.strerror}"  # by --help
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code in (OUTPUT, PIPE):
        close_stdout()
    if message:
        note(f"nanok3: {message}")
    return code


def main() -> None:
    # A stream that the shell closed is None. Nothing on stdin is fine, nowhere for notes too.
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115, open to the end
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        note("nanok3: stdout is closed, and results go there")
        sys.exit(OUTPUT)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks is escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
