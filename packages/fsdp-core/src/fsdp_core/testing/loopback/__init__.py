"""A small real backend, on the CPU: parameters sharded by hand, with what torch has in public and no sharding library.

The kit's own tests run on it, and it is there to be read. ``plugin.py`` says what the name stands for,
``flat_shards.py`` how a parameter is cut; ``backend.py`` is the :class:`~fsdp_core.Backend`, ``sharded.py`` the
:class:`~fsdp_core.Sharded`, ``trainer.py`` and ``fabric.py`` are the classes behind the name. No entry point names it,
so it is in no user's list.
"""
