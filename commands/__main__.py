"""`python -m gymckpt.commands`."""

from .app import main

if __name__ == "__main__":
    main()
