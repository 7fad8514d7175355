"""The package peft, imported as if TransformerEngine were absent, whose compiled part peft imports where it is found."""

import sys

_found = sys.modules.get("transformer_engine")
sys.modules["transformer_engine"] = None
try:
    import peft
finally:
    del sys.modules["transformer_engine"]
    if _found is not None:
        sys.modules["transformer_engine"] = _found

__all__ = ["peft"]
