"""`python -m hacpo_trl`: the same as `hacpo`."""

from .commands.main import main


if __name__ == "__main__":
    main()
