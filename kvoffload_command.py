"""Entry point of the command `kvoffload`.

It is not in the package, so that Ctrl-C ends the command in order also while the package, whose
import may take seconds on a busy machine, is still being imported.
"""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; never returns."""
    try:
        from kvoffload_async.cli.app import main as run  # noqa: PLC0415 - see above

        run()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
