"""``python -m fsdp_core`` runs the ``fsdp`` command where its script is not on ``PATH``."""

from fsdp_core.cli import main

if __name__ == "__main__":
    main()
