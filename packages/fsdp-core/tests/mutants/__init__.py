"""A plugin of strategies that are wrong: the loopback backend, each time with one fault that the suite has to find."""
