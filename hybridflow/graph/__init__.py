"""One step of a dataflow as a graph, and its drawings.

The step itself runs, over real worker groups; behind them are stand-ins that answer with made-up columns (`backend.py`,
`stand_in.py`). `trace.py` is the resulting graph, and determines what runs concurrently; `text.py` and `svg.py` draw it
for a terminal and for a page.
"""
