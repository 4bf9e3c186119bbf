"""The documents that `export-model --json` prints: every field, with its type and what it means.

The text under a field is its description in the published schema (docs/reference/documents.md). A document
always has all its fields: `null` says that something is not known, or is not the case. `format_version`
comes before them. New releases may add fields, and never change what one means.
"""
