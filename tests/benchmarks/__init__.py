"""The speed suite: every figure is measured side by side with what it is compared to, in one run."""
