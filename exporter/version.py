"""The version of this program; the package's metadata takes it from here."""

__version__ = "0.2.1"
