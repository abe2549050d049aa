"""What ``fsdp doctor`` looks at: facts, none of which can take the command down, and what is wrong with them.

What could crash, hang or end the process (a plugin, torch, Lightning) is looked at in a process of its own.
"""
