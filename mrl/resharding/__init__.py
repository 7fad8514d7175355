"""Parameter layouts, plans from one layout to another, and the weight sync from the actor to the engine.

Layouts and plans (`layout.py`, `plan.py`) are arithmetic and need no process group and no GPU; `transfer.py` and
`weight_sync.py` move the bytes.
"""
