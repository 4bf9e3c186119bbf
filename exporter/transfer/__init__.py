"""Models in object stores: open one as a local path, and carry what is published to it and from it."""
