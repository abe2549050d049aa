"""The checks of ``fsdp doctor``: facts about the environment, and what is wrong with them.

Whatever could crash, hang or end the process (a plugin, torch, Lightning) is checked in a separate process.
"""
