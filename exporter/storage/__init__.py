"""Object stores: checkpoints under `s3://`, `gs://` and `az://` URLs, read through local mirrors."""
