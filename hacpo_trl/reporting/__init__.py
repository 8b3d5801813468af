"""A page of pictures and tables from the logs of runs: `python -m hacpo_trl.report`.

runs.py      reads what a run has logged
panels.py    says what is drawn, and computes it
drawing.py   draws a panel
page.py      puts pictures and tables into one HTML page
"""
