"""Files, paths, names on disk; object stores (`s3://`, `gs://`, `az://`), read through local mirrors."""
