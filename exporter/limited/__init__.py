"""Work in a process of its own, with limits of memory and time: what others wrote cannot hang or crash us."""
