"""`python -m hacpo_trl.evaluate`: the same as `hacpo evaluate`."""

from .commands.evaluate import main


if __name__ == "__main__":
    main()
