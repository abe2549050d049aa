"""A small real backend for the CPU: parameters sharded by hand, with torch's public API and no sharding library.

The kit's own tests run on it, and it serves as an example. ``plugin.py`` describes the name, ``flat_shards.py`` cuts a
parameter; ``backend.py`` is the :class:`~fsdp_core.Backend`, ``sharded.py`` the :class:`~fsdp_core.Sharded`;
``trainer.py`` and ``fabric.py`` are the strategy classes. No entry point names it, so users don't see it in lists.
"""
