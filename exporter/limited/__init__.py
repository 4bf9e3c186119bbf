"""Run foreign code in a process with limits, so that it can neither hang nor crash this one."""
