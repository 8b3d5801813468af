"""`python -m hacpo_trl.train`: the same as `hacpo train`. Launchers start their processes with it."""

from .commands.train import main


if __name__ == "__main__":
    main()
