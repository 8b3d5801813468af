"""What a run shows: metrics, the terminal, timing; and `hacpo report`, a page of pictures and tables of its log.

For the page `runs.py` reads a log, `panels.py` computes what is drawn, `drawing.py` draws it, `page.py` puts it
together. May use `config.py`, `algorithm/` and what is below them.
"""
