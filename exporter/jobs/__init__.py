"""Work over many bytes as independent tasks: planned by a driver, run by an engine, reported by receipts."""
