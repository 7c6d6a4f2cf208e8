"""`outrider`, and `python -m outrider.cli`, the command line without an installed script."""

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs: the client alone comes without."""
    try:
        from outrider.cli.main import app
    except ModuleNotFoundError as error:
        print(f"outrider: {error.name} is missing; the command needs `pip install 'outrider[serve]'`", file=sys.stderr)
        raise SystemExit(2) from None
    app(prog_name="outrider")


if __name__ == "__main__":
    main()
