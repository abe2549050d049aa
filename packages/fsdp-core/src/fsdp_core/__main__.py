"""``python -m fsdp_core``: the ``fsdp`` command, where scripts are not on the path."""

from fsdp_core.cli import main

if __name__ == "__main__":
    main()
