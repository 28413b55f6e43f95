"""Runs the command: `python -m kvoffload_async`."""

from kvoffload_async.cli.app import main

if __name__ == "__main__":
    main()
