"""`python -m softless` and the console script are the `softless` command."""

import os
import signal


def main() -> None:
    """Run the command. Ctrl-C while it is still being imported ends it at once, without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from softless.cli import main as run

    run()


if __name__ == "__main__":
    main()
