"""Work over many bytes as independent tasks: planned by a driver, done by an engine, reported by receipts."""
