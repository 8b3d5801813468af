"""`python -m hacpo_trl.report`: the same as `hacpo report`."""

from .commands.report import main


if __name__ == "__main__":
    main()
