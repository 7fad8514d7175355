"""How tensors are cut over ranks (layouts), which copies lead from one layout to another (plans), random weights.

The one home of layout arithmetic: no process group, no GPU.
"""
