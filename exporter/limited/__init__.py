"""Run other people's code in a process with limits of memory and time, so that it cannot hang ours."""
