"""The way into the command line: `python -m tickd`, and the script `tickd`."""

import signal
import sys


def main() -> None:
    """Listen to SIGTERM, then load the commands and run one.

    As process 1, Python ignores a SIGTERM that nobody handles, and loading takes a moment in which a container would not
    hear that it is to stop.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from tickd import cli  # noqa: PLC0415  # see above

    cli.main()


if __name__ == "__main__":
    main()
