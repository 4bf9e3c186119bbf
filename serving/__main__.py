"""`serve-model`, also as `python -m serving`."""

from exporter.terminal import interrupt_at_once


def main() -> None:
    """Run the command; what it needs is imported when Ctrl-C ends the process already."""
    interrupt_at_once()
    from serving import cli

    cli.main()


if __name__ == "__main__":
    main()
