"""What the command ``torchrun`` is, as a script that can be forked; test_documentation.py starts the command itself."""

from torch.distributed.run import main

if __name__ == "__main__":
    main()
