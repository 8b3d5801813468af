"""`python -m hacpo_trl.serve`: the same as `hacpo serve`."""

from .commands.serve import main


if __name__ == "__main__":
    main()
