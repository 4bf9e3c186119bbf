"""`python -m exporter`: the command `export-model`."""

from exporter.cli import main

main()
