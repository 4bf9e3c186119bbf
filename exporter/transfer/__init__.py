"""Models in object stores: open one as a local path, upload what is published to it, and download it."""
