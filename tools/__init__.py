"""What makes parts of this repository; nothing of it is installed."""
