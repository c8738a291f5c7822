"""In a terminal, lines and the bar do not collide, and the bar fits the terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from softless.commands.progress import fitting

ROOT = Path(__file__).parents[2]
WIDTH = 60
PROGRAM = """
import time
from softless.commands.common import complain
from softless.commands.progress import progress, say
with progress(10, True) as bar:
    for step in range(4):
        bar(f"epoch {step}/300   loss 2.302   1,083 images/s   lr 2.3e-03", 1)
        time.sleep(0.3)
        say(f"result {step}")
    say("a note", err=True)
    complain("a warning", "warning")
    time.sleep(0.3)
say("the end")
"""


def run(*, piped):
    """Run PROGRAM with stderr on a terminal, and stdout too unless it is piped; return what both got."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"}
    out = subprocess.PIPE if piped else theirs
    command = [sys.executable, "-c", PROGRAM]
    with subprocess.Popen(command, stdin=theirs, stdout=out, stderr=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                shown += (part := os.read(ours, 4096))
            except OSError:  # nobody holds the other end any more
                break
            if not part:
                break
        got = process.stdout.read().decode() if piped else ""
    os.close(ours)
    assert process.returncode == 0
    return shown.decode(), got


def screens(shown):
    """Return the rows of the terminal, each as wide as it was at its widest, and the rows at the end."""
    rows, row, column, widest = [""], 0, 0, 0
    for code, letter, character in re.findall(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])", shown):
        if letter == "A":
            row -= int(code or 1)
        elif letter == "K":
            rows[row] = "" if code == "2" else rows[row][:column]
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif character:
            rows[row] = rows[row][:column].ljust(column) + character + rows[row][column + 1 :]
            column += 1
            widest = max(widest, column)
    return [text.rstrip() for text in rows], widest


LINES = ["result 0", "result 1", "result 2", "result 3"]
NOTES = ["a note", "warning: a warning"]


@pytest.mark.parametrize("piped", [False, True])
def test_lines_that_are_printed_while_a_bar_is_shown_do_not_collide_with_it(piped):
    shown, got = run(piped=piped)
    rows, widest = screens(shown)
    assert "40%" in shown
    assert "epoch 3/300   loss" in shown
    assert widest <= WIDTH
    assert [text for text in rows if text] == (NOTES if piped else [*LINES, *NOTES, "the end"])
    assert got == ("".join(f"{line}\n" for line in [*LINES, "the end"]) if piped else "")


def test_a_label_loses_its_last_fields_if_the_terminal_is_narrow():
    label = "epoch 1/6   loss 2.302   1,083 images/s"
    assert fitting(label, 40) == label
    assert fitting(label, 38) == "epoch 1/6   loss 2.302"
    assert fitting(label, 5) == "epoch 1/6"
