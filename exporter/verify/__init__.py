"""Is a bundle what it should be: its files, its bytes, its answers; and a whole log."""
