"""How tensors are cut over ranks (layouts), copies from one layout to another (plans), checksums, random weights.

The one home of layout arithmetic: no process group, no GPU.
"""
