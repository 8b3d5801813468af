"""`python -m hacpo_trl.recipes`: the same as `hacpo recipes`."""

from .commands.recipes import main


if __name__ == "__main__":
    main()
