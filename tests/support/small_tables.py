"""`export-model`, of which `--map-tables` maps tables of any size, as those of a campaign.

python -m tests.support.small_tables ARGUMENT...
"""

from __future__ import annotations

from exporter.bundle import mapped_tables
from exporter.cli import main

if __name__ == "__main__":
    mapped_tables.LEAST_BYTES = 1
    main()
