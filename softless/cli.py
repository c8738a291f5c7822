"""The softless command: one file per verb, in softless/commands/.

Exit status of every verb: 0 ok, 1 a check failed, 2 usage, 3 bad input, 130 interrupted.
"""

import os
import re
import signal
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from softless.commands import (
    bench,
    bench_model,
    convert,
    ctrl_c,
    data_check,
    evaluate,
    explain,
    predict,
    probe,
    report,
    study,
    train,
)
from softless.commands import list as list_
from softless.errors import did_you_mean
from softless.machine import installed_version

# Plain help: rich would double the time `--help` takes.
PLAIN: dict[str, Any] = {
    "epilog": "Exit status: 0 ok, 1 a check failed, 2 usage, 3 bad input.",
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "add_completion": False,
    "no_args_is_help": True,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


PYTHON_TYPE = re.compile(r" <(str|list\[str\]|path)>(?=  )")


class Command(TyperCommand):
    """A verb whose help is plain, and that suggests the nearest option if it gets one that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", None)
            if name is None or not hasattr(error, "possibilities"):
                raise
            close = did_you_mean(name, [option for parameter in self.params for option in parameter.opts])
            return ctx.fail(f"there is no option {name!r}{f': {close}' if close else ''}")

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the line of usage; typer would put a required one in braces."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def get_help(self, ctx: Any) -> str:
        """Return the page of help without the Python types that typer writes behind arguments."""
        return PYTHON_TYPE.sub(lambda found: " " * len(found[0]), super().get_help(ctx))


app = typer.Typer(
    name="softless",
    help="Attention without the softmax: look into mechanisms and time them, train models with them, and convert "
    "trained models to them.",
    **PLAIN,
)
VERBS = (list_, explain, bench, bench_model, train, evaluate, predict, probe, convert, study, report)
for verb in VERBS:
    name = verb.__name__.rpartition(".")[2].replace("_", "-")
    app.command(name, cls=Command, help=verb.HELP, short_help=verb.SUMMARY)(verb.run)

data = typer.Typer(help="Check images or a text before training: folders, parquet and text files.", **PLAIN)
data.command("check", cls=Command, help=data_check.HELP, short_help=data_check.SUMMARY)(data_check.run)
app.add_typer(data, name="data", short_help="Check images or a text before training.")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"softless {installed_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options that all verbs share."""


def main() -> None:
    """Run the command; Ctrl-C ends it within seconds (softless/commands/ctrl_c.py)."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a background job ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ctrl_c.WATCH.start()
    try:
        app(prog_name="softless")
    except KeyboardInterrupt:
        ctrl_c.end()
    except SystemExit as ended:
        if ended.code == ctrl_c.INTERRUPTED and "WORLD_SIZE" not in os.environ:
            ctrl_c.end()
        raise
